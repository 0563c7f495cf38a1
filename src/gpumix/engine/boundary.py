"""The cut at a unit's boundary: forward without a graph, recompute and backward from saved inputs.

Between units the model's own code stays ordinary autograd. At a unit its outputs become leaves;
gradients cross from leaf to leaf: of the unit's outputs, through its recompute, to its inputs, and
from there through the code between units to the outputs of earlier units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gpumix.engine.buffers import BufferCopies
from gpumix.engine.captured import Captured
from gpumix.engine.coroutine import ModelError, UnitCall
from gpumix.engine.glue import hand
from gpumix.engine.shards import ShardedUnit

Forward = Callable[..., Any]


class Cut:
    """One call of a unit by one micro-batch, from its forward to its backward.

    Args:
        call: what the model asked for.
        unit: the unit; its parameters are gathered whenever a method here runs.
        compute_dtype: floating inputs are cast to it, as FSDP2's mixed precision does.
        seed: seeds the random numbers of this call, the same in the recompute.
        forward: stands in for the unit's own forward; the profiler runs one unit for all its kind.
    """

    def __init__(
        self,
        call: UnitCall,
        unit: ShardedUnit,
        *,
        compute_dtype: torch.dtype,
        seed: Callable[[], None],
        forward: Forward | None = None,
    ) -> None:
        self.unit = unit
        self._forward = forward or unit.forward
        self._state = call.state
        self._captured = Captured(call.context)
        self._dtype = compute_dtype
        self._seed = seed
        self._inputs, self._structure = tree_flatten((call.args, call.kwargs))
        self._versions = [t._version for t in self._inputs if isinstance(t, torch.Tensor)]
        self._refuse_caches()
        self._refuse_hidden(self._inputs, "is given", lambda t: t.requires_grad)
        self._leaves: list[torch.Tensor | None] = []
        self._buffers: BufferCopies | None = None

    def _refuse_caches(self) -> None:
        for value in self._inputs:
            if hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache"):
                raise ModelError(
                    f"unit '{self.unit.name}' is given a {type(value).__name__}",
                    why="a cache remembers the first run of a unit, which is run again in backward",
                    fix="set `use_cache=False` in the model's configuration",
                )

    def _refuse_hidden(
        self, values: list[Any], verb: str, matters: Callable[[torch.Tensor], bool]
    ) -> None:
        """Tensors inside of objects that are no pytree cross the cut unseen, and so would not get
        their gradients."""
        for value in values:
            inside = getattr(value, "__dict__", {}).values()
            if not isinstance(value, torch.Tensor | torch.nn.Module) and any(
                isinstance(t, torch.Tensor) and matters(t) for t in inside
            ):
                kind = type(value).__name__
                raise ModelError(
                    f"unit '{self.unit.name}' {verb} tensors inside of a {kind}",
                    why="gradients cross the boundary in tensors, tuples, lists and dicts only",
                    fix=f"make it one of those, or register it: "
                    f"torch.utils._pytree.register_dataclass({kind})",
                )

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The inputs that want a gradient: outputs of earlier units, or made from them."""
        if not self._state.gradients:
            return []
        return [t for t in self._inputs if isinstance(t, torch.Tensor) and t.requires_grad]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The outputs, after `forward`, that may get a gradient before `backward`."""
        return [leaf for leaf in self._leaves if leaf is not None]

    @property
    def differentiable(self) -> bool:
        return self._state.gradients and (self.unit.trainable or bool(self.inputs))

    def forward(self) -> Any:
        """Run the unit without a graph; its outputs are leaves, handed to the model."""
        if self.differentiable:
            self._buffers = BufferCopies(self.unit.with_buffers)
        self._seed()
        with self._state.applied(), torch.no_grad():
            outputs, structure = self._run(self._detached(False))
        self._refuse_writes(f"unit '{self.unit.name}' writes into its own input")
        if self._buffers is not None:
            self._buffers.keep_changed()
        if self.differentiable:
            self._refuse_hidden(outputs, "returns", torch.Tensor.is_floating_point)
            self._leaves = [_as_leaf(output) for output in outputs]
            outputs = [
                output if leaf is None else hand(leaf)
                for output, leaf in zip(outputs, self._leaves)
            ]
        result, collected = tree_unflatten(outputs, structure)
        self._captured.hand_over(collected)
        return result

    def backward(self) -> list[torch.Tensor | None]:
        """Run the unit again with a graph, and backward; gradients of `inputs`, in their order.

        Parameters' gradients accumulate in the unit's gradient buffer. The cut is empty afterwards.
        """
        gradients = [None if leaf is None else leaf.grad for leaf in self._leaves]
        self._leaves = []
        wanted = self.inputs
        if all(g is None for g in gradients):
            return [None] * len(wanted)
        self._refuse_writes(
            f"an input of unit '{self.unit.name}' was written into after the unit was called"
        )
        inputs = self._detached(True)
        sources = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        assert self._buffers is not None, "forward comes before backward"
        self._seed()
        with self._buffers.in_place(), self._state.applied(), torch.enable_grad():
            outputs, _ = self._run(inputs)
        # A leaf was made of every floating output; the graph now tells which of them depend on
        # anything that is trained.
        pairs = [(o, g) for o, g in zip(outputs, gradients) if g is not None and o.requires_grad]
        self._inputs = []
        del inputs, outputs, gradients
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [source.grad for source in sources]

    def _run(self, inputs: list[Any]) -> tuple[list[Any], TreeSpec]:
        """Run the unit: all that it gives, by its result or otherwise, and its structure."""
        args, kwargs = tree_unflatten(self._cast(inputs), self._structure)
        return tree_flatten(self._captured.run(lambda: self._forward(*args, **kwargs)))

    def _refuse_writes(self, what: str) -> None:
        if self._versions != [t._version for t in self._inputs if isinstance(t, torch.Tensor)]:
            raise ModelError(
                what,
                why="the input is needed unchanged to run the unit again in backward",
                fix="make the operation out of place in the model's code",
            )

    def _detached(self, requires_grad: bool) -> list[Any]:
        """The inputs cut off from the model's graph; those that want a gradient may get one."""
        return [
            t.detach().requires_grad_(requires_grad and t.requires_grad and self._state.gradients)
            if isinstance(t, torch.Tensor)
            else t
            for t in self._inputs
        ]

    def _cast(self, values: list[Any]) -> list[Any]:
        return [
            t.to(self._dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in values
        ]


def _as_leaf(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return None
