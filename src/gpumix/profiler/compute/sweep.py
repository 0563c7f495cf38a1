"""Time and memory measurements of a model's units on one device.

Only one unit of each kind is computed, and the root unit, at micro-batches of 1, 2, 4, ... until
memory runs out (then once more half-way), a larger one brings no gain, or the budget is spent.
Memory is read from the device's own allocator while the engine's own parts run: the numbers are
real for the device's kernels, for any model, including models with data-dependent control flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median_high
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.engine.batch.batch_split import count_samples
from gpumix.engine.model.forward_coroutine import UnitCall
from gpumix.engine.model.kernel_selection import to_channels_last
from gpumix.engine.schedule.remote_stage_values import make_input_shape_key
from gpumix.engine.sequence_parallel.positions import is_divided
from gpumix.engine.unit import split_backward
from gpumix.engine.unit.unit_call import UnitBoundary
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.profiler.compute.call_order import check_all_called
from gpumix.profiler.compute.dataflow import DataFlow, find_flows
from gpumix.profiler.compute.memory_counter import FlopCounter, MemoryCounter
from gpumix.profiler.compute.unit_runner import (
    ModelRun,
    RecordedOutputs,
    Told,
    UnitRunner,
    tensor_bytes,
)
from gpumix.schema.curve import Curve
from gpumix.schema.profile.profile import ROOT

# A micro-batch less than this much faster per sample than the previous, twice in a row, ends it.
WORTHWHILE_GAIN = 0.02
REPEATS = 3
TRIES = 3  # per size, where an emulated device falls behind its speed
GRADIENT_STD = 1e-3

Batch = Any
Pass = Literal["forward", "backward", "gradient"]
MakeBatch = Callable[[int], Batch]
Progress = Callable[[str], None]


@dataclass
class Point:
    """Measured seconds and bytes of a micro-batch size by unit kind, `ROOT` for the root unit.

    Times are invalid if an emulated device has `overruns` while they are taken.
    """

    size: int
    overruns: int = 0
    forward_s: dict[str, float] = field(default_factory=dict)
    backward_s: dict[str, float] = field(default_factory=dict)
    # Backward of a kept graph; for the root, of the code before the first unit.
    gradient_s: dict[str, float] = field(default_factory=dict)
    parts_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # of a split backward
    kept: dict[str, int] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    split_backward_bytes: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    # Per sample, of forward and backward; of the root before the first unit, too.
    flops: dict[str, float] = field(default_factory=dict)
    backward_flops: dict[str, float] = field(default_factory=dict)
    rerun_flops: dict[str, float] = field(default_factory=dict)
    before_flops: float = 0.0
    before_backward_flops: float = 0.0
    outputs: dict[str, dict[int, int]] = field(default_factory=dict)  # bytes by place
    gradient: dict[str, int] = field(default_factory=dict)
    # Bytes of gradients alive after the backward of call 0, call 1, ..., and of the head.
    gradients: list[int] = field(default_factory=list)
    # Working set of the code between a call of a kind and the next call, and of its backward.
    after_bytes: dict[str, int] = field(default_factory=dict)
    before_backward_bytes: dict[str, int] = field(default_factory=dict)
    forward_bytes: dict[str, int] = field(default_factory=dict)
    backward_bytes: dict[str, int] = field(default_factory=dict)
    saved_forward_bytes: dict[str, int] = field(default_factory=dict)
    saved_backward_bytes: dict[str, int] = field(default_factory=dict)
    # Bytes of a rank's part of hidden states, with sequence parallelism.
    part: dict[str, int] = field(default_factory=dict)
    # Collectives of a tensor-parallel group by unit kind and pass: operation and bytes of each.
    told: dict[tuple[str, Pass], list[Told]] = field(default_factory=dict)
    chunked_cross_entropy_s: float | None = None  # as `backward_s` of the root; None: not supported
    chunked_cross_entropy_bytes: int | None = None

    @property
    def has_full_logits(self) -> bool:
        """Flag: full logits fit in memory; otherwise times of the root are chunked."""
        return ROOT in self.backward_bytes

    def forward_most(self, of_calls: dict[str, int], kind: str) -> int:
        """Return the peak working set of a kind's forward and the code after it."""
        return max(of_calls[kind], self.after_bytes.get(kind, 0))

    def backward_most(self, of_calls: dict[str, int], kind: str) -> int:
        """Return the peak working set of a kind's backward, and of the code before in backward."""
        return max(of_calls[kind], self.before_backward_bytes.get(kind, 0))

    def seconds_per_sample(self) -> float:
        kinds = set(self.forward_s) - {ROOT}
        return sum(self.forward_s[k] + self.backward_s[k] for k in kinds) / self.size


