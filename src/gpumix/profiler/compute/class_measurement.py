"""Measurement of one device class, assembled into the planner's input."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from gpumix.cost.memory_layout.curves import remove_timing_noise
from gpumix.engine.loss.objective import make_objective
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.model.kernel_selection import apply_efficiency
from gpumix.engine.model.model_settings import (
    allow_single_sample_norm,
    find_layer_drop_rates,
    find_unit_conflicts,
)
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.engine.sharding.unit_discovery import (
    ModelUnits,
    Unit,
    count_buffer_bytes,
    count_frozen_bytes,
    count_packed_bytes,
    split_into_units,
)
from gpumix.engine.tensor_parallel.parallelize import parallelize_model, select_whole_model
from gpumix.engine.tensor_parallel.plans import resolve_tensor_plan
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.host.environment import host_memory_bytes
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.profiler.compute.numerics_check import TOLERANCE, compiled_error, keep_agreeing_settings
from gpumix.profiler.compute.optimizer_times import (
    OptimizerCost,
    time_host_copies,
    time_host_optimizer,
    time_host_sums,
    time_optimizer,
)
from gpumix.profiler.compute.peak_flops import measure_peak
from gpumix.profiler.compute.sweep import Pass, Point, Progress, Sweep, copy_to_device, sweep
from gpumix.profiler.compute.unit_kinds import separate_kinds
from gpumix.profiler.compute.unit_runner import FakeTensorParallelGroup, UnitRunner
from gpumix.profiler.compute.warm_up import warm_up
from gpumix.profiler.subject import Workload
from gpumix.schema.curve import Curve
from gpumix.schema.errors import GpumixError, InputError, NoFeasiblePlanError, get_first_line
from gpumix.schema.plan.optimizer_state import LEAST_QUANTISED
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.schema.profile.measurements import ClassMeasurement, TensorParallelMeasurement
from gpumix.schema.profile.profile import (
    ROOT,
    ClassProfile,
    ModelProfile,
    RootParameter,
    RootUnit,
    TensorParallelCollective,
    TensorParallelTraffic,
    UnitKind,
    UnitTimes,
)
from gpumix.schema.units import show_bytes

COMPILE_NOT_COMPARED = (
    "compiled units were not compared with the same units without, of which two runs differ, as "
    "they do with dropout"
)


def measure_class(
    subject: Workload, runtime: DeviceRuntime, *, device_class: str, progress: Progress
) -> ClassMeasurement:
    """Measure the units of a model on the local device. No other rank takes part.

    Raises:
        NoFeasiblePlanError: the device cannot hold one unit with one sample.
    """
    try:
        with allow_single_sample_norm():
            return _measured(subject, runtime, device_class, progress)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise ModelError(
            "the loss, or the model outside of its blocks, computes with parameters of the blocks",
            code="block-parameters-used-outside",
            why="the parameters of a block are on the device only while the model calls the block",
            fix="for decay use weight_decay of the optimizer; leave out a term over "
            "model.parameters(), or compute it inside of the blocks",
        ) from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(error, runtime, device_class) from error


def _measured(
    subject: Workload, runtime: DeviceRuntime, device_class: str, progress: Progress
) -> ClassMeasurement:
    begun = time.perf_counter()
    subject = keep_agreeing_settings(subject, runtime, device_class, progress)
    found, anatomy, measured = _sweep_class(subject, runtime, device_class, progress)
    settings = subject.settings
    dtype, chosen = settings.dtypes[device_class], settings.get_chosen(device_class)
    compiled = device_class in settings.compiled and found.compiled
    if compiled:
        chosen = chosen.with_reason("compile", f"{chosen.why('compile')}; {found.compile_finding}")
    elif found.compile_finding:
        chosen = chosen.without("compile", f"not used: {found.compile_finding}")
    clocks = warm_up(runtime, TORCH_DTYPE[dtype])  # as in training
    optimizer = time_optimizer(runtime, subject.optimizer_of, _largest_shapes(anatomy))
    of_class = ClassProfile(
        device_class=device_class,
        units=_make_unit_times(found),
        chunked_cross_entropy=_if_known(
            found, [p.chunked_cross_entropy_s for p in found.points], remove_timing_noise
        ),
        optimizer_s_per_element=optimizer.s_per_element,
        framework_bytes=runtime.framework_bytes(),  # libraries are loaded when first used
        largest_micro_batch=found.points[-1].size,
        host_copy=time_host_copies(runtime),
        host_optimizer_s_per_element=time_host_optimizer(runtime, subject.optimizer_of),
        host_sum_s_per_byte=time_host_sums(runtime),
        compiled=compiled,
        compute_dtype=dtype,
        efficiency=chosen.efficiency,
        choices=chosen.choices,
        clocks=clocks,
        peak=None if runtime.emulated else measure_peak(runtime, TORCH_DTYPE[dtype]),
        overruns=sum(p.overruns for p in found.points),
    )
    kinds = {unit.name: unit.kind for unit in anatomy.units}
    del anatomy
    return ClassMeasurement(
        device_class=of_class,
        model=measured,
        tp_measurements=tuple(_measure_groups(subject, runtime, of_class, kinds, progress)),
        host_memory_bytes=host_memory_bytes(),
        optimizer_bytes_per_element=_state_bytes(measured, optimizer),
        optimizer_state=optimizer.state_form,
        exchanges_matrices=optimizer.exchanges_matrices,
        seconds_spent=time.perf_counter() - begun,
        ended_by_budget_s=subject.budget_s if found.cut_short else None,
    )


def _sweep_class(
    subject: Workload,
    runtime: DeviceRuntime,
    device_class: str,
    progress: Progress,
    degree: int = 1,
    *,
    sequence: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> tuple[Sweep, ModelUnits, ModelProfile]:
    """Measure all points of the device, as one rank of a tensor-parallel group of `degree`, with
    sequence parallelism or without.

    Args:
        kinds: of units, by name, if already separated.
    """
    model = subject.model()
    anatomy = split_into_units(model, subject.units)
    fingerprint = anatomy.fingerprint()
    if kinds is not None:
        anatomy = anatomy.of_kinds(kinds)
    find_unit_conflicts(model).switch_off()
    find_layer_drop_rates(model).switch_off()
    settings, tp_group = subject.settings, None
    dtype, efficiency = settings.dtypes[device_class], settings.get_chosen(device_class).efficiency
    apply_efficiency(model, efficiency, runtime.torch_device)
    if degree > 1:
        tp_group = FakeTensorParallelGroup(degree, runtime.torch_device)
        anatomy = _split_units(subject, model, anatomy, tp_group, sequence=sequence)
    runner = UnitRunner(
        model,
        anatomy,
        device=runtime.torch_device,
        compute_dtype=TORCH_DTYPE[dtype],
        objective=subject.loss or make_objective(model),
        tp_group=tp_group,
        efficiency=efficiency,
    )
    if kinds is None:
        calls = separate_kinds(runner, copy_to_device(runner, subject.make_batch(1)))
        called = tuple(unit.name for unit in anatomy.units if unit.name in calls)
        if 0 < len(called) < len(anatomy.units):  # for example, image blocks with text-only samples
            others = len(anatomy.units) - len(called)
            progress(f"{device_class}: {others} blocks are not called, and gathered with the rest")
            of_called = replace(subject, units=called)
            return _sweep_class(
                of_called, runtime, device_class, progress, degree, sequence=sequence
            )
        anatomy = anatomy.of_kinds(runner.kind_of)
    if device_class in settings.compiled and tp_group is None:
        runner.compile(range(1, subject.global_batch + 1))
    warm_up(runtime, TORCH_DTYPE[dtype])
    name = device_class if tp_group is None else f"{device_class}, one of {degree}"
    name += ", positions divided" if sequence else ""
    found = sweep(
        runner,
        runtime,
        subject.make_batch,
        largest=subject.global_batch,
        budget_s=subject.budget_s if tp_group is None else subject.budget_s / 2,
        progress=lambda line: progress(f"{name}: {line}"),
    )
    if runner.compiled:
        error = compiled_error(runner, subject.make_batch(1))
        told = COMPILE_NOT_COMPARED
        if error is not None:
            told = f"compiled units are {error:.2g} off the same units without"
        if error is not None and not error <= TOLERANCE[dtype]:
            progress(f"{name}: compiled code is not used: {told}")
            uncompiled = replace(settings, compiled=settings.compiled - {device_class})
            plain = replace(subject, settings=uncompiled)
            found, anatomy, profile = _sweep_class(
                plain, runtime, device_class, progress, kinds=runner.kind_of
            )
            return replace(found, compile_finding=told), anatomy, profile
        found = replace(found, compiled=True, compile_finding=told)
    profile = _model_profile(anatomy, fingerprint, found, model, dtype, runtime.memory_limit_bytes)
    return found, anatomy, profile


def _split_units(
    subject: Workload,
    model: nn.Module,
    anatomy: ModelUnits,
    tp_group: FakeTensorParallelGroup,
    *,
    sequence: bool,
) -> ModelUnits:
    """Replace units by one rank's part of them in a tensor-parallel group."""
    styles = resolve_tensor_plan(model, subject.tensor)
    every = [unit.name for unit in anatomy.units] if sequence else []
    whole = select_whole_model(anatomy)
    return parallelize_model(anatomy, tp_group, styles, part=whole, sequence=every)[0]


