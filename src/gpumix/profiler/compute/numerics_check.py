"""Check of a device's compute settings against plain fp32: mismatching settings are disabled.

One unit of each kind runs forward and backward on one sample, in plain fp32 and in the chosen way,
with equal weights, inputs and gradients of the outputs; so does the code before the first unit. The
check compares outputs, gradients of inputs, and gradients of parameters, each by the norm of the
difference over the norm.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from gpumix.cost.memory_layout.chunk_rows import (
    GPU_MAX_CHUNK_ROWS,
    MIN_CHUNK_ROWS,
    compute_chunk_rows,
)
from gpumix.engine.cross_entropy.linear_cross_entropy import Gradients, LinearCrossEntropy
from gpumix.engine.loss.chunked_cross_entropy import find_output_layer
from gpumix.engine.loss.objective import make_objective
from gpumix.engine.model.kernel_selection import apply_efficiency
from gpumix.engine.model.model_settings import find_unit_conflicts
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.estimates.kernel_choice import ChosenSettings
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.hardware.runtime import is_gpu
from gpumix.profiler.compute.sweep import Progress, copy_to_device
from gpumix.profiler.compute.unit_kinds import separate_kinds
from gpumix.profiler.compute.unit_runner import RecordedOutputs, UnitRunner
from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, KernelSettings
from gpumix.schema.errors import get_first_line
from gpumix.schema.plan.stage import ComputeDtype

if TYPE_CHECKING:
    from gpumix.profiler.subject import Workload

# Norms of errors over norms. Each of a unit's products loses some bits: a real error is far larger.
TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 3e-2}
# Where another dtype changes the choice of a mixture's router, a unit's error is far larger than
# rounding; a broken unit's error is larger still.
TOLERANCE_OF_DTYPE = 0.3
WORTHWHILE = 1.02
REPEATS = 5
RANDOM_ERROR = (
    1e-2  # two equal runs differ by more than rounding explains: random numbers are drawn
)
CHECKED_SETTINGS = ("tf32", "attention", "kernels", "channels_last")
OPTIMIZER_ELEMENTS = 1000
STEPS = 3
ROOT_ELEMENTS = 2**26  # largest parameter of the root with compared gradients
RANDOM_ELEMENTS = 2**20  # random numbers, repeated in larger tensors

_NAMES = {dtype: name for name, dtype in TORCH_DTYPE.items()}

Computed = dict[str, torch.Tensor]
"""Results of a unit by name, in fp32 on the host."""


def keep_agreeing_settings(
    subject: Workload, runtime: DeviceRuntime, device_class: str, progress: Progress
) -> Workload:
    """Return the subject with only the choices that agree with fp32, and the findings. Nothing is
    computed if the device uses plain fp32 only."""
    settings = subject.settings
    dtype, chosen = settings.dtypes[device_class], settings.get_chosen(device_class)
    check = _Check(subject, runtime)
    for name, way in _iterate_settings(dtype, chosen.efficiency):
        tolerance = TOLERANCE_OF_DTYPE if name == "dtype" else _tolerance(way, dtype)
        try:
            wrong, told = check.difference(way, dtype, tolerance)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The compute dtype is not given up for lack of memory.
            wrong, told = name != "dtype", "there is no room to check it beside fp32"
        if wrong:
            progress(f"{device_class}: its {name} is not used: {told}")
            chosen = chosen.without(name, f"not used: {told}")
            dtype = "fp32" if name == "dtype" else dtype
        else:
            chosen = chosen.with_reason(name, f"{chosen.why(name)}; {told}")
    chosen = _check_optimizer(subject, runtime, chosen)
    chosen = _check_loss_kernel(subject, runtime, chosen, TORCH_DTYPE[dtype])
    agreeing = replace(
        settings,
        dtypes={**settings.dtypes, device_class: dtype},
        chosen={**settings.chosen, device_class: chosen},
    )
    return replace(subject, settings=agreeing)


def _iterate_settings(
    dtype: ComputeDtype, efficiency: KernelSettings
) -> Iterator[tuple[str, KernelSettings]]:
    """Yield the differences from plain fp32, one at a time."""
    if dtype != "fp32":
        yield "dtype", PLAIN_EFFICIENCY
    plain, settings = PLAIN_EFFICIENCY.settings(), efficiency.settings()
    for name in CHECKED_SETTINGS:
        if settings[name] != plain[name]:
            yield name, PLAIN_EFFICIENCY.model_copy(update={name: settings[name]})


def _tolerance(way: KernelSettings, dtype: ComputeDtype) -> float:
    return TOLERANCE["tf32" if way.tf32 and dtype == "fp32" else dtype]


class _Check:
    """Comparison with plain fp32, computed once. All ways share one batch: a program may make a
    different batch each time."""

    def __init__(self, subject: Workload, runtime: DeviceRuntime) -> None:
        self._subject = subject
        self._runtime = runtime

    @cached_property
    def _batch(self) -> Any:
        return self._subject.make_batch(1)

    @cached_property
    def _reference(self) -> Computed:
        return compute_results(self._subject, self._runtime, PLAIN_EFFICIENCY, "fp32", self._batch)

    def difference(
        self, way: KernelSettings, dtype: ComputeDtype, tolerance: float
    ) -> tuple[bool, str]:
        """Return if a way is wrong, and its error or the reason for failure."""
        reference = self._reference
        try:
            found = compute_results(self._subject, self._runtime, way, dtype, self._batch)
        except Exception as failure:  # any library error
            if is_out_of_memory(failure):
                raise
            return True, get_first_line(failure)
        error = find_largest_error(found, reference)
        if not error <= tolerance:  # NaN fails too
            return True, f"a unit is {error:.1%} off fp32, {tolerance:.2%} is borne"
        return False, f"a unit is {error:.2g} off fp32"


def find_largest_error(found: Computed, reference: Computed) -> float:
    """Return the largest error of any tensor."""
    errors = [0.0]
    for name, right in reference.items():
        size = right.norm().item()
        if size > 0:
            errors.append((found[name] - right).norm().item() / size)
    return max(errors, key=lambda error: float("inf") if error != error else error)


def compute_results(
    subject: Workload, runtime: DeviceRuntime, way: KernelSettings, dtype: ComputeDtype, batch: Any
) -> Computed:
    """Compute a batch in a way, with one unit of each kind."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _computed(subject, runtime, way, dtype, batch)
    finally:
        torch.set_float32_matmul_precision(precision)
        gc.collect()  # a model has reference cycles, and its memory is needed


