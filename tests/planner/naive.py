"""What a plan takes and holds, one worker, call and micro-batch after the other.

Written from the docstrings of `gpumix.cost` and the design page, without numpy and without any of
the functions there: curves, links, step time and memory in plain loops. Seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import ceil, log2

from gpumix.spec.curve import Curve
from gpumix.spec.network import Link
from gpumix.spec.plan import Plan, Worker, cut_sizes
from gpumix.spec.profile import ROOT, ClassProfile, Profile, UnitKind

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
GRADIENT, MASTER = 4, 4  # fp32
PER_OWNER = 1.25  # of stated links: one broadcast or reduction per owner
TREE_PIECE = 512 * 1024  # of stated links: an eighth of 4 MiB


# -- curves ----------------------------------------------------------------------------------------


def seconds(curve: Curve, size: float) -> float:
    """Less work takes no longer than more."""
    return _between(curve, [min(curve.values[i:]) for i in range(len(curve.values))], size)


def held(curve: Curve, size: float) -> float:
    """Bytes: what was once needed may be needed again."""
    return _between(curve, [max(curve.values[: i + 1]) for i in range(len(curve.values))], size)


def _between(curve: Curve, values: list[float], size: float) -> float:
    sizes = curve.sizes
    if size <= 0:
        return 0.0
    if size <= sizes[0]:
        return values[0]
    for i in range(1, len(sizes)):
        if size <= sizes[i]:
            part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
            return values[i - 1] + part * (values[i] - values[i - 1])
    return values[-1] * size / sizes[-1]


# -- links -----------------------------------------------------------------------------------------


class Wire:
    """The collectives of a plan, one at a time."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.group = "inside" if plan.sharding == "host" else "all"
        self.shares = _least_even(plan)
        self.stated = profile.cluster.network if not profile.network else None

    def gather(self, unit: str, again: bool) -> float:
        """Of a unit's parameters, before its forward, or before its backward (`again`)."""
        stage = self.plan.zero_stage
        if stage == 0 or (again and stage < 3):
            return 0.0
        elements, frozen = _elements(self.profile, unit), _frozen(self.profile, unit)
        width = WIDTH[self.profile.compute_dtype]
        total = self._collective("gather", elements, elements * width)
        if stage == 3:
            total += self._collective("gather", frozen, frozen)
        return total

    def reduce(self, unit: str) -> float:
        """Of a unit's gradient, until whoever needs the sum has it."""
        elements = _elements(self.profile, unit)
        size = elements * GRADIENT
        total = self._collective("reduce", elements, size)
        if self.plan.zero_stage == 0:
            total += self._collective("gather", elements, size)
        elif self.plan.sharding == "host":
            total += self._time("reduce", "native", "across", size)
        return total

    def form(self, operation: str, elements: int) -> str:
        """Equal intervals go by the native form where there is one."""
        named = getattr(self.plan.collectives, operation)
        equal = len(set(cut_sizes(elements, self.shares))) == 1
        return "native" if equal and self._known(operation, "native") else named

    def padding_bytes(self) -> int:
        """Beside the units' buffers: those of one gather and one reduction, filled up."""
        longest = {"gather": 0, "reduce": 0}
        for unit in _units(self.profile):
            n = _elements(self.profile, unit)
            sizes = {"gather": _gathered(self.profile, unit), "reduce": n * GRADIENT}
            for operation, size in sizes.items():
                if not self._alone() and self.form(operation, n) == "padded":
                    longest[operation] = max(longest[operation], size)
        return int(self.plan.collectives.padding * sum(longest.values()))

    def receives(self, unit: str) -> bool:
        """Whether all ranks' parts of the own interval arrive in a buffer of their own."""
        return not self._alone() and self.form("reduce", _elements(self.profile, unit)) == (
            "all_to_all"
        )

    def _alone(self) -> bool:
        return len(self.plan.workers) == 1

    def _collective(self, operation: str, elements: int, size: float) -> float:
        if size == 0 or self._alone():
            return 0.0
        form = self.form(operation, elements)
        if form == "padded":
            return self._time(operation, "native", self.group, size * self.plan.collectives.padding)
        return self._time(operation, form, self.group, size)

    def _known(self, operation: str, form: str) -> bool:
        if self.stated is not None:
            return self.group == "all" or len(_hosts(self.plan)) > 1
        return any(
            (t.operation, t.form, t.group) == (operation, form, self.group)
            for t in self.profile.network
        )

    def _time(self, operation: str, form: str, group: str, size: float) -> float:
        if self.stated is None:
            for times in self.profile.network:
                if (times.operation, times.form, times.group) == (operation, form, group):
                    return seconds(times.times, size)
            return 0.0
        if group == "across":
            return 2 * min(self._between_hosts(size), self._tree(size))
        whole = self._inside(size)
        if group == "all" and len(_hosts(self.plan)) > 1:
            ring = (len(self.plan.workers) - 1) * self._step(size / len(self.plan.workers))
            whole = min(ring, self._between_hosts(size) + self._inside(size))
        return whole * (1.0 if form == "native" else PER_OWNER)

    def _inside(self, size: float) -> float:
        """A ring in each host at once."""
        rings = []
        for host in _hosts(self.plan).values():
            links = [self._link("inside", a, b) for a, b in combinations(host, 2)]
            step = max((seconds(k.times, size / len(host)) for k in links), default=0.0)
            rings.append((len(host) - 1) * step)
        return max(rings)

    def _between_hosts(self, size: float) -> float:
        hosts = _hosts(self.plan)
        links = list(self._links_between())
        return (len(hosts) - 1) * max(seconds(k.times, size / len(hosts)) for k in links)

    def _tree(self, size: float) -> float:
        """The buffer once over the slowest link, the first piece of it up all levels."""
        links = list(self._links_between())
        levels = ceil(log2(len(_hosts(self.plan))))
        piece = min(size, TREE_PIECE)
        return max(seconds(k.times, size) + levels * seconds(k.times, piece) for k in links)

    def _step(self, size: float) -> float:
        """Of one ring through all devices."""
        links = list(self._links_between())
        for host in _hosts(self.plan).values():
            links += [self._link("inside", a, b) for a, b in combinations(host, 2)]
        return max(seconds(k.times, size) for k in links)

    def _links_between(self) -> Iterator[Link]:
        for one, other in combinations(_hosts(self.plan).values(), 2):
            yield from (self._link("between", a, b) for a in one for b in other)

    def _link(self, where: str, one: Worker, other: Worker) -> Link:
        found = self.stated.of(where, one.device_class, other.device_class)
        assert found is not None
        return found


