"""What a plan takes and holds, one worker, call and micro-batch after the other.

Written from the docstrings of `gpumix.cost` and the design page, without numpy and without any of
the functions there: curves, buckets, links, step time and memory in plain loops. Seconds and bytes.
Only which buffers take turns in one slot is asked of the engine's own function, for the times that
a walk finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import ceil, log2

from gpumix.cost.memory_layout.buffer_slots import Buffer, share_slots
from gpumix.schema.cluster.network import Link
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import Worker
from gpumix.schema.profile.profile import ROOT, ClassProfile, ModelProfile, Profile, UnitKind

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


# -- buckets ---------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """What is gathered and reduced as one, and the numbers of the calls that use it."""

    elements: int
    frozen: int
    calls: list[int]


@dataclass
class Buckets:
    """Those of units, in order, and the three of the root; `rows` are calls that need the same
    bucket, one row after the other."""

    units: list[Bucket]
    before: Bucket
    after: Bucket
    root: Bucket
    rows: list[tuple[Bucket, list[int]]]

    @property
    def all(self) -> list[Bucket]:
        return [*self.units, self.before, self.after, self.root]

    def done_at(self, row: int) -> bool:
        """Whether nothing before this row uses its bucket."""
        bucket, calls = self.rows[row]
        return bucket.calls[0] == calls[0]


def buckets(profile: Profile, plan: Plan) -> Buckets:
    model, stage = profile.model, plan.stages[0]
    units: list[Bucket] = []
    of_name: dict[str, Bucket] = {}
    for number, (name, kind) in enumerate(zip(model.calls, model.kind_of_call)):
        if name not in of_name:
            if len(of_name) % stage.joined == 0:
                units.append(Bucket(0, 0, []))
            of_name[name] = units[-1]
            units[-1].elements += _kind(profile.model, kind).trainable
            units[-1].frozen += _kind(profile.model, kind).frozen_bytes
        of_name[name].calls.append(number)
    rows: list[tuple[Bucket, list[int]]] = []
    for number, name in enumerate(model.calls):
        if not rows or rows[-1][0] is not of_name[name]:
            rows.append((of_name[name], []))
        rows[-1][1].append(number)
    root = Bucket(model.root.trainable, model.root.frozen_bytes, [])
    ends = [
        Bucket(end.trainable, end.frozen_bytes, []) if named else Bucket(0, 0, [])
        for end, named in ((model.root.before, stage.before), (model.root.after, stage.after))
    ]
    for end in ends:
        root.elements -= end.elements
        root.frozen -= end.frozen
    return Buckets(units, *ends, root, rows)


# -- links -----------------------------------------------------------------------------------------


class Wire:
    """The collectives of a plan, one at a time."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.buckets = buckets(profile, plan)
        self.group = "inside" if plan.sharding == "host" else "all"
        self.shares = _least_even(plan)
        self.stated = profile.cluster.network if not profile.network else None

    def gather(self, bucket: Bucket, again: bool = False) -> float:
        """Of a bucket's parameters, before its forward, or before its backward (`again`)."""
        stage = self.plan.zero_stage
        if stage == 0 or (again and stage < 3):
            return 0.0
        width = WIDTH[self.plan.communication_dtype]
        total = self._collective("gather", bucket.elements, bucket.elements * width)
        if stage == 3:
            total += self._collective("gather", bucket.frozen, bucket.frozen)
        return total

    def reduce(self, bucket: Bucket) -> float:
        """Of a bucket's gradient, until whoever needs the sum has it."""
        size = bucket.elements * GRADIENT
        total = self._collective("reduce", bucket.elements, size)
        if self.plan.zero_stage == 0:
            total += self._collective("gather", bucket.elements, size)
        elif self.plan.sharding == "host":
            total += self._time("reduce", "native", "across", size)
        return total

    def form(self, operation: str, elements: int) -> str:
        """Equal intervals go by the native form where there is one."""
        named = getattr(self.plan.collectives, operation)
        equal = len(set(compute_shard_sizes(elements, self.shares))) == 1
        return "native" if equal and self._known(operation, "native") else named

    def padding_bytes(self) -> int:
        """Beside the buckets' own buffers: each rank's interval filled up, and one more of them, of
        a reduction, and of the gathers that begin a step, of which the last may grow."""
        if self.plan.zero_stage == 0:
            return 0
        of = self.buckets
        others = max(self._padded_gather(bucket) for bucket in (*of.units, of.after))
        reductions = max(self._padded("reduce", bucket.elements, GRADIENT) for bucket in of.all)
        return self._padded_gather(of.before) + self._padded_gather(of.root) + others + reductions

    def _padded_gather(self, bucket: Bucket) -> int:
        size = self._padded("gather", bucket.elements, WIDTH[self.plan.communication_dtype])
        return size + (self._padded("gather", bucket.frozen, 1) if self.plan.zero_stage == 3 else 0)

    def _padded(self, operation: str, numel: int, width: int) -> int:
        if self._alone() or not numel or self.form(operation, numel) != "padded":
            return 0
        ranks = len(self.shares)
        return (ranks + 1) * (ceil(numel * self.plan.collectives.padding / ranks) + 1) * width

    def receives(self, bucket: Bucket) -> bool:
        """Whether all ranks' parts of the own interval arrive in a buffer of their own."""
        if self._alone() or self.plan.zero_stage == 0:
            return False
        return self.form("reduce", bucket.elements) == "all_to_all"

    def copied_rows(self) -> int:
        """How many of its own intervals a rank fills to sum over hosts."""
        if self.plan.sharding == "all" or self.plan.zero_stage == 0:
            return 0
        hosts = [tuple(w.state_share for w in host) for host in _hosts(self.plan).values()]
        if len(hosts) == 1:
            return 0
        sent = arrived = len(hosts) - 1
        return 2 if len(set(hosts)) == 1 else 2 + sent + arrived + 1

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
    if plan.zero_stage >= 1:
        longest = max(f for f, _ in passes) + max(b for _, b in passes)
    else:
        longest = max(f + b for f, b in passes)
    return exposed_seconds(profile, plan) + longest + update


