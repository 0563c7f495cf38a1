"""What one GPU proves of gpumix in seven minutes; `docs/gpu-proof.md` says how to read it.

Stages by worth: does it start, does it train right, how fast, is it as predicted, unequal ranks on
one card, out of memory, killed and resumed, the commands, the checks, adapters. Each is a process
with a limit; results are written at once, and a call that was cut off goes on with `--done`.

    python benchmarks/gpu_proof.py --out OUT [--done FILE] [--budget 420] [--json]
    python benchmarks/gpu_proof.py --cpu           # a rehearsal of all stages with tiny shapes

The last line has `stages` (that ended), `failed` (lines that are not well), `skipped`, `not_tested`
(bars that count on a GPU alone) and `seconds`; that of `--json` also all other figures, by stage,
measurement and name. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
for folder in (BENCHMARKS.parent / "src", BENCHMARKS.parent / "tests", BENCHMARKS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from common import make_parser, print_figures  # noqa: E402
from proof.card import first_card  # noqa: E402
from proof.command import SUMMARY, Proof, Wanted, take_sigterm  # noqa: E402
from proof.entry import run  # noqa: E402
from proof.lines import Place, Stamp  # noqa: E402
from proof.stages import STAGES  # noqa: E402
from proof.starter import Starter  # noqa: E402

BUDGET_S, REHEARSAL_S = 420.0, 1200.0
# Of all processes, unless somebody has set it: the driver is asked by NVML, which makes no context
# that forks would inherit; and nothing looks for a network.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def main() -> int:
    arguments = _arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if arguments.rank:
        from proof.rank import main as serve

        serve()
    if arguments.task:
        run(pickle.loads(base64.b64decode(arguments.task)))
    place = _place(arguments)
    if place is None:
        told = "no GPU is here: nothing was measured (--cpu rehearses the script)"
        print(told, file=sys.stderr)
        print_figures({"stages": 0, "failed": 0, "seconds": 0.0}, as_json=arguments.json)
        return 2
    if arguments.done is not None and not arguments.done.is_file():
        sys.exit(f"--done {arguments.done}: there is no such file")
    take_sigterm()
    stamp = Stamp(_device(place), _torch_version(), arguments.commit or _commit())
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-proof-results-"))
    budget_s = arguments.budget or (BUDGET_S if place == "gpu" else REHEARSAL_S)
    wanted = Wanted(place, out.absolute(), arguments.done, budget_s, stamp, arguments.only)
    starter = Starter(place, stamp, forks=not arguments.exec)
    figures = Proof(wanted, STAGES, starter).run()
    print(f"lines: {wanted.out}", file=sys.stderr)
    told = figures if arguments.json else {name: figures[name] for name in SUMMARY}
    print_figures(told, as_json=arguments.json)
    return int(figures["failed"] > 0)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder of results.jsonl and log.txt")
    parser.add_argument("--done", type=Path, help="results.jsonl of earlier calls, to go on from")
    parser.add_argument("--budget", type=float, help="seconds for all stages; 420 on a GPU")
    parser.add_argument("--cpu", action="store_true", help="rehearse with tiny shapes on the CPU")
    parser.add_argument("--test-device", action="store_true", help="rehearse on the tests' device")
    parser.add_argument("--only", nargs="*", default=[], choices=[one.name for one in STAGES])
    parser.add_argument("--commit", default="", help="of the code; default: what git says")
    parser.add_argument("--exec", action="store_true", help="start each stage, instead of forking")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _place(arguments: argparse.Namespace) -> Place | None:
    if arguments.test_device:
        _use_test_device()
        return "test device"
    if arguments.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks
        return "cpu"
    _hide_other_gpus()
    if first_card() is not None:
        return "gpu"
    ask = "import torch; print(torch.cuda.is_available(), torch.version.hip)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    seen, *hip = done.stdout.split() or [""]
    if seen == "True" and hip != ["None"]:
        sys.exit("this script measures NVIDIA's GPUs; for others see docs/unproven.md")
    return "gpu" if seen == "True" else None


def _hide_other_gpus() -> None:
    """Let all processes see one GPU: the first of CUDA_VISIBLE_DEVICES, or of the host."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the driver's own
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith("MIG-"):
        sys.exit("a slice of a GPU (MIG) is not measured: give the script a whole one")
    os.environ["CUDA_VISIBLE_DEVICES"] = first


def _use_test_device() -> None:
    """Let all processes that are started have a CUDA device without a GPU: the one of the tests."""
    from cuda_device import environment
    from cuda_device.build import BuildError, library

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # tests on the CPU hide all GPUs
    try:
        os.environ.update(environment(library(), devices="1"))
    except BuildError as error:
        sys.exit(f"there is no CUDA device for tests: {error}")


def _device(place: Place) -> str:
    if place != "gpu":
        return place
    card = first_card()
    return card.name if card is not None else "a GPU without NVML"


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of this code; a digest of its files where git does not tell."""
    if told := os.environ.get("GPU_PROOF_COMMIT"):
        return told
    root = BENCHMARKS.parent
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode == 0:
            return done.stdout.strip()[:12]
    except (OSError, subprocess.TimeoutExpired):
        pass
    digest = hashlib.sha256()
    for file in sorted([*root.glob("src/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        digest.update(file.read_bytes())
    return f"files-{digest.hexdigest()[:12]}"


if __name__ == "__main__":
    sys.exit(main())