def _hosts(plan: Plan) -> dict[str, list[Worker]]:
    found: dict[str, list[Worker]] = {}
    for worker in plan.workers:
        found.setdefault(worker.host, []).append(worker)
    return found


def _least_even(plan: Plan) -> tuple[float, ...]:
    """The shares of those that divide the state; of several hosts, all wait for the worst."""
    if plan.sharding == "all":
        return tuple(w.state_share for w in plan.workers)
    groups = [tuple(w.state_share for w in host) for host in _hosts(plan).values()]
    return max(groups, key=lambda shares: (max(shares) * len(shares), len(shares)))


# -- time ------------------------------------------------------------------------------------------


def step_seconds(profile: Profile, plan: Plan) -> float:
    passes = [worker_seconds(profile, plan, rank) for rank in range(len(plan.workers))]
    update = max(update_seconds(profile, plan, rank) for rank in range(len(plan.workers)))
    if plan.zero_stage >= 2:
        longest = max(f for f, _ in passes) + max(b for _, b in passes)
    else:
        longest = max(f + b for f, b in passes)
    return exposed_seconds(profile, plan) + longest + update


def exposed_seconds(profile: Profile, plan: Plan) -> float:
    """The root's gather begins the step, and the reductions of the first call and of the root end
    it."""
    wire = Wire(profile, plan)
    ends = wire.reduce(profile.model.kind_of_call[0]) + wire.reduce(ROOT)
    return wire.gather(ROOT, again=False) + ends + profile.step_overhead_s


def update_seconds(profile: Profile, plan: Plan, rank: int) -> float:
    worker, model = plan.workers[rank], profile.model
    units = dict(zip(model.calls, model.kind_of_call))
    elements = _elements(profile, ROOT) + sum(_elements(profile, k) for k in units.values())
    share = worker.state_share if plan.zero_stage else 1.0
    return _class(profile, worker).optimizer_s_per_element * elements * share