@dataclass
class Sweep:
    """Points of one device, in growing size. `cut_short`: the budget ended before the largest size;
    `compiled`: the times are of compiled code; `compile_finding`: its error. See `ModelRun` for
    `enters` and `leaves`."""

    calls: tuple[str, ...]
    points: list[Point]
    flows: DataFlow
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    cut_short: bool = False
    compiled: bool = False
    compile_finding: str = ""

    def curve(self, of: Callable[[Point], float]) -> Curve:
        """Return a number of each point by micro-batch size."""
        sizes = tuple(float(point.size) for point in self.points)
        return Curve(sizes=sizes, values=tuple(float(of(point)) for point in self.points))


def sweep(
    runner: UnitRunner,
    runtime: DeviceRuntime,
    make_batch: MakeBatch,
    *,
    largest: int,
    budget_s: float,
    progress: Progress,
) -> Sweep:
    """Measure micro-batches of growing size.

    Args:
        make_batch: makes a batch of a number of samples, on the host.
        largest: the largest micro-batch of interest.
        budget_s: no new size is begun that would probably end later than this.

    Raises:
        torch.OutOfMemoryError: one sample is too much.
    """
    with MemoryCounter(runtime) as memory:
        # Allocations of libraries at their first call do not belong to the model, nor does memory
        # for compiling, done for one sample and for more.
        for size in (1, 2)[: largest if runner.compiled else 1]:
            measurement, batch = _Measurement(runner, runtime, memory), make_batch(size)
            calls = measurement.warm_up(batch)
    begun = time.perf_counter()
    found = Sweep(calls, [], measurement.flows(batch), *measurement.ends)
    sizes, ran_out = list(_sizes(largest)), False
    while sizes:
        size, started = sizes.pop(0), time.perf_counter()
        try:
            with MemoryCounter(runtime) as memory:
                point = _Measurement(runner, runtime, memory).run(make_batch(size))
        except Exception as error:
            if not is_out_of_memory(error) or not found.points:
                raise
            fitted = found.points[-1].size
            between = (fitted + size) // 2
            sizes = [between] if between > fitted and not ran_out else []
            ran_out = True
            found.cut_short = bool(sizes) and time.perf_counter() - begun > budget_s
            if found.cut_short:
                break
            continue
        found.points.append(point)
        spoiled = ", too long: this machine was busy" if point.overruns else ""
        taken = f"{point.seconds_per_sample() * 1e3:.2f} ms per sample of one block"
        progress(f"micro-batch {size}: {taken}{spoiled}")
        now = time.perf_counter()
        if _saturated(found.points):
            break
        found.cut_short = bool(sizes) and now - begun + 2 * (now - started) > budget_s
        if found.cut_short:
            break
    if found.cut_short:
        progress(f"the budget of {budget_s:g} s ended it: larger micro-batches may be faster")
    return found


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _saturated(points: list[Point]) -> bool:
    if len(points) < 3:
        return False
    speeds = [1 / p.seconds_per_sample() for p in points[-3:]]
    return all(b < a * (1 + WORTHWHILE_GAIN) for a, b in pairwise(speeds))


