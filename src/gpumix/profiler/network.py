"""Measurement of the engine's collectives between the ranks that will run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Literal

import torch

from gpumix.cost.network.link_times import Operation
from gpumix.engine.comm.communicator import Communicator, Pending
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.hardware.runtime import synchronize
from gpumix.schema.cluster.cluster import Device, sort_in_rank_order
from gpumix.schema.cluster.link_islands import (
    MOST_DEVICES,
    MOST_HOSTS,
    PairTimes,
    add_found_islands,
)
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Collectives, GatherForm, ReduceForm
from gpumix.schema.plan.splitting import ShardIntervals, compute_shard_offsets
from gpumix.schema.profile.measurements import LinkMeasurement
from gpumix.schema.profile.profile import CollectiveTimes, RankGroup
from gpumix.schema.units import show_bytes

RankPair = tuple[int, int]

REPEATS = 5
SMALLEST_BYTES = 64 * 1024
# Small exposed collectives per step: losses, and the gradient norm.
SMALL_PER_STEP = 2
# For a message between two devices: enough to distinguish bandwidths.
PAIR_BYTES, PAIR_REPEATS = 8 * 1024**2, 3
# Minimum and maximum rows of the square matrices multiplied during a collective, and minimum
# seconds of a product: a GPU takes longer to launch a small product than to compute it, on a few of
# its cores, which does not slow a collective.
MIN_PRODUCT_ROWS, MAX_PRODUCT_ROWS = 192, 4096
PRODUCT_S = 2e-4


def measure_links(
    comm: Communicator,
    *,
    largest_bytes: int,
    progress: Callable[[str], None],
    devices: Sequence[Device] = (),
    each_two: bool = False,
    synchronize: Callable[[], None] | None = None,
    degrees: Mapping[str, Sequence[int]] | None = None,
) -> LinkMeasurement:
    """Time every form of gather and reduction of the backend, at growing sizes.

    Collective: every rank calls it, and gets one result, the slowest rank's times.

    Args:
        largest_bytes: of the largest buffer of interest.
        devices: the device of each rank. On several hosts, the links inside and between hosts are
            timed separately too.
        each_two: time messages between all pairs, and collectives inside the islands and racks
            found by these times.
        synchronize: waits for the device's computation; without it contention is not measured.
        degrees: the tensor-parallel degrees by class.
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
    # `native` is always used for equal shares; the choice is among the other forms.
    best = Collectives(
        gather=min(gathers, key=lambda form: gather_s[form][-1]),
        reduce=min(reduces, key=lambda form: reduce_s[form][-1]),
    )
    if nccl:
        gather_s["native"] = [_gather_s(comm, "native", n) for n in sizes]
        reduce_s["native"] = [_reduce_s(comm, "native", n) for n in sizes]
    contention = 0.0
    if synchronize is not None:
        contention = _contention(_with_forms(comm, best), sizes[-1], synchronize)
        progress(f"communication and computing overlap by {1 - contention:.0%}")
    progress(f"all-gather by {best.gather}: {_rate(sizes[-1], gather_s[best.gather][-1])}")
    progress(f"reduction by {best.reduce}: {_rate(sizes[-1], reduce_s[best.reduce][-1])}")
    pairs = tuple(_pairs(comm, devices, largest_bytes)) if each_two else ()
    found = {device.id: device for device in add_found_islands(sort_in_rank_order(devices), pairs)}
    devices = [found[device.id] for device in devices]
    hosts = [device.host for device in devices]
    return LinkMeasurement(
        collectives=best,
        network=(
            *(_times("gather", form, sizes, seconds) for form, seconds in gather_s.items()),
            *(_times("reduce", form, sizes, seconds) for form, seconds in reduce_s.items()),
            _times("sum", "native", sizes, [_sum_s(comm, n, agree=comm) for n in sizes]),
            *_time_hosts(comm, hosts, best, sizes),
            *_time_islands_and_racks(comm, devices, best, sizes),
            *_time_sends(comm, hosts, sizes),
            *_time_tensor_parallel(comm, find_tensor_parallel_ranks(devices, degrees or {}), sizes),
        ),
        pairs=pairs,
        step_overhead_s=SMALL_PER_STEP * _time_small_all_reduce(comm),
        contention=contention,
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


def _gather_s(
    comm: Communicator, form: GatherForm, size: int, agree: Communicator | None = None
) -> float:
    intervals = _layout(comm, size, even=form == "native")
    full = torch.zeros(intervals.numel, device=comm.device)
    shard = torch.zeros(intervals.sizes[comm.rank], device=comm.device)
    trial = _with_forms(comm, Collectives(gather=form))
    return _time_slowest_rank(
        agree or comm, lambda: trial.gather(full, shard, intervals, "trial gather").wait()
    )


def _reduce_s(
    comm: Communicator, form: ReduceForm, size: int, agree: Communicator | None = None
) -> float:
    intervals = _layout(comm, size, even=form == "native")
    full = torch.zeros(intervals.numel, device=comm.device)
    out = torch.zeros(intervals.sizes[comm.rank], device=comm.device)
    trial = _with_forms(comm, Collectives(reduce=form))

    def deliver(rows: torch.Tensor) -> None:
        torch.sum(rows, 0, out=out)

    return _time_slowest_rank(
        agree or comm, lambda: trial.reduce(full, intervals, "trial reduction", deliver).wait()
    )


def _contention(comm: Communicator, size: int, synchronize: Callable[[], None]) -> float:
    """Return the mutual slowdown of a gather and a matrix product, as a fraction of the shorter."""
    intervals = _layout(comm, size, even=False)
    full = torch.zeros(intervals.numel, device=comm.device)
    shard = torch.zeros(intervals.sizes[comm.rank], device=comm.device)
    rows = product_rows(lambda rows: _product_s(comm.device, rows))
    square = torch.zeros(rows, rows, device=comm.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(square, square)
        synchronize()

    def gather() -> Pending:
        return comm.gather(full, shard, intervals, "trial gather")

    def at_once(times: int) -> None:
        under_way = gather()
        compute(times)
        under_way.wait()

    moved = _time_slowest_rank(comm, lambda: gather().wait())
    once = _time_slowest_rank(comm, lambda: compute(1))
    times = max(1, round(moved / once))
    computed = _time_slowest_rank(comm, lambda: compute(times))
    both = _time_slowest_rank(comm, lambda: at_once(times))
    lost = (both - max(moved, computed)) / min(moved, computed)
    return min(1.0, max(0.0, lost))


def product_rows(time_product: Callable[[int], float]) -> int:
    """Return the rows of square matrices with a product of at least `PRODUCT_S`, or of the largest
    that fit; ranks may differ.

    Args:
        time_product: seconds of a product of matrices of a number of rows.
    """
    rows = MIN_PRODUCT_ROWS
    taken_s = time_product(rows)
    while rows < MAX_PRODUCT_ROWS and taken_s < PRODUCT_S:
        larger = min(2 * rows, MAX_PRODUCT_ROWS)
        try:
            taken_s = time_product(larger)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return rows
        rows = larger
    return rows


def _product_s(device: torch.device, rows: int) -> float:
    """Return the seconds of a product of square matrices, the shortest of some."""
    square, seconds = torch.zeros(rows, rows, device=device), []
    for _ in range(REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        torch.mm(square, square)
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _time_hosts(
    comm: Communicator, hosts: Sequence[str], best: Collectives, sizes: list[int]
) -> Iterator[CollectiveTimes]:
    """Yield collectives inside each host, all hosts at once, and sums over hosts, all devices at
    once.

    Nothing if there is only one host, or no host has two devices.
    """
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    if len(set(hosts)) < 2 or max(places) == 0:
        return
    inside = comm.subgroup([[r for r, h in enumerate(hosts) if h == x] for x in _unique(hosts)])
    yield from _all_forms(inside, "inside", best, sizes, agree=comm)
    across = comm.subgroup([[r for r, p in enumerate(places) if p == x] for x in set(places)])
    per_host = max(places) + 1
    seconds = [_sum_s(across, n // per_host, agree=comm) for n in sizes]
    yield _times("reduce", "native", sizes, seconds, group="across")


def _time_islands_and_racks(
    comm: Communicator, devices: Sequence[Device], best: Collectives, sizes: list[int]
) -> Iterator[CollectiveTimes]:
    """Yield collectives inside each island, then inside each rack, all at once."""
    names: dict[RankGroup, list[tuple[str, str]]] = {
        "island": [(device.host, device.island) for device in devices],
        "rack": [("", device.rack) for device in devices],
    }
    for group, of_ranks in names.items():
        alike: dict[object, list[int]] = {}
        for rank, (host, name) in enumerate(of_ranks):
            alike.setdefault((host, name) if name else rank, []).append(rank)
        if any(len(ranks) > 1 for ranks in alike.values()):
            own = comm.subgroup(list(alike.values()))
            yield from _all_forms(own, group, best, sizes, agree=comm)


def _all_forms(
    comm: Communicator,
    group: RankGroup,
    best: Collectives,
    sizes: list[int],
    *,
    agree: Communicator,
) -> Iterator[CollectiveTimes]:
    """Yield collectives between ranks of a group, all groups at once."""
    gathers: list[GatherForm] = ["native", best.gather]
    for gather in dict.fromkeys(gathers):
        seconds = [_gather_s(comm, gather, n, agree=agree) for n in sizes]
        yield _times("gather", gather, sizes, seconds, group=group)
    reduces: list[ReduceForm] = ["native", best.reduce]
    for reduce in dict.fromkeys(reduces):
        seconds = [_reduce_s(comm, reduce, n, agree=agree) for n in sizes]
        yield _times("reduce", reduce, sizes, seconds, group=group)
    seconds = [_sum_s(comm, n, agree=agree) for n in sizes]
    yield _times("sum", "native", sizes, seconds, group=group)


def _time_sends(
    comm: Communicator, hosts: Sequence[str], sizes: list[int]
) -> Iterator[CollectiveTimes]:
    """Yield messages between two ranks, as stages send: on one host, and on two hosts. All other
    ranks are idle."""
    of_hosts = [tuple(r for r, h in enumerate(hosts) if h == x) for x in _unique(hosts)]
    of_hosts = of_hosts or [tuple(range(comm.world))]
    pairs: dict[RankGroup, tuple[int, ...]] = {}
    for ranks in of_hosts:
        if len(ranks) > 1:
            pairs.setdefault("inside", ranks[:2])
    if len(of_hosts) > 1:
        pairs["across"] = (of_hosts[0][0], of_hosts[1][0])
    for group, pair in pairs.items():
        line = comm.among(pair)
        seconds = [time_message(line, n, agree=comm) for n in sizes]
        yield _times("send", "native", sizes, seconds, group=group)


def _pairs(
    comm: Communicator, devices: Sequence[Device], largest_bytes: int
) -> Iterator[PairTimes]:
    """Yield messages between pairs of devices of a host, on all hosts at once; then between pairs
    of hosts, one after another, because pairs share links. None with only two, or too many."""
    ends = _sizes(min(PAIR_BYTES, largest_bytes))
    sizes = sorted({ends[0], ends[-1]})
    of_hosts: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        of_hosts.setdefault(device.host, []).append(rank)
    inside = [
        list(combinations(ranks, 2))
        for ranks in of_hosts.values()
        if 2 < len(ranks) <= MOST_DEVICES
    ]
    first = [ranks[0] for ranks in of_hosts.values()]
    rounds = [[pair for pair in at_once if pair] for at_once in zip_longest(*inside)]
    if 2 < len(first) <= MOST_HOSTS:
        rounds += [[pair] for pair in combinations(first, 2)]
    number = {device.id: n for n, device in enumerate(sort_in_rank_order(devices))}
    for pairs in rounds:
        seconds = [_pair_seconds(comm, pairs, size) for size in sizes]
        for pair, values in zip(pairs, zip(*seconds)):
            one, other = sorted(number[devices[rank].id] for rank in pair)
            curve = Curve(sizes=tuple(map(float, sizes)), values=values)
            yield PairTimes(one=one, other=other, times=curve)


def _pair_seconds(comm: Communicator, pairs: Sequence[RankPair], size: int) -> list[float]:
    """Return the seconds of a message between the two ranks of each pair, all pairs at once: half a
    round trip, the shortest of some, because noise only adds time."""
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(comm.rank)
    value = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    nothing, own = value[:0], [size if rank == partner else 0 for rank in range(comm.world)]

    def there_and_back() -> None:
        for gives in (True, False):
            speaks = partner is not None and (comm.rank < partner) == gives
            hears = partner is not None and not speaks
            comm.exchange_parts(
                value if speaks else nothing,
                own if speaks else [0] * comm.world,
                own if hears else [0] * comm.world,
                "trial message",
            )[1].wait()

    seconds = _seconds(comm, there_and_back, PAIR_REPEATS)
    mine = torch.tensor([min(seconds)], device=comm.device)
    table = comm.exchanged(mine, "exchange of times")
    return [max(float(table[rank]) for rank in pair) / 2 for pair in pairs]


def find_tensor_parallel_ranks(
    devices: Sequence[Device], degrees: Mapping[str, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Return some ranks for each tensor-parallel degree, of one class, host and island.

    Args:
        degrees: by class.
    """
    found: dict[int, tuple[int, ...]] = {}
    places = [(device.host, device.island, device.device_class) for device in devices]
    for place in dict.fromkeys(places):
        ranks = tuple(rank for rank, at in enumerate(places) if at == place)
        for degree in degrees.get(place[2], ()):
            if degree <= len(ranks):
                found.setdefault(degree, ranks[:degree])
    return found


def _time_tensor_parallel(
    comm: Communicator, groups: Mapping[int, Sequence[int]], sizes: list[int]
) -> Iterator[CollectiveTimes]:
    """Yield the collectives of a tensor-parallel group while remaining ranks are idle."""
    for degree, ranks in sorted(groups.items()):
        tp_group = comm.among(ranks) or comm.alone()
        for operation, seconds_of in GROUP_COLLECTIVES.items():
            seconds = [seconds_of(tp_group, size, agree=comm) for size in sizes]
            yield _times(operation, str(degree), sizes, seconds, group="inside")


def time_message(line: Communicator | None, size: int, *, agree: Communicator) -> float:
    """Return the seconds of a message between the two ranks of a line: half a round trip, because
    the sender cannot observe the arrival. Collective for `agree`."""
    value = torch.zeros(size, dtype=torch.uint8, device=agree.device)

    def there_and_back() -> None:
        if line is not None:
            for source in range(2):
                line.pass_on(value, source, "trial message").wait()

    return _time_slowest_rank(agree, there_and_back) / 2


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _sum_s(comm: Communicator, size: int, *, agree: Communicator) -> float:
    value = torch.zeros(max(1, size // 4), device=comm.device)
    return _time_slowest_rank(agree, lambda: comm.all_reduce(value, "trial all-reduce"))


def _tp_gather_s(comm: Communicator, size: int, *, agree: Communicator) -> float:
    row = torch.zeros(max(1, size // 4 // comm.world), device=comm.device)
    return _time_slowest_rank(agree, lambda: comm.exchange(row, "trial gather")[1].wait())


def _tp_reduce_s(comm: Communicator, size: int, *, agree: Communicator) -> float:
    part = max(1, size // 4 // comm.world)
    full = torch.zeros(part * comm.world, device=comm.device)
    intervals = ShardIntervals(tuple(part * rank for rank in range(comm.world + 1)))

    own = torch.empty(part, device=comm.device)

    def add_up(rows: torch.Tensor) -> None:
        torch.sum(rows, 0, out=own)

    return _time_slowest_rank(
        agree, lambda: comm.reduce(full, intervals, "trial reduction", add_up).wait()
    )


TensorParallelTrial = Literal["sum", "tp_gather", "tp_reduce"]
GROUP_COLLECTIVES: dict[TensorParallelTrial, Callable[..., float]] = {
    "sum": _sum_s,
    "tp_gather": _tp_gather_s,
    "tp_reduce": _tp_reduce_s,
}


def _time_small_all_reduce(comm: Communicator) -> float:
    value = torch.zeros(2, device=comm.device)
    return _time_slowest_rank(comm, lambda: comm.all_reduce(value, "trial all-reduce"))


def _layout(comm: Communicator, size: int, *, even: bool) -> ShardIntervals:
    """Return the ranks' intervals of a buffer: equal, or off by one element."""
    part = -(-size // 4 // comm.world)
    numel = part * comm.world
    offsets = list(compute_shard_offsets(numel, (1.0 / comm.world,) * comm.world))
    if not even and comm.world > 1:
        offsets[1] += 1
    return ShardIntervals(tuple(offsets))


def _with_forms(comm: Communicator, forms: Collectives) -> Communicator:
    return type(comm)(comm.group, rank=comm.rank, world=comm.world, forms=forms, device=comm.device)


def _time_slowest_rank(comm: Communicator, work: Callable[[], object]) -> float:
    """Return the median seconds of `work` on the slowest rank."""
    mine = torch.tensor([sorted(_seconds(comm, work, REPEATS))[REPEATS // 2]], device=comm.device)
    table = comm.exchanged(mine, "exchange of times")
    return float(table.max())


def _seconds(comm: Communicator, work: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of `work` on this rank, with a common start; the first run is not
    counted."""
    seconds = []
    for _ in range(1 + repeats):
        comm.exchanged(torch.zeros(1, device=comm.device), "trial barrier")
        synchronize(comm.device)
        begun = time.perf_counter()
        work()
        synchronize(comm.device)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def _times(
    operation: Operation | Literal["send"] | TensorParallelTrial,
    form: str,
    sizes: list[int],
    seconds: list[float],
    group: RankGroup = "all",
) -> CollectiveTimes:
    curve = Curve(sizes=tuple(map(float, sizes)), values=tuple(seconds))
    return CollectiveTimes(operation=operation, form=form, group=group, times=curve)


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s at {show_bytes(size)}"
