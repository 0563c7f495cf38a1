"""Tensor-parallel styles: a rank's part of a module, and the computation with the part.
`engine.tensor_parallel.parallelize` chooses the modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.sequence_parallel.collective_regions import (
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from gpumix.engine.sequence_parallel.module_inputs import RegionBoundary
from gpumix.engine.sharding.parameter_slice import ParameterSlice

Forward = Callable[..., Any]


class PartIndex(NamedTuple):
    """Index of a part, and the number of equal parts into which modules are divided."""

    part: int
    parts: int


class Style:
    """Division of a module.

    Attributes:
        begins: True if a region begins with the module.
    """

    begins: ClassVar[bool] = False

    def windows(self, module: nn.Module, seat: PartIndex) -> dict[str, ParameterSlice]:
        """Return the windows of the divided parameters, for one seat.

        Raises:
            ValueError: the parameters cannot be divided this way.
        """
        return {}

    def forward(
        self, module: nn.Module, entrances: RegionBoundary, tp_group: Communicator
    ) -> Forward:
        """Return the forward of the divided module, without a reference to the module."""
        return get_unbound_forward(module)

    def attributes(self, module: nn.Module, tp_group: Communicator) -> dict[str, Any]:
        """Return further attributes of the module, changed for this rank's part."""
        return {}

    def summed(self, module: nn.Module) -> tuple[str, ...]:
        """Return the undivided parameters with a partial gradient on each rank."""
        return ()


@dataclass(frozen=True)
class Colwise(Style):
    """Linear layer divided by outputs.

    Args:
        gathers: True if the ranks' outputs are concatenated.
        packed: number of tensors packed in the outputs.
    """

    gathers_output: bool = False
    packed: int = 1
    begins: ClassVar[bool] = True

    def windows(self, module: nn.Module, seat: PartIndex) -> dict[str, ParameterSlice]:
        found = {"weight": _window(module, "weight", _get_output_dim(module), seat, self.packed)}
        if module._parameters.get("bias") is not None:
            found["bias"] = _window(module, "bias", 0, seat, self.packed)
        return found

    def forward(
        self, module: nn.Module, entrances: RegionBoundary, tp_group: Communicator
    ) -> Forward:
        parameters, transposed = module._parameters, _transposed(module)

        def forward(value: torch.Tensor) -> torch.Tensor:
            bias = parameters.get("bias")
            found = _product(entrances.enter(value), parameters["weight"], bias, transposed)
            return gather_from_region(found, -1, tp_group) if self.gathers_output else found

        return forward


class Rowwise(Style):
    """Linear layer divided by inputs; each rank has a part of the inputs."""

    def windows(self, module: nn.Module, seat: PartIndex) -> dict[str, ParameterSlice]:
        return {"weight": _window(module, "weight", 1 - _get_output_dim(module), seat)}

    def forward(
        self, module: nn.Module, entrances: RegionBoundary, tp_group: Communicator
    ) -> Forward:
        parameters, transposed = module._parameters, _transposed(module)

        def forward(value: torch.Tensor) -> torch.Tensor:
            found = entrances.leave(_product(value, parameters["weight"], None, transposed))
            bias = parameters.get("bias")
            return found if bias is None else found + bias

        return forward


class EmbeddingRowwise(Style):
    """Embedding table divided by rows: each rank looks up its own rows. Each rank applies further
    code of the module's class (Gemma scales the result) to its own result."""

    def windows(self, module: nn.Module, seat: PartIndex) -> dict[str, ParameterSlice]:
        _require(module, nn.Embedding)
        if module.max_norm is not None:
            raise ValueError("a table with `max_norm` is changed by looking things up")
        return {"weight": _window(module, "weight", 0, seat)}

    def attributes(self, module: nn.Module, tp_group: Communicator) -> dict[str, Any]:
        padding = getattr(module, "padding_idx", None)
        first, rows = _get_local_rows(module, tp_group)
        own = padding is not None and first <= padding < first + rows
        return {} if padding is None else {"padding_idx": padding - first if own else None}

    def forward(
        self, module: nn.Module, entrances: RegionBoundary, tp_group: Communicator
    ) -> Forward:
        inner, (first, rows) = get_unbound_forward(module), _get_local_rows(module, tp_group)

        def forward(numbers: torch.Tensor) -> torch.Tensor:
            there = (numbers >= first) & (numbers < first + rows)
            found = inner(torch.where(there, numbers - first, 0))
            return reduce_from_region(found.masked_fill(~there.unsqueeze(-1), 0.0), tp_group)

        return forward