def _measure_groups(
    subject: Workload,
    runtime: DeviceRuntime,
    alone: ClassProfile,
    kinds: Mapping[str, str],
    progress: Progress,
) -> Iterator[TensorParallelMeasurement]:
    """Yield the measurements of the device in a tensor-parallel group: for each degree that divides
    the model, without and with sequence parallelism where possible."""
    for degree in subject.degrees.get(alone.device_class, ()):
        refused: GpumixError | None = None
        found = False
        for sequence in sorted(set(subject.sequence)):
            try:
                yield _measure_group(
                    subject, runtime, alone, degree, progress, sequence=sequence, kinds=kinds
                )
                found = True
            except (InputError, ModelError) as error:
                if isinstance(error, ModelError) and not sequence:
                    raise  # a model failing without tensor parallelism, too
                refused = refused or error
                how = ", positions divided" if sequence else ""
                told = f"{error.what} ({error.why})" if error.why else error.what
                progress(f"{alone.device_class}, one of {degree}{how}: not possible; {told}")
        if refused is not None and subject.requires_tensor_parallel and not found:
            raise refused


def _measure_group(
    subject: Workload,
    runtime: DeviceRuntime,
    alone: ClassProfile,
    degree: int,
    progress: Progress,
    *,
    sequence: bool,
    kinds: Mapping[str, str],
) -> TensorParallelMeasurement:
    name = alone.device_class
    try:
        found, anatomy, model = _sweep_class(
            subject, runtime, name, progress, degree, sequence=sequence, kinds=kinds
        )
    except Exception as error:
        ours = isinstance(error, GpumixError) or is_out_of_memory(error)
        if ours or not subject.tensor:
            raise
        raise InputError(
            f"the model does not run as its tensor plan divides it over {degree} ranks",
            code="tensor-plan-fails",
            where="tensor_plan",
            why=get_first_line(error),
            fix="of layers in a row divide the first `colwise` and the last `rowwise`; what is not "
            "named is computed whole by every rank",
        ) from error
    summed = {u.kind: sum(s.window.numel for s in u.slots if s.summed) for u in anatomy.units}
    return TensorParallelMeasurement(
        degree=degree,
        sequence=sequence,
        enters=found.enters,
        leaves=found.leaves,
        device_class=alone.model_copy(
            update={
                "units": _make_unit_times(found),
                "chunked_cross_entropy": None,
                "largest_micro_batch": found.points[-1].size,
                "compiled": False,
            }
        ),
        model=model,
        told={
            name: TensorParallelTraffic(
                forward=_merge_collectives(found, name, "forward"),
                backward=_merge_collectives(found, name, "backward"),
                gradient=_merge_collectives(found, name, "gradient"),
                summed=summed.get(name, 0),
                part=_if_known(found, [p.part.get(name) for p in found.points]),
            )
            for name in found.points[0].forward_s
        },
    )