class _Measurement:
    """Measurement of one micro-batch size: a first walk counts memory, later walks are timed."""

    def __init__(self, runner: UnitRunner, runtime: DeviceRuntime, memory: MemoryCounter) -> None:
        self._runner = runner
        self._runtime = runtime
        self._memory = memory
        self._splits = not split_backward.explain_unsupported()
        self._seen: dict[str, tuple[UnitCall, RecordedOutputs]] = {}
        self._outputs: dict[object, RecordedOutputs] = {}  # by kind and inputs of a call
        self.ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def warm_up(self, batch: Batch) -> tuple[str, ...]:
        """Compute everything once, and return the names of the calls."""
        size = count_samples(batch)
        self._point = Point(size)
        calls: tuple[str, ...] = ()
        try:
            calls = self._first_walk(batch)
            self._count_chunked_cross_entropy(batch, len(calls))
        except Exception as error:
            if self._runner.head.layer is None or not is_out_of_memory(error):
                raise
        if not calls:  # full logits may not fit, and need not exist
            calls = self._first_walk(batch, in_chunks=True)
        check_all_called(self._runner.kind_of, calls)
        for kind, (call, _) in self._seen.items():
            self._count_unit(kind, call)
        if size == 1 and self._point.before_flops:
            self._count_backward_flops_before_units(batch)
        return calls

    def flows(self, batch: Batch) -> DataFlow:
        """Return the data flow between calls, after `warm_up`."""
        runner, in_chunks = self._runner, not self._point.has_full_logits
        return find_flows(runner, copy_to_device(runner, batch), in_chunks=in_chunks)

    def run(self, batch: Batch) -> Point:
        calls = self.warm_up(batch)
        with self._memory.stop_tracking():
            for _ in range(TRIES):
                before = self._runtime.overruns
                self._time_units()
                self._time_root(batch, len(calls))
                self._point.overruns = self._runtime.overruns - before
                if not self._point.overruns:
                    break
        return self._point

    # -- memory --------------------------------------------------------------------------------

    def _first_walk(self, batch: Batch, *, in_chunks: bool = False) -> tuple[str, ...]:
        """Run the model once to find a call of each kind, and measure the code between calls."""
        runner, point = self._runner, self._point
        point.kept[ROOT] = 0
        self._seen.clear()
        self._outputs.clear()
        with (
            runner.start(self._on_device_counted(batch)) as walk,
            runner.head_in_chunks() if in_chunks else nullcontext(),
        ):
            with FlopCounter() as flops, self._record_collectives(ROOT, "forward"):
                point.kept[ROOT] += self._memory.measure_added(walk.go_on)
            if walk.call is None:
                check_all_called(runner.kind_of, ())
            point.before_flops = flops.total / point.size
            outputs: Any = None
            while walk.call is not None:
                kind = runner.kind_of[walk.call.unit]
                if self._has_more_gradients(kind, walk.call):
                    self._seen[kind] = (walk.call, self._forward_counted(kind, walk.call))
                    self._outputs[self._alike(walk.call)] = self._seen[kind][1]
                outputs = self._again(walk)
                before = self._memory.current()
                self._memory.reset_peak()
                before_stretch = flops.total
                with (
                    flops,
                    self._record_collectives(ROOT, "backward"),
                ):  # after the last call: the head's
                    walk.go_on(outputs)
                if walk.call is not None:  # the code between two calls; otherwise the head
                    kept = max(0, self._memory.current() - before)
                    point.kept[ROOT] += kept
                    _raise_maximum(point.after_bytes, kind, self._memory.peak() - before - kept)
            with FlopCounter() as backward, self._record_collectives(ROOT, "backward", more=True):
                walk.loss_backward()
            found = self._head_bytes(before, walk)
            self._count_gradients(walk)
            if in_chunks and runner.head.supported:
                flops.total = before_stretch + self._head_flops(outputs)
                backward.total = int(2 * self._head_flops(outputs))
                point.chunked_cross_entropy_bytes = found
            else:
                point.backward_bytes[ROOT] = found
            point.flops[ROOT] = flops.total / point.size
            point.backward_flops[ROOT] = backward.total / point.size
            self.ends = tuple(walk.enters), tuple(walk.leaves)
            return tuple(walk.calls)

    def _has_more_gradients(self, kind: str, call: UnitCall) -> bool:
        """Check if a call does more than the recorded call of its kind: a call may run without
        gradients, and if everything before it is frozen, its inputs need none."""
        known = self._seen.get(kind)
        return known is None or _get_gradient_needs(call) > _get_gradient_needs(known[0])

    @contextmanager
    def _record_collectives(self, name: str, way: Pass, *, more: bool = False) -> Iterator[None]:
        """Record a tensor-parallel group's collectives in a `with` block; `more` appends."""
        tp_group = self._runner.tp_group
        if tp_group is None:
            yield
            return
        before = len(tp_group.told)
        yield
        found = self._point.told.get((name, way), []) if more else []
        self._point.told[name, way] = found + tp_group.told[before:]

    def _count_chunked_cross_entropy(self, batch: Batch, calls: int) -> None:
        runner = self._runner
        with runner.start(copy_to_device(runner, batch)) as walk:
            outputs = self._to_last_call(walk, calls)
            before = self._memory.current()
            self._memory.reset_peak()
            with runner.head_in_chunks():
                walk.go_on(outputs)
                walk.loss_backward()
            if runner.head.supported:
                self._point.chunked_cross_entropy_bytes = self._head_bytes(before, walk)

    def _head_bytes(self, before: int, walk: ModelRun) -> int:
        return max(0, self._memory.peak() - before - walk.gradient_bytes)

    def _count_gradients(self, walk: ModelRun) -> None:
        """Run backward from call to call, without computing the units."""
        point, found = self._point, [walk.gradient_bytes]
        for number in reversed(range(len(walk.calls))):
            before = self._memory.current()
            walk.drop_gradients(number)
            self._memory.reset_peak()
            walk.backward(number)
            kind = self._runner.kind_of[walk.calls[number]] if number else ROOT
            _raise_maximum(point.before_backward_bytes, kind, self._memory.peak() - before)
            found.append(walk.gradient_bytes)
        point.gradients = found[::-1]

    def _head_flops(self, outputs: Any) -> float:
        """Return the FLOPs of logits that did not fit in memory."""
        layer = self._runner.head.layer
        assert layer is not None, "else there is no chunked cross-entropy"
        rows = max(t.numel() for t in _leaves(outputs)) // layer.in_features
        return 2.0 * rows * layer.in_features * layer.out_features

    def _on_device_counted(self, batch: Batch) -> Batch:
        made: list[Batch] = []

        def move() -> None:
            made.append(copy_to_device(self._runner, batch))

        self._point.kept[ROOT] += self._memory.measure_added(move)
        return made[0]

    def _forward_counted(self, kind: str, call: UnitCall) -> RecordedOutputs:
        with FlopCounter() as flops:  # compiled code hides operations
            returned = self._runner.returned(call)
        sizes = {n: t.nbytes for n, t in enumerate(returned.leaves) if torch.is_tensor(t)}
        self._point.outputs[kind] = sizes
        for divided in filter(
            is_divided, tree_leaves((call.args, call.kwargs), is_leaf=is_divided)
        ):
            self._point.part[kind] = divided.part.nbytes
        self._point.flops[kind] = flops.total / self._point.size
        del returned
        before = self._memory.current()
        self._memory.reset_peak()
        cut = self._runner.cut(call)
        with self._record_collectives(kind, "forward"):
            outputs = RecordedOutputs.of(cut)
        kept = self._memory.current() - before  # includes the cut's memory for its backward
        self._point.kept[kind] = max(0, kept)
        self._point.forward_bytes[kind] = max(0, self._memory.peak() - before - kept)
        return outputs

    def _count_unit(self, kind: str, call: UnitCall) -> None:
        point, memory = self._point, self._memory
        cut = self._runner.cut(call)
        cut.forward()
        with self._record_collectives(kind, "backward"):
            point.backward_bytes[kind], point.gradient[kind] = self._backward_counted(cut)
        kept = self._runner.cut(call, recompute=False)
        before = memory.current()
        memory.reset_peak()
        outputs = kept.forward()
        saved = memory.current() - before
        point.saved[kind] = max(0, saved)
        point.saved_forward_bytes[kind] = max(0, memory.peak() - before - saved)
        del outputs
        with self._record_collectives(kind, "gradient"):
            point.saved_backward_bytes[kind], _ = self._backward_counted(kept)
        del kept
        if self._splits:
            self._count_split(kind, call)
        if point.size == 1:
            self._count_backward_flops(kind, call)

    def _count_backward_flops(self, kind: str, call: UnitCall) -> None:
        with self._runner.uncompiled():  # compiled code hides operations
            cut = self._runner.cut(call, recompute=False)
            cut.forward()
            _give_gradients(cut.leaves)
            with FlopCounter() as flops:
                cut.backward()
        self._point.backward_flops[kind] = float(flops.total - flops.rerun)
        self._point.rerun_flops[kind] = float(flops.rerun)

    def _count_split(self, kind: str, call: UnitCall) -> None:
        """Measure memory between the two parts of a split backward, and the larger working set."""
        point, memory, before = self._point, self._memory, self._memory.current()
        cut = self._runner.cut(call, recompute=False)
        cut.forward()
        _give_gradients(cut.leaves)
        memory.reset_peak()
        cut.backward(splits=True)
        left = memory.current()
        working = memory.peak() - left
        if cut.weights is not None:
            memory.reset_peak()
            cut.weights.backward()
            working = max(working, memory.peak() - left)
        point.split[kind], point.split_backward_bytes[kind] = max(0, left - before), working

    def _backward_counted(self, cut: UnitBoundary) -> tuple[int, int]:
        """Return the working set of a backward, and the bytes of input gradients in it."""
        _give_gradients(cut.leaves)
        before = self._memory.current()
        self._memory.reset_peak()
        gradients = tensor_bytes(cut.backward())
        return max(0, self._memory.peak() - before), gradients

    def _count_backward_flops_before_units(self, batch: Batch) -> None:
        runner = self._runner
        with runner.start(copy_to_device(runner, batch)) as walk:
            walk.go_on()
            first = runner.cut(walk.call).links if walk.call else []
            with FlopCounter() as flops:
                walk.root_backward(first)
        self._point.before_backward_flops = float(flops.total)
        self._point.backward_flops[ROOT] += float(flops.total)

    # -- time ----------------------------------------------------------------------------------

    def _time_units(self) -> None:
        for kind, (call, _) in self._seen.items():
            forward, backward, gradient = [], [], []
            for _ in range(REPEATS):
                cut = self._runner.cut(call)
                forward.append(self._timed(cut.forward))
                _give_gradients(cut.leaves)
                backward.append(self._timed(cut.backward))
                kept = self._runner.cut(call, recompute=False)
                kept.forward()
                _give_gradients(kept.leaves)
                gradient.append(self._timed(kept.backward))
            self._point.forward_s[kind] = median_high(forward)
            self._point.backward_s[kind] = median_high(backward)
            self._point.gradient_s[kind] = median_high(gradient)
            if self._splits:
                self._point.parts_s[kind] = self._parts_timed(call)

    def _parts_timed(self, call: UnitCall) -> tuple[float, float]:
        """Return the seconds of both parts of a split backward."""
        halved = self._runner.cut(call, recompute=False)
        halved.forward()
        _give_gradients(halved.leaves)
        first = self._timed(partial(halved.backward, splits=True))
        second = 0.0
        if halved.weights is not None:
            second = self._timed(halved.weights.backward)
        return first, second

    def _time_root(self, batch: Batch, calls: int) -> None:
        runner, point = self._runner, self._point
        forward: list[float] = []
        before: list[float] = []
        ways: dict[bool, list[float]] = {}  # by chunked
        if point.chunked_cross_entropy_bytes is not None:
            ways[True] = []
        if point.has_full_logits:
            ways[False] = []
        for _ in range(REPEATS):
            for in_chunks, backward in ways.items():
                with runner.start(copy_to_device(runner, batch)) as walk:
                    forward.append(self._timed(walk.go_on))
                    first = runner.cut(walk.call).links if walk.call else []
                    outputs = self._to_last_call(walk, calls)
                    with runner.head_in_chunks() if in_chunks else nullcontext():
                        head_s = self._timed(partial(walk.go_on, outputs))
                        head_s += self._timed(walk.loss_backward)
                    before.append(self._timed(partial(walk.root_backward, first)))
                    backward.append(head_s + before[-1])
        point.forward_s[ROOT], point.gradient_s[ROOT] = median_high(forward), median_high(before)
        taken = {in_chunks: median_high(backward) for in_chunks, backward in ways.items()}
        point.chunked_cross_entropy_s = taken.get(True)
        point.backward_s[ROOT] = taken[False] if point.has_full_logits else taken[True]

    def _to_last_call(self, walk: ModelRun, calls: int) -> Any:
        """Hand over the outputs of all calls except the last, and return the last outputs."""
        while len(walk.calls) < calls:
            walk.go_on(self._again(walk) if walk.calls else None)
        return self._again(walk)

    def _again(self, walk: ModelRun) -> Any:
        """Return the outputs of the current call, copied from the first equal call."""
        assert walk.call is not None
        alike = self._alike(walk.call)
        if alike not in self._outputs:
            self._outputs[alike] = RecordedOutputs.of(self._runner.cut(walk.call))
        return self._outputs[alike].again(walk.call)

    def _alike(self, call: UnitCall) -> object:
        return self._runner.kind_of[call.unit], make_input_shape_key(call)

    def _timed(self, work: Callable[[], object]) -> float:
        self._runtime.synchronize()
        self._runtime.idle()
        begun = time.perf_counter()
        work()
        self._runtime.synchronize()
        return time.perf_counter() - begun


def copy_to_device(runner: UnitRunner, batch: Batch) -> Batch:
    """Copy a batch to the device, in the engine's layout and dtype."""
    dtype, device = runner.compute_dtype, runner.device

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kept = dtype if value.is_floating_point() else value.dtype
        moved = value.to(device, kept, copy=True)
        return to_channels_last(moved) if runner.images_last else moved

    return tree_map(move, batch)


def _raise_maximum(most: dict[str, int], name: str, value: int) -> None:
    most[name] = max(most.get(name, 0), value)


def _leaves(outputs: Any) -> list[torch.Tensor]:
    tensors = (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor))
    return [t for t in tensors if t.requires_grad]


def _get_gradient_needs(call: UnitCall) -> tuple[bool, bool]:
    """Return if a call runs with gradients, and if any input requires a gradient."""
    tensors = tree_leaves((call.args, call.kwargs))
    wanted = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tensors)
    return call.state.gradients, wanted


def _give_gradients(leaves: list[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = torch.randn_like(leaf).mul_(GRADIENT_STD)
