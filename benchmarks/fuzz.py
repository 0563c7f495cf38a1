"""Whether spoilt files are told in one clear error: jobs, clusters, profiles and plans.

Each mutant is one of the good files with something done to its text (cut off, bytes flipped, lines
lost or doubled, aliases without end, ...) or to what it says (keys lost, misspelt or moved, numbers
negative, huge or a little off, names that are none, ...), and goes through a verb that takes such a
file, as far as to where ranks would be started. A few go through processes of their own besides,
which must end in the same way.

    python benchmarks/fuzz.py [--json] [--mutations 2000] [--content 0.6] [--seed 0]
        [--kind plan] [--show accepted]

Figures: `mutations`, `parsed` (of them valid YAML or JSON), `wrong_content` (of those refused);
`tracebacks`, `hangs` (over 30 s of a processor), `other_exits` (none of 0, 2, 3 and 4), `unplaced`
(errors that do
not name the file); `accepted`, `accepted_job`, `accepted_cluster`, ...; `processes`,
`differing` (from those that ran in a process of their own); `slowest_s`.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml

from common import make_parser, print_figures
from helpers.attacks.mutant_files import Good, write_all
from helpers.attacks.mutant_runs import LIMIT_S, PATIENCE, Ended, Worker, clean, environment, faults
from helpers.attacks.mutants import Mutant, mutants

SLOW_S = 10.0  # is told
WORKERS = 2
PROCESSES = 40  # of the mutants, as many as run in processes of their own


@dataclass(frozen=True)
class Try:
    """A mutant, what is run on it, and whether a process of its own must say the same."""

    number: int
    good: Good
    mutant: Mutant
    use: tuple[str, ...]
    twice: bool


@dataclass(frozen=True)
class Tried:
    of: Try
    done: Ended | None
    faults: list[str]
    differs: str = ""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--content", type=float, default=0.6, help="part that stays YAML or JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="only job, cluster, profile or plan")
    parser.add_argument("--show", default="", help="print mutants with `accepted` or `refused`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"{n}" / "a" / "files" for n in range(WORKERS)]
        files, *_ = [write_all(folder) for folder in folders]
        files = [good for good in files if arguments.kind in (None, good.kind)]
        tries = list(_drawn(files, arguments.mutations, arguments.content, arguments.seed))
        found = _tried(tries, folders, arguments.show)
    print_figures(_figures(found), as_json=arguments.json)


def _drawn(files: list[Good], number: int, content: float, seed: int) -> Iterator[Try]:
    """As many of each kind, and of each kind as many of each file."""
    rng = random.Random(seed)
    sources = {good.name: mutants(good.text, good.form, rng, content) for good in files}
    kinds = sorted({good.kind for good in files})
    twice = set(rng.sample(range(number), min(PROCESSES, number)))
    for n in range(number):
        good = rng.choice([good for good in files if good.kind == kinds[n % len(kinds)]])
        use = rng.choice(good.uses)
        if rng.random() < 0.5:
            use = (*use, "--json")
        yield Try(n, good, next(sources[good.name]), use, n in twice)


def _tried(tries: list[Try], folders: list[Path], show: str) -> list[Tried]:
    kept = [path.name for path in folders[0].iterdir()]
    idle: SimpleQueue[Worker] = SimpleQueue()
    workers = [Worker(folder) for folder in folders]
    for worker in workers:
        idle.put(worker)

    def one(tried: Try) -> Tried:
        worker = idle.get()
        try:
            found = _run(tried, worker, kept)
        finally:
            idle.put(worker)
        _print(found, show)
        return found

    with ThreadPoolExecutor(len(folders)) as pool:
        found = list(pool.map(one, tries))
    for worker in workers:
        worker.close()
    return found


def _run(tried: Try, worker: Worker, kept: list[str]) -> Tried:
    path = worker.folder / tried.good.name
    path.write_bytes(tried.mutant.content)
    try:
        done = worker.run(tried.use)
        clean(worker.folder, kept)
        found = faults(done, tried.good.named_by(tried.use))
        differs = _differs(tried, done, worker.folder) if done is not None and tried.twice else ""
    finally:
        clean(worker.folder, kept)
        path.write_text(tried.good.text, encoding="utf-8")
    return Tried(tried, done, found, differs)


def _differs(tried: Try, done: Ended, folder: Path) -> str:
    """How a process of its own ends otherwise; who comes as far as ranks is not started again."""
    if done.launched:
        return ""
    real = subprocess.run(
        [sys.executable, "-m", "gpumix", *tried.use],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        timeout=PATIENCE * LIMIT_S,
        check=False,
    )
    same = (real.returncode, real.stderr.decode()) == (done.code, done.err)
    return "" if same else f"{real.returncode}: {real.stderr.decode()}"


def _print(found: Tried, show: str) -> None:
    """What is wrong, for people; and what they ask for."""
    done, told = found.done, ", ".join(found.faults)
    if found.differs:
        told += f"otherwise in a process of its own: {found.differs}"
    if not told and done is not None:
        told = "slow" if done.seconds > SLOW_S else "accepted" if done.code == 0 else "refused"
        if told not in f"slow {show}":
            return
        told += f" ({done.seconds:.1f} s)"
    of = found.of
    code, err = ("-", "") if done is None else (done.code, done.err)
    said = err[err.find("gpumix: ") :] if code else ""
    print(f"{of.number} {told}: {of.good.name} {of.mutant.change}", flush=True)
    print(f"    {shlex.join(of.use)} -> {code}: {said.rstrip()[:600]}", flush=True)


def _figures(found: list[Tried]) -> dict[str, int | float | str | bool]:
    counts = Counter(fault for one in found for fault in one.faults)
    accepted = Counter(one.of.good.kind for one in found if one.done and one.done.code == 0)
    parsed = [one for one in found if _parses(one.of)]
    return {
        "mutations": len(found),
        "parsed": len(parsed),
        "wrong_content": sum(one.done is None or one.done.code != 0 for one in parsed),
        "tracebacks": counts["traceback"],
        "hangs": counts["hang"],
        "unplaced": counts["unplaced"],
        "other_exits": counts["other exit"],
        "accepted": accepted.total(),
        **{f"accepted_{kind}": number for kind, number in sorted(accepted.items())},
        "processes": sum(one.of.twice for one in found),
        "differing": sum(bool(one.differs) for one in found),
        "slowest_s": round(max(one.done.seconds if one.done else LIMIT_S for one in found), 1),
    }


def _parses(tried: Try) -> bool:
    """As any reader of such files sees it."""
    content = tried.mutant.content
    if len(content) > 1_000_000 or (b"*" in content and b"&" in content):
        return False
    try:
        json.loads(content) if tried.good.form == "json" else yaml.safe_load(content)
    except Exception:  # PyYAML raises whatever comes
        return False
    return True


if __name__ == "__main__":
    main()