def _merge_collectives(found: Sweep, name: str, way: Pass) -> tuple[TensorParallelCollective, ...]:
    """Merge collectives of equal size."""
    every = zip(*(point.told.get((name, way), []) for point in found.points), strict=True)
    times = Counter((of_points[0][0], tuple(size for _, size in of_points)) for of_points in every)
    return tuple(
        TensorParallelCollective(
            operation=operation, times=n, bytes=_curve(found, [n * size for size in sizes])
        )
        for (operation, sizes), n in times.items()
    )


def _largest_shapes(anatomy: ModelUnits) -> list[torch.Size]:
    """Return the shapes of trained parameters of the largest unit, small ones first."""
    unit = max(anatomy.all, key=lambda u: (u.name != ROOT, u.trainable))
    shapes = [s.parameter.shape for s in unit.slots if s.parameter.requires_grad]
    return sorted(shapes, key=lambda shape: shape.numel())


def _state_bytes(model: ModelProfile, optimizer: OptimizerCost) -> float:
    if optimizer.state_form == "8bit":
        return model.quantised_adamw_bytes
    of_matrices, of_others = optimizer.state_bytes
    if of_matrices == of_others:
        return of_others
    return model.mean_per_element(of_matrices=of_matrices, of_others=of_others)


def _too_large(error: Exception, runtime: DeviceRuntime, device_class: str) -> NoFeasiblePlanError:
    return NoFeasiblePlanError(
        "one unit with one sample does not fit",
        code="one-sample-does-not-fit",
        where=f"device class '{device_class}', {show_bytes(runtime.memory_limit_bytes)}",
        why=get_first_line(error),
        fix="shorten samples (sequence_length in a job), or leave this class out of the cluster",
    )