def _computed(
    subject: Workload, runtime: DeviceRuntime, way: KernelSettings, dtype: ComputeDtype, batch: Any
) -> Computed:
    model = subject.model()
    anatomy = split_into_units(model, subject.units)
    find_unit_conflicts(model).switch_off()
    apply_efficiency(model, way, runtime.torch_device)
    runner = UnitRunner(
        model,
        anatomy,
        device=runtime.torch_device,
        compute_dtype=TORCH_DTYPE[dtype],
        objective=subject.loss or make_objective(model),
        efficiency=way,
    )
    model.eval()  # dropout would draw
    separate_kinds(runner, copy_to_device(runner, batch))
    generator = torch.Generator().manual_seed(0)
    for unit in (runner.root, *runner.of_kind.values()):
        for group in unit.bucket.groups:
            group.fill(lambda values: _fill(values, generator), generator)
    found: Computed = {}
    root_gradients(runner, batch, found)
    seen: dict[str, RecordedOutputs] = {}
    with runner.start(copy_to_device(runner, batch)) as walk:
        walk.go_on()
        while walk.call is not None and len(seen) < len(runner.of_kind):
            kind = runner.kind_of[walk.call.unit]
            if kind not in seen:
                seen[kind] = run_unit(runner, walk.call, kind, found)
            walk.go_on(seen[kind].again(walk.call))
    return found


def root_gradients(runner: UnitRunner, batch: Any, found: Computed) -> None:
    """Add gradients of root parameters used before the first unit, as in patch embeddings, to
    `found`, if the tables fit on the host."""
    bucket = runner.root.bucket
    with runner.start(copy_to_device(runner, batch)) as walk:
        walk.go_on()
        if walk.call is None:
            return
        bucket.begin_gradient()
        walk.root_backward(runner.cut(walk.call).links)
    bucket.end_gradient()
    for group in bucket.trainable:
        for view, part in zip(group.views, group.gradient.split([v.numel() for v in group.views])):
            if view.numel() <= ROOT_ELEMENTS:
                name = f"root, gradient of parameter {len(found)}"
                found[name] = part.float().cpu().clone()


def run_unit(runner: UnitRunner, call: Any, kind: str, found: Computed) -> RecordedOutputs:
    """Run forward and backward of a call, and add the results to `found`."""
    unit, generator = runner.of_kind[kind], torch.Generator().manual_seed(1)
    unit.bucket.begin_gradient()
    cut = runner.cut(call, recompute=False)
    outputs = RecordedOutputs.of(cut)
    tensors = [t for t in tree_leaves(outputs.value) if isinstance(t, torch.Tensor)]
    for number, tensor in enumerate(t for t in tensors if t.is_floating_point()):
        found[f"{kind}, output {number}"] = tensor.detach().float().cpu()
    for leaf in cut.leaves:
        leaf.grad = torch.randn(leaf.shape, generator=generator).to(leaf)
    for number, gradient in enumerate(cut.backward()):
        if gradient is not None:
            found[f"{kind}, gradient of input {number}"] = gradient.float().cpu()
    unit.bucket.end_gradient()
    for number, group in enumerate(unit.bucket.trainable):
        found[f"{kind}, gradient of parameters {number}"] = group.gradient.float().cpu().clone()
    return outputs