def exposed_seconds(profile: Profile, plan: Plan) -> float:
    """The root's gathers begin the step, and the reductions of the first bucket and of the root end
    it."""
    wire = Wire(profile, plan)
    of = wire.buckets
    ends = wire.reduce(of.rows[0][0]) + wire.reduce(of.root) + wire.reduce(of.before)
    return wire.gather(of.before) + wire.gather(of.root) + ends + profile.step_overhead_s


def update_seconds(profile: Profile, plan: Plan, rank: int) -> float:
    worker, model = plan.workers[rank], profile.model
    units = dict(zip(model.calls, model.kind_of_call))
    elements = _elements(profile, ROOT) + sum(_elements(profile, k) for k in units.values())
    share = worker.state_share if plan.zero_stage else 1.0
    of = _class(profile, worker)
    if worker.state_on == "device":
        return of.optimizer_s_per_element * elements * share
    gathers = 2 if plan.zero_stage == 3 else 1
    width = WIDTH[plan.communication_dtype]
    copied = seconds(of.host_copy, 4 * elements) + gathers * seconds(of.host_copy, width * elements)
    return (of.host_optimizer_s_per_element * elements + copied) * share


def worker_seconds(profile: Profile, plan: Plan, rank: int) -> tuple[float, float]:
    """Forward; and backward, with head and loss."""
    model, worker, wire = profile.model, plan.workers[rank], Wire(profile, plan)
    times, kinds = _class(profile, worker).units, model.kind_of_call
    rows, in_layers = wire.buckets.rows, worker.mode.order == "layered"
    sizes = list(enumerate(worker.micro_batches))[::-1]  # the last one first; it may be smaller

    def beside(moved: float, taken: list[float], at: int) -> float:
        """Micro-batches that take so long, while a collective runs: beside all of them, or, if they
        run one after the other, beside the `at`-th alone."""
        alone = sum(taken) if in_layers else (taken[at] if taken else 0.0)
        return sum(taken) - alone + max(alone, moved) + profile.contention * min(alone, moved)

    def copied(calls: list[int]) -> float:
        if worker.mode.boundary == "device":
            return 0.0
        copy = _class(profile, worker).host_copy
        of = [_kind(_model(profile, worker), kinds[call]).kept for call in calls]
        return sum(seconds(copy, held(kept, n)) for kept in of for _, n in sizes)

    def backward_of(call: int, place: int, n: int) -> float:
        of = times[kinds[call]]
        return seconds(of.gradient if _keeps(profile, worker, call, place) else of.backward, n)

    forward = beside(
        wire.gather(rows[0][0]), [seconds(times[ROOT].forward, n) for _, n in sizes], 0
    )
    for number, (_, calls) in enumerate(rows):
        following = rows[number + 1][0] if number + 1 < len(rows) else wire.buckets.after
        taken = [sum(seconds(times[kinds[c]].forward, n) for c in calls) for _, n in sizes]
        forward += max(beside(wire.gather(following), taken, 0), copied(calls))
    in_chunks = _class(profile, worker).chunked_cross_entropy
    head = times[ROOT].backward if worker.mode.head == "whole" else in_chunks
    heads = [seconds(head, n) for _, n in sizes]
    backward, last = sum(heads), sum(heads[-1:])
    for number in reversed(range(len(rows))):
        calls = rows[number][1]
        moved = wire.gather(rows[number - 1][0], again=True) if number else 0.0
        if number + 1 == len(rows):
            moved += wire.reduce(wire.buckets.after)
        elif wire.buckets.done_at(number + 1):
            moved += wire.reduce(rows[number + 1][0])
        taken = [sum(backward_of(c, place, n) for c in calls) for place, n in sizes]
        taken_last = sum(taken[-1:])
        whole = max(beside(moved, taken, -1), copied(calls))
        backward += whole
        last += whole - (sum(taken) - taken_last)
    return (forward, backward) if in_layers else (forward + backward - last, last)


