"""Functions that autograd calls in a unit's backward: for each saved tensor, and for each gradient.

Activation checkpointing recomputes tensors saved by a unit's forward. The forward pass leaves the
graph without saved tensors. The first tensor requested by backward runs the unit again, up to the
last saved tensor; the code behind, usually the last linear layer, is not computed twice. The idea
is that of `torch.utils.checkpoint` without reentry, which imports the compiler (a second in every
process), and fails where a backward requests a tensor twice.

A parameter's first gradient in a step is copied to its place in the flat gradient buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gpumix.engine.comm import collective_progress
from gpumix.engine.model.forward_coroutine import ModelError

T = TypeVar("T")
SAMPLES_PER_DIM = 4  # values compared along each dimension
RELATIVE_TOLERANCE = 2e-2  # relative: more is no rounding of the same computation, not even in bf16


def run_backward(
    edges: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    *,
    retain_graph: bool = False,
) -> None:
    """Run backward from edges of a graph like `torch.autograd.backward`, without its checks:
    gradients made by autograd have the right shape and dtype."""
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        retain_graph,
        False,  # no graph of this backward
        (),  # for all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


class RerunComparison:
    """Comparison of the outputs of units with the outputs of reruns. Saved tensors would not do:
    kernels leave parts of their workspaces unwritten."""

    def __init__(self) -> None:
        self._unlike: list[tuple[str, torch.Tensor]] = []

    def compare(
        self, label: str, first: Sequence[torch.Tensor], again: Sequence[torch.Tensor]
    ) -> None:
        """Compare samples of a unit's outputs, without waiting for devices.

        Args:
            label: name of the unit.
            first, again: results of `sample_outputs` for the first run and the rerun.
        """
        if [one.shape for one in first] != [one.shape for one in again]:
            self._unlike.append((label, torch.tensor(True)))
            return
        with torch.no_grad():
            for one, other in zip(first, again):
                far = (one - other).abs() > RELATIVE_TOLERANCE * one.abs().amax()
                self._unlike.append((label, far.any()))

    def error(self) -> ModelError | None:
        """Return the error of the first unit that differs; the host waits once per device."""
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for label, unlike in self._unlike:
            by_device.setdefault(unlike.device, []).append((label, unlike))
        found = [
            label
            for every in by_device.values()
            for (label, _), unlike in zip(every, torch.stack([one for _, one in every]).tolist())
            if unlike
        ]
        why = "what it returns has other values then"
        return _make_rerun_error(found[0], why) if found else None


_active_comparison: RerunComparison | None = None  # of the current step, in all threads


@contextmanager
def compare_reruns() -> Iterator[RerunComparison]:
    """Compare recomputed outputs with the original outputs inside."""
    global _active_comparison
    _active_comparison = made = RerunComparison()
    try:
        yield made
    finally:
        _active_comparison = None


def sample_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few of a tensor's values, float64, spread over all dimensions."""
    with torch.no_grad():
        steps = tuple(slice(None, None, -(-size // SAMPLES_PER_DIM)) for size in tensor.shape)
        few = tensor.detach()[steps]
        few = torch.view_as_real(few) if few.is_complex() else few
        return torch.nan_to_num(few.double())


def sample_outputs(returned: object) -> list[torch.Tensor]:
    """Return samples of all tensors that a unit returns."""
    tensors = (one for one in tree_leaves(returned) if isinstance(one, torch.Tensor))
    return [sample_values(one) for one in tensors if one.layout is torch.strided and one.numel()]


class _Phase(Enum):
    FORWARD = auto()  # all saved tensors are present, for a unit that differentiates by itself
    BETWEEN = auto()  # no saved tensor is present
    BACKWARD = auto()  # saved tensors are recomputed on request


@dataclass
class CheckpointedRun(Generic[T]):
    """Run of a unit whose saved tensors are dropped, and recomputed in backward.

    Attributes:
        label: the unit's name, for messages.
        again: runs the unit again, any number of times, with the same result and no side effects.
    """

    label: str
    again: Callable[[], T]
    _phase: _Phase = field(default=_Phase.FORWARD, init=False)
    _saved: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list, init=False)
    # Saved tensors, each with its version when saved.
    _found: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict, init=False)
    _comparison: RerunComparison | None = field(default=None, init=False)
    _samples: Sequence[torch.Tensor] = field(default=(), init=False)  # of outputs, to compare
    _reruns: int = field(default=0, init=False)
    # A backward over CPU and GPU runs in two threads.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def forward(self, run: Callable[[], T]) -> T:
        """Run the unit by `run`, with gradients, and keep only the graph. `run` holds the unit's
        inputs, so it is not kept either."""
        self._comparison = _active_comparison
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._save, self._give):
                returned = run()
            if self._comparison is not None:
                self._samples = sample_outputs(returned)
            return returned
        finally:
            self._phase = _Phase.BETWEEN
            self._found.clear()

    def expect_backward(self) -> None:
        """Make saved tensors available to backward from here on."""
        self._phase = _Phase.BACKWARD

    def backward(
        self, edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Run backward from edges of the unit's graph, with saved tensors available."""
        self._phase = _Phase.BACKWARD
        try:
            run_backward(edges, gradients)
        finally:
            self._phase = _Phase.BETWEEN
            self._found.clear()

    def _save(self, tensor: torch.Tensor) -> int:
        number = len(self._saved)
        self._saved.append((tensor.shape, tensor.dtype))
        self._found[number] = (tensor, tensor._version)  # until the end of `forward`
        return number

    def _give(self, number: int) -> torch.Tensor:
        if self._phase is _Phase.BETWEEN:
            raise ModelError(
                f"a tensor that unit '{self.label}' made is used outside of it, but not returned",
                code="unit-tensor-leaked",
                why="gradients cross a unit's boundary through its arguments and its result only",
                fix="return it from the unit, or `.detach()` it",
            )
        with self._lock:
            if number not in self._found:
                self._rerun()
            tensor, version = self._found[number]
            # Free memory while backward proceeds, unless tensors are requested twice.
            if self._phase is _Phase.BACKWARD and self._reruns == 1:
                del self._found[number]
        if tensor._version != version:
            raise ModelError(
                f"unit '{self.label}' writes into a tensor that its backward needs",
                code="unit-tensor-overwritten",
                fix="make the operation out of place in the model's code",
            )
        return tensor

    def _rerun(self) -> None:
        if self._phase is _Phase.BACKWARD:
            collective_progress.compute_phase = "backward", self.label
        self._reruns += 1
        count, saved, found = 0, self._saved, self._found
        total, stops = len(saved), self._comparison is None

        def keep(tensor: torch.Tensor) -> int:
            nonlocal count
            if count < total:
                if saved[count] != (tensor.shape, tensor.dtype):
                    raise self._make_mismatch_error(count, tensor)
                # Detached: a graph holding its own output would never be freed.
                found[count] = (tensor.detach(), tensor._version)
                count += 1
            if count == total and stops:
                raise _StopRecomputation
            return count - 1

        try:
            with (
                torch.enable_grad(),
                saved_tensors_hooks(keep, lambda number: self._found[number][0]),
            ):
                returned = self.again()
        except _StopRecomputation:
            return
        except Exception:
            if count < len(self._saved):
                raise
            return  # TorchScript replaces exceptions passing through it by its own
        if self._comparison is not None:
            self._comparison.compare(self.label, self._samples, sample_outputs(returned))
        if count < len(self._saved):
            raise self._make_mismatch_error(count, None)

    def _make_mismatch_error(self, number: int, tensor: torch.Tensor | None) -> ModelError:
        shape, dtype = self._saved[number]
        now = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        return _make_rerun_error(
            self.label, f"it saved {list(shape)} of {dtype} for its backward, and then {now}"
        )


def _make_rerun_error(label: str, why: str) -> ModelError:
    return ModelError(
        f"unit '{label}' computes something else when it is run again in backward",
        code="recompute-differs",
        why=why,
        fix="it must do the same whenever it gets the same inputs: no counters, caches or random "
        "generators of its own",
    )


class KeptRun(Generic[T]):
    """Run of a unit whose graph is kept, with all saved tensors."""

    def forward(self, run: Callable[[], T]) -> T:
        """Run the unit by `run`, with gradients."""
        if torch.is_grad_enabled():
            return run()
        with torch.enable_grad():
            return run()

    def backward(
        self, edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Run backward from edges of the unit's graph."""
        run_backward(edges, gradients)


class _StopRecomputation(BaseException):
    """All saved tensors are recomputed. Not an `Exception`: model code may catch those."""


@dataclass
class GradientAccumulation:
    """Flag for gradients of a group's parameters being summed: from the begin of the group's
    backward to the begin of its reduction. Gradients at another time come from another part of the
    model, and would be lost."""

    label: str
    now: bool = False

    def check_active(self) -> None:
        """Refuse a gradient while gradients are not summed.

        Raises:
            ModelError: gradients are not summed now.
        """
        if not self.now:
            raise ModelError(
                f"a parameter of unit '{self.label}' gets a gradient from outside of the unit",
                code="unit-gradient-from-outside",
                why="another part of the model, or a term of the loss, uses it too, when the "
                "unit's gradient is not summed",
                fix="use it inside of the unit alone, or move it out of the blocks; for decay use "
                "weight_decay of the optimizer",
            )


@dataclass
class ParameterGradient:
    """Place where a parameter's gradient is summed, and the hook copying the first gradient there.

    Until the first gradient, the parameter's `grad` is None, and the content of `place` is
    meaningless.
    """

    name: str
    view: nn.Parameter
    place: torch.Tensor
    put: RemovableHandle

    @property
    def has_other_hooks(self) -> bool:
        """True if another hook observes the accumulation of the gradient."""
        hooks = self.view._post_accumulate_grad_hooks or ()
        return any(number != self.put.id for number in hooks)


def copy_first_gradient(
    place: torch.Tensor, receiving: GradientAccumulation, view: torch.Tensor
) -> None:
    """Copy the first gradient of `view` to the place where later gradients are added."""
    if not receiving.now:
        receiving.check_active()
    gradient = view.grad
    if gradient is not place:
        assert gradient is not None, "it has just been accumulated"
        place.copy_(gradient)
        view.grad = place