def worker_seconds(profile: Profile, plan: Plan, rank: int) -> tuple[float, float]:
    """Forward; and backward, with head and loss."""
    model, worker, wire = profile.model, plan.workers[rank], Wire(profile, plan)
    times, calls, kinds = _class(profile, worker).units, model.calls, model.kind_of_call
    micro_batches, last = sorted(worker.micro_batches), len(calls) - 1  # the smaller one first
    in_layers = worker.mode.order == "layered"

    def beside(curve: Curve, moved: float, at: int) -> float:
        """All micro-batches, while a collective runs: beside all of them, or, if they run one
        after the other, beside the `at`-th alone."""
        each = [seconds(curve, n) for n in micro_batches]
        alone = sum(each) if in_layers else (each[at] if each else 0.0)
        rest = sum(each) - alone
        return rest + max(alone, moved) + profile.contention * min(alone, moved)

    def copied(kind: str) -> float:
        if worker.mode.boundary == "device":
            return 0.0
        kept = _kind(profile, kind).kept
        return sum(seconds(_class(profile, worker).host_copy, held(kept, n)) for n in micro_batches)

    def backward_of(kind: str) -> Curve:
        of = times[kind]
        return of.backward if worker.mode.recompute or kind == ROOT else of.gradient

    forward = beside(times[ROOT].forward, wire.gather(kinds[0], again=False), 0)
    for k, kind in enumerate(kinds):
        another = k < last and calls[k + 1] != calls[k]
        moved = wire.gather(kinds[k + 1], again=False) if another else 0.0
        forward += max(beside(times[kind].forward, moved, 0), copied(kind))
    backward = beside(times[ROOT].backward, wire.gather(kinds[last], again=True), -1)
    for k in reversed(range(last + 1)):
        another = k > 0 and calls[k - 1] != calls[k]
        moved = wire.gather(kinds[k - 1], again=True) if another else 0.0
        if k < last and calls[k + 1] not in calls[: k + 1]:  # its gradient is complete
            moved += wire.reduce(kinds[k + 1])
        backward += max(beside(backward_of(kinds[k]), moved, -1), copied(kinds[k]))
    return forward, backward


# -- memory ----------------------------------------------------------------------------------------


def peak_bytes(profile: Profile, plan: Plan, rank: int) -> tuple[int, int]:
    """The most that is held on the device at any moment of a step, and on its host."""
    moments = moments_bytes(profile, plan, rank)
    return max(device for device, _ in moments), max(host for _, host in moments)


def moments_bytes(profile: Profile, plan: Plan, rank: int) -> list[tuple[int, int]]:
    """What is held at each moment of a step that counts, on the device and on its host."""
    always = _state(profile, plan, rank) + profile.model.root.buffer_bytes
    always += _class(profile, plan.workers[rank]).framework_bytes
    always += Wire(profile, plan).padding_bytes()
    return [(always + device, host) for device, host in _moments(profile, plan, rank)]


def _state(profile: Profile, plan: Plan, rank: int) -> int:
    """What lasts: of its own intervals, and of what is not divided."""
    stage, narrow = plan.zero_stage, profile.compute_dtype != "fp32"
    model, width = profile.model, WIDTH[profile.compute_dtype]
    units = [ROOT, *dict(zip(model.calls, model.kind_of_call)).values()]
    whole = sum(_elements(profile, unit) for unit in units)
    owned = sum(_owned(profile, plan, rank, unit) for unit in units)
    frozen = sum(_frozen(profile, unit) for unit in units)
    frozen_owned = sum(_owned_of(plan, rank, _frozen(profile, unit)) for unit in units)
    moments = profile.optimizer_bytes_per_element
    if stage == 3:
        return owned * (MASTER + GRADIENT + moments) + frozen_owned
    master = MASTER if narrow else 0  # else the parameters themselves
    total = whole * width + frozen
    total += (owned if stage == 2 else whole) * GRADIENT
    return total + (owned if stage else whole) * (master + moments)


