"""Times the collectives of the engine between the ranks that will run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from gpumix.engine.comm import Communicator
from gpumix.spec.curve import Curve
from gpumix.spec.plan import Collectives, GatherForm, ReduceForm, cut
from gpumix.spec.profile import CollectiveTimes, LinkMeasurement
from gpumix.spec.units import show_bytes

REPEATS = 5
SMALLEST_BYTES = 64 * 1024
# Small collectives in a step that nothing hides: losses, and the gradient norm.
SMALL_PER_STEP = 2


def measure_links(
    comm: Communicator, *, largest_bytes: int, progress: Callable[[str], None]
) -> LinkMeasurement:
    """Time every form of gather and reduction that the backend has, at growing sizes.

    Collective: every rank calls it, and gets the same result, the slowest rank's times.

    Args:
        largest_bytes: of the largest buffer of interest.
    """
    begun = time.perf_counter()
    if comm.world == 1:
        return LinkMeasurement(
            collectives=Collectives(), network=(), step_overhead_s=0.0, seconds_spent=0.0
        )
    nccl = not comm.on_gloo
    gathers: list[GatherForm] = ["list", "broadcast"] if nccl else ["broadcast"]
    reduces: list[ReduceForm] = ["list", "all_to_all"] if nccl else ["all_to_all"]
    sizes = _sizes(largest_bytes)
    gather_s = {form: [_gather_s(comm, form, n) for n in sizes] for form in gathers}
    reduce_s = {form: [_reduce_s(comm, form, n) for n in sizes] for form in reduces}
    # `native` is for equal shares, and used there in any case; the choice is among the others.
    best = Collectives(
        gather=min(gathers, key=lambda form: gather_s[form][-1]),
        reduce=min(reduces, key=lambda form: reduce_s[form][-1]),
    )
    if nccl:
        gather_s["native"] = [_gather_s(comm, "native", n) for n in sizes]
        reduce_s["native"] = [_reduce_s(comm, "native", n) for n in sizes]
    progress(f"all-gather by {best.gather}: {_rate(sizes[-1], gather_s[best.gather][-1])}")
    progress(f"reduction by {best.reduce}: {_rate(sizes[-1], reduce_s[best.reduce][-1])}")
    return LinkMeasurement(
        collectives=best,
        network=(
            *(_times("gather", form, sizes, seconds) for form, seconds in gather_s.items()),
            *(_times("reduce", form, sizes, seconds) for form, seconds in reduce_s.items()),
        ),
        step_overhead_s=SMALL_PER_STEP * _small_s(comm),
        seconds_spent=time.perf_counter() - begun,
    )


def _sizes(largest_bytes: int) -> list[int]:
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 8 < largest_bytes:
        sizes.append(sizes[-1] * 8)
    # The last two are far enough apart that noise does not look like a slope.
    if largest_bytes >= 2 * sizes[-1]:
        return [*sizes, largest_bytes]
    return [*sizes[:-1], max(sizes[-1], largest_bytes)]


def _gather_s(comm: Communicator, form: GatherForm, size: int) -> float:
    numel, offsets = _layout(comm, size, even=form == "native")
    full = torch.zeros(numel, device=comm.device)
    shard = torch.zeros(offsets[comm.rank + 1] - offsets[comm.rank], device=comm.device)
    trial = _with_forms(comm, Collectives(gather=form))
    return _agreed_s(comm, lambda: trial.gather(full, shard, offsets, "trial gather").wait())


def _reduce_s(comm: Communicator, form: ReduceForm, size: int) -> float:
    numel, offsets = _layout(comm, size, even=form == "native")
    full = torch.zeros(numel, device=comm.device)
    out = torch.zeros(offsets[comm.rank + 1] - offsets[comm.rank], device=comm.device)
    trial = _with_forms(comm, Collectives(reduce=form))

    def deliver(rows: torch.Tensor) -> None:
        torch.sum(rows, 0, out=out)

    return _agreed_s(comm, lambda: trial.reduce(full, offsets, "trial reduction", deliver).wait())


def _small_s(comm: Communicator) -> float:
    value = torch.zeros(2, device=comm.device)
    return _agreed_s(comm, lambda: comm.all_reduce(value, "trial all-reduce"))


def _layout(comm: Communicator, size: int, *, even: bool) -> tuple[int, tuple[int, ...]]:
    """Elements of the buffer, and its cuts: equal ones, or one element off."""
    part = -(-size // 4 // comm.world)
    numel = part * comm.world
    offsets = list(cut(numel, (1.0 / comm.world,) * comm.world))
    if not even:
        offsets[1] += 1
    return numel, tuple(offsets)


def _with_forms(comm: Communicator, forms: Collectives) -> Communicator:
    return Communicator(
        comm.group, rank=comm.rank, world=comm.world, forms=forms, device=comm.device
    )


def _agreed_s(comm: Communicator, work: Callable[[], object]) -> float:
    """Median seconds of `work`, of the slowest rank; the first run is not counted."""
    seconds = []
    for _ in range(1 + REPEATS):
        table, exchanged = comm.exchange(torch.zeros(1, device=comm.device), "trial barrier")
        exchanged.wait()
        _synchronize(comm.device)
        begun = time.perf_counter()
        work()
        _synchronize(comm.device)
        seconds.append(time.perf_counter() - begun)
    mine = torch.tensor([sorted(seconds[1:])[REPEATS // 2]], device=comm.device)
    table, exchanged = comm.exchange(mine, "exchange of times")
    exchanged.wait()
    return float(table.max())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(
    operation: Literal["gather", "reduce"], form: str, sizes: list[int], seconds: list[float]
) -> CollectiveTimes:
    curve = Curve(sizes=tuple(map(float, sizes)), values=tuple(seconds))
    return CollectiveTimes(operation=operation, form=form, times=curve)


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s at {show_bytes(size)}"