def _keeps(profile: Profile, worker: Worker, call: int, place: int) -> bool:
    """Whether a micro-batch keeps the graph of a call."""
    if not worker.mode.recompute:
        return True
    batches, calls = len(worker.micro_batches), len(profile.model.calls)
    later = [(c, p) for c in range(calls) for p in range(batches) if (c, p) > (call, place)]
    return len(later) < worker.kept_graphs


# -- memory ----------------------------------------------------------------------------------------


def peak_bytes(profile: Profile, plan: Plan, rank: int) -> tuple[int, int]:
    """The most that is held on the device at any moment of a step, and on its host."""
    moments = moments_bytes(profile, plan, rank)
    return max(device for device, _ in moments), max(host for _, host in moments)


def moments_bytes(profile: Profile, plan: Plan, rank: int) -> list[tuple[int, int]]:
    """What is held at each moment of a step that counts, on the device and on its host."""
    always = _state(profile, plan, rank) + profile.model.root.buffer_bytes
    always += _class(profile, plan.workers[rank]).framework_bytes
    always += _laid_out(profile, plan, plan.workers[rank].compute_dtype) + _arriving(
        profile, plan, rank
    )
    always += Wire(profile, plan).padding_bytes()
    there = _state_on_host(profile, plan, rank)
    return [(always + device, there + host) for device, host in _moments(profile, plan, rank)]