def compiled_error(runner: UnitRunner, batch: Any) -> float | None:
    """Return the error of compiled units relative to uncompiled units in their dtype. None with
    dropout: single numbers say nothing, and disabling dropout would compile other code."""
    found: list[Computed] = [{}, {}, {}]
    with runner.start(copy_to_device(runner, batch)) as walk:
        walk.go_on()
        seen: dict[str, RecordedOutputs] = {}
        while walk.call is not None and len(seen) < len(runner.of_kind):
            call, kind = walk.call, runner.kind_of[walk.call.unit]
            if kind not in seen:
                with runner.uncompiled():
                    for plain in found[:2]:
                        seen[kind] = run_unit(runner, call, kind, plain)
                run_unit(runner, call, kind, found[2])
            walk.go_on(seen[kind].again(walk.call))
    if find_largest_error(found[0], found[1]) > RANDOM_ERROR:
        return None
    return find_largest_error(found[2], found[0])


def _fill(values: torch.Tensor, generator: torch.Generator) -> None:
    """Fill values at the scale of trained weights, equal in any dtype."""
    block = torch.randn(min(RANDOM_ELEMENTS, max(1, values.numel())), generator=generator).mul_(
        0.05
    )
    for part in values.split(len(block)) if values.numel() else ():
        part.copy_(block[: len(part)])


def _check_optimizer(
    subject: Workload, runtime: DeviceRuntime, chosen: ChosenSettings
) -> ChosenSettings:
    """Check the fused optimizer update against torch's plain one."""
    if not chosen.efficiency.fused_optimizer:
        return chosen
    start, device = torch.randn(OPTIMIZER_ELEMENTS), runtime.torch_device
    found = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(start.to(device, copy=True))
        optimizer = subject.optimizer_of([parameter])
        if not optimizer.defaults.get("fused"):
            return chosen.with_reason("fused_optimizer", "this optimizer has its own way")
        if not fused:
            for group in optimizer.param_groups:
                group.update(fused=False, foreach=False)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(start.shape, generator=generator).to(device)
            optimizer.step()
        found.append({"update": parameter.detach().cpu() - start})
    error = find_largest_error(*found)
    if not error <= TOLERANCE["fp32"]:
        return chosen.without("fused_optimizer", f"not used: it is {error:.1%} off the plain one")
    return chosen


def _check_loss_kernel(
    subject: Workload, runtime: DeviceRuntime, chosen: ChosenSettings, dtype: torch.dtype
) -> ChosenSettings:
    """Check the fused loss kernel against torch's loss; keep a correct and faster kernel."""
    if chosen.efficiency.loss != "triton":
        return chosen
    model = subject.model()
    layer = find_output_layer(
        model, (unit.module for unit in split_into_units(model, subject.units).units)
    )
    if layer is None:
        return chosen.without("loss", "the model has no linear output layer")
    try:
        error, faster = compare_losses(layer.in_features, layer.out_features, runtime, dtype)
    except Exception as failure:  # any error of the kernel's compiler
        if is_out_of_memory(failure):
            raise
        told = get_first_line(failure)
        return chosen.without("loss", f"not used: {told}")
    tolerance = TOLERANCE[_NAMES[dtype]]
    if not error <= tolerance:
        return chosen.without("loss", f"not used: {error:.1%} off torch's way")
    if faster < WORTHWHILE:
        return chosen.without("loss", f"not used: {faster:.2f} times torch's speed here")
    return chosen.with_reason("loss", f"{faster:.2f} times torch's speed here, {error:.2g} off it")


def compare_losses(
    width: int, classes: int, runtime: DeviceRuntime, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the error and speedup of the fused kernel over torch's loss, for a chunk of a head."""
    generator, device = torch.Generator().manual_seed(0), runtime.torch_device
    on_gpu = is_gpu(runtime.torch_device)
    most = GPU_MAX_CHUNK_ROWS if on_gpu else MIN_CHUNK_ROWS
    rows = compute_chunk_rows(most, vocabulary=classes, width=width, on_gpu=on_gpu)
    problem = LinearCrossEntropy(
        hidden=torch.randn(rows, width, generator=generator).to(device, dtype),
        weight=(torch.randn(classes, width, generator=generator) / width**0.5).to(device, dtype),
        bias=None,
        target=torch.randint(classes, (rows,), generator=generator).to(device),
        operations=(),
        dtype=torch.float32,
        ignore_index=-100,
        label_smoothing=0.0,
        mean=False,
    )
    upstream = torch.ones((), device=device)
    found: list[Computed] = []
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + REPEATS):
        found.clear()
        for number, fused in enumerate((True, False)):
            way, into = replace(problem, fused=fused), Gradients(torch.empty_like(problem.hidden))
            runtime.synchronize()
            begun = time.perf_counter()
            loss = way.run(upstream, into)
            runtime.synchronize()
            seconds[number].append(time.perf_counter() - begun)
            assert into.hidden is not None
            found.append({"loss": loss.cpu(), "gradient": into.hidden.float().cpu()})
    fused_s, plain_s = (median(taken[1:]) for taken in seconds)  # the first run compiles
    return find_largest_error(*found), plain_s / fused_s