def _make_unit_times(found: Sweep) -> dict[str, UnitTimes]:
    return {
        kind: UnitTimes(
            forward=_curve(found, remove_timing_noise([p.forward_s[kind] for p in found.points])),
            backward=_curve(found, remove_timing_noise([p.backward_s[kind] for p in found.points])),
            gradient=_curve(found, remove_timing_noise([p.gradient_s[kind] for p in found.points])),
            inputs=_make_split_curve(found, kind, 0),
            weights=_make_split_curve(found, kind, 1),
        )
        for kind in found.points[0].forward_s
    }


def _make_split_curve(found: Sweep, kind: str, part: int) -> Curve | None:
    """Return the seconds of a part of a split backward, or None without splits. Parts are timed
    once per size, so the median ratio to the whole backward over sizes is used."""
    if kind == ROOT or not found.points[0].parts_s:
        return None
    ratios = [
        p.parts_s[kind][part] / p.gradient_s[kind] for p in found.points if p.gradient_s[kind] > 0
    ]
    whole = _curve(found, remove_timing_noise([p.gradient_s[kind] for p in found.points]))
    return whole.scaled(median(ratios or [0.0]))


def _model_profile(
    anatomy: ModelUnits,
    fingerprint: str,
    found: Sweep,
    model: nn.Module,
    compute_dtype: ComputeDtype,
    memory_bytes: int,
) -> ModelProfile:
    kind_of = {unit.name: unit.kind for unit in anatomy.units}
    first_of_kind = {unit.kind: unit for unit in reversed(anatomy.units)}
    first, curve = found.points[0], found.curve
    return ModelProfile(
        fingerprint=fingerprint,
        compute_dtype=compute_dtype,
        calls=found.calls,
        kind_of_call=tuple(kind_of[name] for name in found.calls),
        needs=found.flows.needs,
        no_stages=found.flows.no_stages,
        waiting=_waiting(first, [kind_of[name] for name in found.calls]),
        kinds=tuple(
            _make_unit_kind(found, kind, unit, TORCH_DTYPE[compute_dtype])
            for kind, unit in sorted(first_of_kind.items())
            if kind in first.kept
        ),
        root=RootUnit(
            trainable=anatomy.root.trainable,
            frozen_bytes=count_frozen_bytes(anatomy.root.slots, TORCH_DTYPE[compute_dtype]),
            packed_bytes=count_packed_bytes(anatomy.root.slots),
            buffer_bytes=count_buffer_bytes(model),
            before=found.flows.before,
            after=found.flows.after,
            parameters=tuple(_root_parameters(anatomy.root, TORCH_DTYPE[compute_dtype])),
            kept=curve(lambda p: p.kept[ROOT]),
            # A head that did not fit takes more than all memory.
            head=curve(lambda p: p.backward_bytes.get(ROOT, memory_bytes)),
            backward=curve(lambda p: p.before_backward_bytes[ROOT]),
            chunked_cross_entropy=_if_known(
                found, [p.chunked_cross_entropy_bytes for p in found.points]
            ),
            flops=first.flops[ROOT],
            before_flops=first.before_flops,
            backward_flops=first.backward_flops[ROOT],
            before_backward_flops=first.before_backward_flops,
        ),
    )