def _moments(profile: Profile, plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """Bytes on the device and on its host, beside what lasts, as a step goes on."""
    model, worker, wire = profile.model, plan.workers[rank], Wire(profile, plan)
    calls, kinds, stage = model.calls, model.kind_of_call, plan.zero_stage
    micro_batches, mode, last = worker.micro_batches, worker.mode, len(calls) - 1
    ranks = len(_least_even(plan))

    def under_way(curve: Curve) -> int:
        """Of all micro-batches in layers; of one if they run one after the other."""
        each = [held(curve, n) for n in micro_batches] or [0.0]
        return ceil(sum(each) if mode.order == "layered" else max(each))

    def largest(curve: Curve, times: int = 1) -> int:
        return ceil(times * max((held(curve, n) for n in micro_batches), default=0.0))

    def left(kind: str) -> Curve:
        of = _kind(profile, kind)
        return of.kept if mode.recompute else of.saved

    def kept(upto: int) -> tuple[int, int]:
        """By the calls before `upto`: on the device, and on the host."""
        device, host = under_way(model.root.kept), 0
        for kind in sorted(set(kinds[:upto])):
            all_calls = kinds[:upto].count(kind) * under_way(left(kind))
            if mode.boundary == "host":
                host += all_calls
                all_calls = min(all_calls, largest(left(kind), 2))
            device += all_calls
        return device, host

    def gathered(*units: str) -> int:
        return sum(_gathered(profile, unit) for unit in units) if stage == 3 else 0

    def buffers(names: set[str]) -> int:
        """Whole gradients, where ranks do not keep them anyway."""
        kind_of = dict(zip(calls, kinds)) | {ROOT: ROOT}
        return sum(_elements(profile, kind_of[n]) * GRADIENT for n in names) if stage >= 2 else 0

    def arriving(*units: str) -> int:
        if stage == 0:
            return 0
        own = [_owned(profile, plan, rank, unit) for unit in units if wire.receives(unit)]
        return ranks * sum(own) * GRADIENT

    def moment(upto: int, *sizes: int) -> tuple[int, int]:
        device, host = kept(upto)
        return device + sum(sizes), host

    for k, kind in enumerate(kinds):
        ahead = kinds[k + 1 : k + 2] if calls[k + 1 : k + 2] != (calls[k],) else ()
        yield moment(k + 1, gathered(ROOT, kind, *ahead), largest(_kind(profile, kind).forward))
    between = under_way(_kind(profile, kinds[last]).gradient)
    yield moment(
        last + 1, gathered(ROOT, kinds[last]), buffers({ROOT}), between, largest(model.root.head)
    )
    alive, reducing = {ROOT}, []
    for k in reversed(range(last + 1)):
        of = _kind(profile, kinds[k])
        ahead = kinds[k - 1 : k] if k and calls[k - 1] != calls[k] else ()
        alive.add(calls[k])
        on_the_way = [kinds[calls.index(name)] for name in reducing]
        work = largest(of.backward)
        if not mode.recompute:  # what was kept need not be made again
            work = ceil(max(_most(of.backward, micro_batches) - _most(of.saved, micro_batches), 0))
        yield moment(
            k + 1, gathered(ROOT, kinds[k], *ahead), buffers(alive), under_way(of.gradient), work,
            arriving(*on_the_way),
        )  # fmt: skip
        if calls[k] not in calls[:k]:
            yield moment(
                k, gathered(ROOT, *ahead), buffers(alive), under_way(of.gradient),
                arriving(*on_the_way, kinds[k]),
            )  # fmt: skip
            alive -= set(reducing)
            reducing = [calls[k]]
    on_the_way = [kinds[calls.index(name)] for name in reducing]
    yield moment(0, gathered(ROOT), buffers(alive), arriving(*on_the_way, ROOT))


def _most(curve: Curve, micro_batches: tuple[int, ...]) -> float:
    return max((held(curve, n) for n in micro_batches), default=0.0)


# -- the profile -----------------------------------------------------------------------------------


def _units(profile: Profile) -> list[str]:
    return [ROOT, *(kind.name for kind in profile.model.kinds)]


def _kind(profile: Profile, name: str) -> UnitKind:
    return next(kind for kind in profile.model.kinds if kind.name == name)


def _class(profile: Profile, worker: Worker) -> ClassProfile:
    return next(c for c in profile.classes if c.device_class == worker.device_class)


def _elements(profile: Profile, unit: str) -> int:
    return profile.model.root.trainable if unit == ROOT else _kind(profile, unit).trainable


def _frozen(profile: Profile, unit: str) -> int:
    return profile.model.root.frozen_bytes if unit == ROOT else _kind(profile, unit).frozen_bytes


def _gathered(profile: Profile, unit: str) -> int:
    return _elements(profile, unit) * WIDTH[profile.compute_dtype] + _frozen(profile, unit)


def _owned(profile: Profile, plan: Plan, rank: int, unit: str) -> int:
    return _owned_of(plan, rank, _elements(profile, unit))


def _owned_of(plan: Plan, rank: int, numel: int) -> int:
    """The length of a rank's interval of a buffer, among those that divide the state with it."""
    own = plan.workers[rank]
    others = [w for w in plan.workers if plan.sharding == "all" or w.host == own.host]
    shares = tuple(w.state_share for w in others)
    return cut_sizes(numel, shares)[others.index(own)]