class EmbeddingColwise(Style):
    """Embedding table divided by columns, inside of a region."""

    def windows(self, module: nn.Module, seat: PartIndex) -> dict[str, ParameterSlice]:
        _require(module, nn.Embedding)
        return {"weight": _window(module, "weight", 1, seat)}


class ReplicatedInRegion(Style):
    """Undivided module inside of a region: each rank's computation is a part of the whole."""

    def summed(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, p in module._parameters.items() if p is not None)


class PositionBias(Style):
    """Attention of T5, taking and returning a bias of all heads, [1, heads, queries, keys]."""

    def forward(
        self, module: nn.Module, entrances: RegionBoundary, tp_group: Communicator
    ) -> Forward:
        inner = get_unbound_forward(module)

        def forward(*args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
            if position_bias is not None:
                own = scatter_to_region(position_bias, 1, tp_group)
                output, _, *rest = inner(*args, position_bias=own, **kwargs)
                return output, position_bias, *rest
            output, own, *rest = inner(*args, **kwargs)
            return output, gather_from_region(own, 1, tp_group), *rest

        return forward


STYLES: dict[str, Style | None] = {
    "colwise": Colwise(),
    "colwise_rep": Colwise(gathers_output=True),
    "colwise_gather_output": Colwise(gathers_output=True),
    "packed_colwise_2": Colwise(packed=2),
    "packed_colwise_3": Colwise(packed=3),
    "rowwise": Rowwise(),
    "embedding_rowwise": EmbeddingRowwise(),
    "embedding_colwise": EmbeddingColwise(),
    "replicated_with_grad_allreduce": ReplicatedInRegion(),
    "position_bias": PositionBias(),
    "replicate": None,
}
"""Styles by the names in `transformers`, and some more. `divided` is for numbers in attributes of a
module, such as the number of heads."""


def get_unbound_forward(module: nn.Module) -> Forward:
    """Return the current forward of a module, as a function without a reference to the module."""
    replaced: Forward | None = vars(module).get("forward")
    if replaced is not None:
        return replaced
    there, forward = weakref.ref(module), type(module).forward
    return lambda *args, **kwargs: forward(there(), *args, **kwargs)


def _require(module: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(module, kind):
        raise ValueError(f"it is a {type(module).__name__}, not a {kind.__name__}")


def _require_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """Require a class with an unmodified forward, because a style replaces the forward."""
    _require(module, kind)
    if type(module).forward is not kind.forward:
        raise ValueError(f"a {type(module).__name__} does more than a {kind.__name__}")


def _transposed(module: nn.Module) -> bool:
    """Return True if the weight is [inputs, outputs], as in GPT-2's layers."""
    return type(module).__name__ == "Conv1D"


def _get_output_dim(module: nn.Module) -> int:
    """Return the dimension of the weight for the layer's outputs."""
    if not _transposed(module):
        _require_plain(module, nn.Linear)
    return 1 if _transposed(module) else 0


def _product(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    assert weight is not None, "a linear layer has one"
    return functional.linear(value, weight.T if transposed else weight, bias)


def _get_local_rows(table: nn.Module, tp_group: Communicator) -> tuple[int, int]:
    """Return the first row and the number of rows of a table on this rank."""
    assert isinstance(table, nn.Embedding)
    count = table.num_embeddings // tp_group.world
    return tp_group.rank * count, count


def _window(
    module: nn.Module, name: str, dim: int, seat: PartIndex, packed: int = 1
) -> ParameterSlice:
    whole = module._parameters[name]
    assert whole is not None
    return ParameterSlice(whole.shape, dim, seat.parts, seat.part, packed)