def _make_unit_kind(found: Sweep, kind: str, unit: Unit, dtype: torch.dtype) -> UnitKind:
    first, curve, splits = found.points[0], found.curve, bool(found.points[0].split)
    return UnitKind(
        name=kind,
        trainable=unit.trainable,
        matrices=_count_elements(unit, lambda p: p.dim() == 2),
        small=_count_elements(unit, lambda p: p.numel() < LEAST_QUANTISED),
        frozen_bytes=count_frozen_bytes(unit.slots, dtype),
        packed_bytes=count_packed_bytes(unit.slots),
        kept=curve(lambda p: p.kept[kind]),
        saved=curve(lambda p: p.saved[kind]),
        saved_forward=curve(lambda p: p.forward_most(p.saved_forward_bytes, kind)),
        saved_backward=curve(lambda p: p.backward_most(p.saved_backward_bytes, kind)),
        gradient=curve(lambda p: p.gradient[kind]),
        forward=curve(lambda p: p.forward_most(p.forward_bytes, kind)),
        backward=curve(lambda p: p.backward_most(p.backward_bytes, kind)),
        split=curve(lambda p: p.split[kind]) if splits else None,
        split_backward=curve(lambda p: p.split_backward_bytes[kind]) if splits else None,
        flops=first.flops[kind],
        backward_flops=first.backward_flops[kind],
        rerun_flops=first.rerun_flops[kind],
        outputs={
            place: _curve(found, [p.outputs[kind][place] for p in found.points])
            for place in first.outputs[kind]
        },
    )


def _waiting(point: Point, kinds: Sequence[str]) -> tuple[float, ...]:
    """Return `ModelProfile.waiting`."""
    most = map(max, pairwise(point.gradients))
    above = tuple(max(0, n - point.gradient[k]) / point.size for n, k in zip(most, kinds))
    return above if any(above) else ()


def _root_parameters(root: Unit, compute_dtype: torch.dtype) -> Iterator[RootParameter]:
    for slot in root.slots:
        trained = slot.parameter.requires_grad
        yield RootParameter(
            name=slot.name,
            trainable=slot.window.numel if trained else 0,
            frozen_bytes=count_frozen_bytes([slot], compute_dtype),
            packed_bytes=count_packed_bytes([slot]),
        )


def _count_elements(unit: Unit, counts: Callable[[nn.Parameter], bool]) -> int:
    """Count trained elements of the parameters that `counts` is true of."""
    trained = [slot for slot in unit.slots if slot.parameter.requires_grad]
    return sum(slot.window.numel for slot in trained if counts(slot.parameter))


def _curve(found: Sweep, values: Sequence[float]) -> Curve:
    return Curve(sizes=tuple(float(p.size) for p in found.points), values=tuple(map(float, values)))


def _if_known(
    found: Sweep,
    values: Sequence[float | None],
    mended: Callable[[Sequence[float]], Sequence[float]] = tuple,
) -> Curve | None:
    """Return the curve of values measured at every size; None if any is missing."""
    known = [value for value in values if value is not None]
    return _curve(found, mended(known)) if len(known) == len(values) else None