def _laid_out(profile: Profile, plan: Plan, dtype: str) -> int:
    """Whole parameters and gradients: each in memory of its own, or, from stage 3 and 2 on, in
    memory that buckets take turns in. Parameters in another dtype than they are gathered in arrive
    elsewhere, one bucket after the other."""
    of, width, gathered = buckets(profile, plan), WIDTH[dtype], WIDTH[plan.communication_dtype]
    wider = max(1, width // gathered)
    full = {id(b): _aligned(b.elements * width) + _aligned(b.frozen * wider) for b in of.all}
    gradients = {id(b): _aligned(b.elements * GRADIENT) for b in of.all}
    gathered_at, filled_at = _in_use(of)
    total = 0
    if dtype != plan.communication_dtype:
        total = max(_aligned(b.elements * gathered) + _aligned(b.frozen) for b in of.all)
    for sizes, times, shared in (
        (full, gathered_at, plan.zero_stage == 3),
        (gradients, filled_at, plan.zero_stage >= 2),
    ):
        if shared:
            slots = share_slots([Buffer(sizes[id(b)], tuple(times[id(b)])) for b in of.all])
            total += slots.total_bytes
        else:
            total += sum(sizes.values())
    return total


def _aligned(size: int) -> int:
    return ceil(size / 512) * 512


def _in_use(of: Buckets) -> tuple[dict[int, list], dict[int, list]]:
    """By identity of a bucket, from and until which moments of a step its parameters are there, and
    its gradient; moment 0 is before the first row, n that of row n, then comes the head, then rows
    backward."""
    gathered: dict[int, list] = {id(b): [] for b in of.all}
    filled: dict[int, list] = {id(b): [] for b in of.all}
    last, order = len(of.rows), [bucket for bucket, _ in of.rows]
    end = 2 * last + 2
    for number, bucket in enumerate(order):
        forward, backward = number + 1, 2 * last + 1 - number
        if number == last - 1:
            gathered[id(bucket)].append((forward - 1, backward))
        else:
            gathered[id(bucket)] += [(forward - 1, forward), (backward - 1, backward)]
    gathered[id(of.root)] = [(0, end)]
    gathered[id(of.before)] = [(0, 0)]
    gathered[id(of.after)] = [(last, last + 1)]
    done = [n for n in reversed(range(last)) if of.done_at(n)]
    for place, number in enumerate(done):
        bucket = order[number]
        begun = 2 * last + 1 - max(n for n in range(last) if order[n] is bucket)
        gone = 2 * last + 1 - done[place + 1] if place + 1 < len(done) else end
        filled[id(bucket)] = [(begun, gone)]
    filled[id(of.root)] = filled[id(of.before)] = [(last + 1, end)]
    filled[id(of.after)] = [(last + 1, 2 * last + 1 - done[0])]
    return gathered, filled


def _arriving(profile: Profile, plan: Plan, rank: int) -> int:
    """Where all ranks' parts of the own interval arrive, and hosts add up: as large as ever."""
    if plan.zero_stage == 0:
        return 0
    wire, own = Wire(profile, plan), plan.workers[rank]
    together = [w for w in plan.workers if plan.sharding == "all" or w.host == own.host]
    of = wire.buckets.all
    arriving = [_owned_of(plan, rank, b.elements) for b in of if wire.receives(b)]
    rows = len(together) if len(together) > 1 else 0
    copied = wire.copied_rows() * max(_owned_of(plan, rank, b.elements) for b in of)
    return (rows * max(arriving, default=0) + copied) * GRADIENT


def _state(profile: Profile, plan: Plan, rank: int) -> int:
    """What lasts: of its own intervals, and of what is not divided."""
    stage, dtype = plan.zero_stage, plan.workers[rank].compute_dtype
    rounded = {dtype, plan.communication_dtype} != {"fp32"}
    of = buckets(profile, plan).all
    whole = sum(b.elements for b in of)
    owned = sum(_owned_of(plan, rank, b.elements) for b in of)
    frozen_owned = sum(_owned_of(plan, rank, b.frozen) for b in of)
    moments = profile.optimizer_bytes_per_element
    if plan.workers[rank].state_on == "host":
        owned = whole = 0  # of what is trained
    if stage == 3:
        return owned * (MASTER + GRADIENT + moments) + frozen_owned
    master = MASTER if rounded else 0  # else the parameters themselves
    total = owned * GRADIENT if stage == 2 else 0
    if dtype != plan.communication_dtype:  # as they are gathered
        total += frozen_owned if stage else sum(b.frozen for b in of)
    return total + (owned if stage else whole) * (master + moments)


def _state_on_host(profile: Profile, plan: Plan, rank: int) -> int:
    if plan.workers[rank].state_on == "device":
        return 0
    of = buckets(profile, plan).all
    owned = [_owned_of(plan, rank, b.elements) if plan.zero_stage else b.elements for b in of]
    width = WIDTH[plan.communication_dtype]
    rounded = width if width < MASTER else 0
    return ceil(sum(owned) * (MASTER + GRADIENT + profile.optimizer_bytes_per_element + rounded))


def _moments(profile: Profile, plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """Bytes on the device and on its host, beside what lasts, as a step goes on."""
    worker = plan.workers[rank]
    model = _model(profile, worker)
    kinds, micro_batches, mode = model.kind_of_call, worker.micro_batches, worker.mode
    in_layers = mode.order == "layered"

    def under_way(curve: Curve) -> int:
        """Of all micro-batches in layers; of one if they run one after the other."""
        each = [held(curve, n) for n in micro_batches] or [0.0]
        return ceil(sum(each) if in_layers else max(each))

    def largest(curve: Curve, times: int = 1) -> int:
        return ceil(times * max((held(curve, n) for n in micro_batches), default=0.0))

    def working(call: int, again: Curve, keeping: Curve | None) -> int:
        """Of the micro-batch that takes the most, whether it is run again or keeps its graph."""
        places = range(len(micro_batches))
        curves = [keeping if _keeps(profile, worker, call, p) else again for p in places]
        return ceil(max(map(held, curves, micro_batches), default=0.0))

    def graphs(upto: int) -> int:
        """What graphs add that are kept one by one; one after the other, the largest counts."""
        total = 0
        for call in range(upto if worker.kept_graphs else 0):
            of = _kind(model, kinds[call])
            keeping = [n for p, n in enumerate(micro_batches) if _keeps(profile, worker, call, p)]
            if in_layers:
                there = mode.boundary == "device"  # what is not kept on the host
                inputs = sum(ceil(held(of.kept, n)) for n in keeping) if there else 0
                total += max(0, sum(ceil(held(of.saved, n)) for n in keeping) - inputs)
            elif keeping:
                kept = ceil(held(of.kept, micro_batches[0]))
                total += max(0, ceil(held(of.saved, max(keeping))) - kept)
        return total

    def kept(upto: int, standing: tuple[str, ...] = ()) -> tuple[int, int]:
        """By the calls before `upto`: on the device, and on the host; the model itself has the
        outputs of calls of these kinds."""
        device, host = under_way(model.root.kept) + graphs(upto), 0
        for kind in sorted(set(kinds[:upto])):
            of = _kind(model, kind)
            left = of.kept if mode.recompute else of.saved
            all_calls = most = kinds[:upto].count(kind) * under_way(left)
            if mode.boundary == "host":
                host += all_calls
                most = largest(left, 2) + standing.count(kind) * under_way(left)
            device += min(all_calls, most)
        return device, host

    def waiting(call: int) -> int:
        """Gradients of units that one backward has come to, and comes to again."""
        if in_layers or not micro_batches:
            return 0
        both = set(model.calls[: call + 1]) & set(model.calls[call + 1 :])
        return sum(_kind(model, kinds[model.calls.index(n)]).trainable * GRADIENT for n in both)

    def gradients(call: int) -> int:
        """Those of what the call is given, and whatever is beside."""
        beside = Curve(sizes=(1,), values=(model.waiting[call] if model.waiting else 0,))
        return under_way(_kind(model, kinds[call]).gradient) + under_way(beside)

    def moment(upto: int, *sizes: int, standing: tuple[str, ...] = ()) -> tuple[int, int]:
        device, host = kept(upto, standing)
        return device + sum(sizes), host

    for call, kind in enumerate(kinds):
        of = _kind(model, kind)
        standing = kinds[-2:] if call + 1 == len(kinds) else (kind,)
        yield moment(call + 1, working(call, of.forward, of.saved_forward), standing=standing)
    head = model.root.head if mode.head == "whole" else model.root.chunked_cross_entropy
    yield moment(len(kinds), gradients(-1), largest(head), standing=kinds[-2:-1])
    for call in reversed(range(len(kinds))):
        of = _kind(model, kinds[call])
        work = working(call, of.backward, of.saved_backward)
        yield moment(call + 1, gradients(call), work, waiting(call))


# -- the profile -----------------------------------------------------------------------------------


def _kind(model: ModelProfile, name: str) -> UnitKind:
    return next(kind for kind in model.kinds if kind.name == name)


def _model(profile: Profile, worker: Worker) -> ModelProfile:
    """In the dtype that the worker computes in."""
    models = (profile.model, *profile.other_models)
    return next(model for model in models if model.compute_dtype == worker.compute_dtype)


def _class(profile: Profile, worker: Worker) -> ClassProfile:
    return next(c for c in profile.classes if c.device_class == worker.device_class)


def _elements(profile: Profile, unit: str) -> int:
    return profile.model.root.trainable if unit == ROOT else _kind(profile.model, unit).trainable


def _owned_of(plan: Plan, rank: int, numel: int) -> int:
    """The length of a rank's interval of a buffer, among those that divide the state with it."""
    own = plan.workers[rank]
    others = [w for w in plan.workers if plan.sharding == "all" or w.host == own.host]
    shares = tuple(w.state_share for w in others)
    return compute_shard_sizes(numel, shares)[others.index(own)]
