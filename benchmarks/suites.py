"""Do the tests that other projects wrote for their classes pass with gpumix's in their place?

Tests of `transformers` (Trainer), Accelerate, TRL (SFTTrainer) and Lightning are run as they are,
and those that pass once more with gpumix's classes in the place of the stock ones. Their sources
are given by path; nothing is fetched.

    python benchmarks/suites.py --transformers PATH --accelerate PATH --trl PATH --lightning PATH
    python benchmarks/suites.py --sources FOLDER    which has folders of these names
        [--json] [--only REGEX] [--part 3/8] [--list VERDICT] [--limit SECONDS]
        [--out FILE]    one line of JSON for each test and side; what is in it is not tried again

Packages that only the tests import are found by PYTHONPATH. Figures, in total and by suite:
`tests` (skipped ones aside), `passed_by_stock`, of these `with_our_classes`, `passed_by_ours`,
`refused_as_documented`, `differs_as_documented` (docs/suites.md says why) and `failed`; beside
them `needs_network`, `failed_by_stock` and `skipped_by_stock`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from suites_of import results

LIMIT_S = 60.0
# In the sources of each suite: where tests are run, and which.
TESTS = {
    "transformers": (".", ["tests/trainer"]),
    "accelerate": (".", ["tests"]),
    "trl": (".", ["tests/test_sft_trainer.py"]),
    "lightning": (
        "tests",
        [
            f"tests_pytorch/{name}"
            for name in ("trainer", "loops", "checkpointing", "models", "callbacks", "core")
        ],
    ),
}
UNTHREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}


def main() -> int:
    arguments = _arguments()
    sources = _sources(arguments)
    with tempfile.TemporaryDirectory(prefix="suites-") as folder:
        out = arguments.out or Path(folder) / "lines.jsonl"
        os.environ["HF_HOME"] = folder  # the hub that tests see
        for suite, path in sources.items():
            for side in ("stock", "ours"):
                _run(suite, side, path, out.resolve(), arguments)
        lines = results.read(out)
    figures = results.figures_of(lines, list(sources))
    for (suite, test), verdict in sorted(results.verdicts(lines).items()):
        if verdict == arguments.list:
            print(suite, test, file=sys.stderr)
    common.print_figures(figures, as_json=arguments.json)
    return int(bool(figures["failed"]))


def _run(suite: str, side: str, path: Path, out: Path, arguments: argparse.Namespace) -> None:
    """All tests of a suite on one side, of which each adds a line."""
    folder, tests = TESTS[suite]
    told = {
        "suite": suite,
        "side": side,
        "out": out,
        "only": arguments.only,
        "part": arguments.part,
        "limit": arguments.limit,
    }
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-p", "suites_of.plugin", "-p", "no:cacheprovider"),
        *(
            "-o",
            "addopts=",
            "-o",
            "log_cli=false",
            "-q",
            "--no-header",
            "--continue-on-collection-errors",
        ),
        *(f"--suites-{name}={value}" for name, value in told.items()),
        *tests,
    ]
    # Sources that have the package itself: the one that is installed is tested.
    paths = () if (path / suite).is_dir() else (path / folder, path)
    environment = common.environment(*paths) | UNTHREADED | {"SUITES_PACKAGE": suite}
    subprocess.run(command, cwd=path / folder, env=environment, stdout=sys.stderr, check=False)


def _sources(arguments: argparse.Namespace) -> dict[str, Path]:
    found = {name: getattr(arguments, name) for name in TESTS}
    if arguments.sources is not None:
        for name in TESTS:
            found[name] = found[name] or arguments.sources / name
    return {
        name: path.resolve() for name, path in found.items() if path is not None and path.exists()
    }


def _arguments() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    for name in TESTS:
        parser.add_argument(f"--{name}", type=Path, help="its unpacked sources")
    parser.add_argument("--sources", type=Path, help="folder with one folder for each suite")
    parser.add_argument("--only", default="", help="tests whose name a regular expression finds")
    parser.add_argument("--part", default="1/1", help="every so manieth test: 3/8")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one test")
    parser.add_argument("--list", default="", help="name the tests with this verdict: failed")
    parser.add_argument("--out", type=Path, help="file of results, gone on with if it is there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
