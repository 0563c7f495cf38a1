"""What checkpoints cost a run, and whether a damaged one is ever taken.

Trains a model of 21 M parameters on four emulated devices that save every few steps; compares the
time that training stood still with that of a step, and the bytes written in a second with those of
plain files, which as many processes write in the same minute. Loads what was saved under other
plans. Then damages checkpoints of one rank, and of four, again and again: bits flipped, files cut
short, emptied, removed, exchanged with each other or with those of another checkpoint; each time
the one before it must be taken, to the bit.

    python benchmarks/checkpoint.py [--json] [--corruptions 500] [--saves 7]

Figures: `stall_fraction` (median over saves, of a step), `worst_stall_fraction`, `write_vs_disk`
(bytes a second with digests, against plain files; beside training, whose ranks use the same cores),
`write_vs_disk_idle` (the same while nothing trains), `load_s_same`, `load_s_two`, `load_s_alone`
(under that plan, by two other ranks, by one), `bytes`; `corruptions`, `detected`, `loaded`,
`fell_back` (of those detected: the one before was taken).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import common  # finds the tests' modules
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import DataSpec, Job, ModelSpec
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.train.controller import JobController
from gpumix.train.processes.local_launcher import RankAddress, launch
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.rank_setup.context import Task, join_run
from gpumix.train.trainer_builder import build_trainer
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    UNEVEN,
    assert_same,
    blank,
    checkpointer,
    model_values,
    trained,
)
from helpers.training.reference import Share

EVERY = 4  # steps
MEMORY_BYTES = 2**30  # of each device
FOUR = {"fast": (2, 60e9), "slow": (2, 30e9)}
OTHERS = {"two": {"other": (1, 60e9), "old": (1, 30e9)}, "alone": {"single": (1, 60e9)}}
GPT = common.small_gpt2(512, positions=32, layers=6, heads=8)
ALONE = [Share(6, 2, 1)]


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--corruptions", type=int, default=500)
    parser.add_argument("--saves", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = _costs(Path(name), arguments.saves)
    with tempfile.TemporaryDirectory() as name:
        figures |= _damage(Path(name), arguments.corruptions)
    common.print_figures(figures, as_json=arguments.json)


# -- what they cost --------------------------------------------------------------------------------


def saving(
    seat: RankAddress, task: Task, plan: Plan, devices: tuple[Device, ...], saves: int
) -> list[dict[str, Any]]:
    """In one rank: what each save took, beside steps."""
    with join_run(seat, task) as context:
        trainer = build_trainer(context, plan.for_devices([d.id for d in devices]))
        found, alone = [], []
        with trainer.loader:
            for _ in range(2):
                trainer.train_step()
            for _ in range(saves):
                trainer._begin_save()
                while trainer.keeping.checkpointer.under_way:
                    trainer.train_step()
                    # All ranks go on alike.
                    ended = (
                        trainer.keeping.checkpointer.written or trainer.keeping.checkpointer.failed
                    )
                    if "False" not in context.ranks.gather("ended", str(ended)):
                        saved = trainer._finish_save()
                alone += [trainer.train_step().step_s for _ in range(EVERY)]
                stalled_s = trainer.keeping.stalled_s
                trainer._begin_save()
                idle_s = trainer._finish_save().seconds
                found.append({"stalled_s": stalled_s, "seconds": saved.seconds, "idle_s": idle_s})
        return [one | {"step_s": median(alone)} for one in found]


def loading(
    seat: RankAddress, task: Task, plan: Plan, devices: tuple[Device, ...], source: str
) -> float:
    """Seconds, in one rank."""
    with join_run(seat, task) as context:
        trainer = build_trainer(context, plan.for_devices([d.id for d in devices]))
        context.ranks.gather("ready", "")
        begun = time.perf_counter()
        trainer.keeping.checkpointer.load(trainer.engine, trainer.optimizer, source=Path(source))
        return time.perf_counter() - begun


def _costs(folder: Path, saves: int) -> dict[str, Any]:
    job = _job(folder / "run")
    four = common.emulated_cluster(FOUR, memory_bytes=MEMORY_BYTES)
    plan = _planned(job, four, folder)
    devices = four.in_rank_order()
    by_rank = launch(saving, devices, Task(job, four, folder), plan, devices, saves)
    (saved, *_) = sorted((folder / "run" / "checkpoints").iterdir())
    sizes = [file.stat().st_size for file in saved.glob("*.distcp")]
    stalls = [max(r[n]["stalled_s"] for r in by_rank) for n in range(saves)]
    step_s = median(one["step_s"] for one in by_rank[0])
    written_s = median(one["seconds"] for one in by_rank[0])
    idle_s = median(one["idle_s"] for one in by_rank[0])
    plain_s = median(_plain_s(folder, sizes) for _ in range(5))
    for number, (stall, one) in enumerate(zip(stalls, by_rank[0])):
        print(
            f"save {number}: training stood still for {stall * 1e3:.1f} ms of steps of "
            f"{step_s * 1e3:.0f} ms; written in {one['seconds']:.2f} s"
        )
    figures = {
        "stall_fraction": round(median(stalls) / step_s, 4),
        "worst_stall_fraction": round(max(stalls) / step_s, 4),
        "write_vs_disk": round(plain_s / written_s, 3),
        "write_vs_disk_idle": round(plain_s / idle_s, 3),
        "step_s": round(step_s, 3),
        "bytes": sum(sizes),
    }
    for name, cluster in {
        "same": four,
        **{n: common.emulated_cluster(c, memory_bytes=MEMORY_BYTES) for n, c in OTHERS.items()},
    }.items():
        devices = cluster.in_rank_order()
        task = Task(job, cluster, folder)
        own = plan if name == "same" else _planned(job, cluster, folder)
        seconds = launch(loading, devices, task, own, devices, str(saved))
        figures[f"load_s_{name}"] = round(max(seconds), 3)
    return figures


def _plain_s(folder: Path, sizes: Sequence[int]) -> float:
    """Files of these sizes, written at once and synced."""
    content = os.urandom(max(sizes))

    def write(number: int) -> None:
        with (folder / f"plain-{number}").open("wb") as stream:
            stream.write(memoryview(content)[: sizes[number]])
            stream.flush()
            os.fsync(stream.fileno())

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(sizes)) as pool:
        list(pool.map(write, range(len(sizes))))
    return time.perf_counter() - begun


def _planned(job: Job, cluster: Cluster, folder: Path) -> Plan:
    pipeline = JobController(job.model_copy(update={"cluster": cluster}), folder, LocalRunner())
    return pipeline.plan(pipeline.profile())


def _job(output: Path) -> Job:
    return Job(
        model=ModelSpec(config=GPT),
        data=DataSpec(text=(common.TEXT,), pattern="*.py"),
        sequence_length=32,
        global_batch_size=16,
        max_steps=1000,
        save_total_limit=1,
        techniques=Space(max_pipeline_stages=1, tensor_parallel_size=(1,), leave_out=False),
        output_dir=output,
    )


# -- damage ----------------------------------------------------------------------------------------


def _damage(folder: Path, times: int) -> dict[str, Any]:
    """Of runs of three checkpoints the newest is damaged; the third is of other values."""
    wanted = {"one": _saved(folder / "one", ALONE)}
    (wanted["four"], *_) = run_ranks(_saved, len(UNEVEN), folder / "four", UNEVEN)
    newest, rng, seen = "step-00000003", random.Random(0), Counter[str]()
    for number in range(times):
        copy, run = folder / "copy", ("one", "four")[number % 2]
        shutil.copytree(folder / run, copy)
        harm = rng.choice(HARMS)
        harm(copy / newest, rng)
        found, _ = loaded = blank(ALONE)
        try:
            state = checkpointer(copy).load(*loaded)
        except InputError as error:
            print(f"{number}: {harm.__name__}: {error}")
            seen["detected"] += 1
        else:
            if state.path.name == newest:
                seen["loaded"] += 1
                print(f"{number}: {harm.__name__} was not seen")
            else:
                assert_same(model_values(found), wanted[run])
                seen["detected"] += 1
                seen["fell_back"] += 1
        shutil.rmtree(copy)
    kinds = ("detected", "loaded", "fell_back")
    return {"corruptions": times, **{kind: seen[kind] for kind in kinds}}


def _saved(folder: Path, shares: Sequence[Share]) -> dict[str, Any]:
    """Three checkpoints; the model of the second one. Collective."""
    engine, optimizer = trained(shares)
    saver = checkpointer(folder, keep=3)
    for step in (1, 2, 3):
        saver.save(step, engine, optimizer, cursor={"position": step})
        if step == 2:
            wanted = model_values(engine)
        engine.load_state_dict({n: v * 1.5 for n, v in engine.state_dict().items()})
    return wanted


def _some(path: Path, rng: random.Random) -> Path:
    """A file that holds something: that of a rank which stores nothing is empty."""
    return rng.choice(sorted(file for file in path.iterdir() if file.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    file = _some(path, rng)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    file = _some(path, rng)
    os.truncate(file, rng.randrange(file.stat().st_size))


def empty(path: Path, rng: random.Random) -> None:
    _some(path, rng).write_bytes(b"")


def zeros(path: Path, rng: random.Random) -> None:
    """As a disk leaves it that lost power: of the right length."""
    file = _some(path, rng)
    content = bytearray(file.read_bytes())
    begin = rng.randrange(len(content))
    content[begin:] = bytes(len(content) - begin)
    file.write_bytes(content)


def lengthen(path: Path, rng: random.Random) -> None:
    with _some(path, rng).open("ab") as stream:
        stream.write(rng.randbytes(rng.randrange(1, 100)))


def remove(path: Path, rng: random.Random) -> None:
    rng.choice(sorted(path.iterdir())).unlink()


def exchange(path: Path, rng: random.Random) -> None:
    """Two files of one checkpoint."""
    one, other = rng.sample(sorted(path.iterdir()), 2)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def take_from_another(path: Path, rng: random.Random) -> None:
    """A file of the checkpoint before."""
    file = _some(path, rng)
    before = path.with_name("step-00000002") / file.name
    if before.read_bytes() == file.read_bytes():  # both may have the same index
        return flip(path, rng)
    shutil.copy(before, file)
    return None


HARMS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, flip, cut, cut, empty, zeros, lengthen, remove, exchange, take_from_another,
)  # fmt: skip


if __name__ == "__main__":
    main()
