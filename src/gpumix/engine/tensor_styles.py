"""How the modules of a model are divided over the ranks of a team: what each rank has of one, and
what it does with that. `engine.tensor` says of which modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gpumix.engine.comm import Communicator
from gpumix.engine.entrances import Entrances
from gpumix.engine.regions import leave, part_of, side_by_side
from gpumix.engine.window import Window

Forward = Callable[..., Any]


class Seat(NamedTuple):
    """One of so many equal parts that modules are divided into."""

    part: int
    parts: int


class Style:
    """How a module is divided.

    Attributes:
        begins: whether a region begins with it.
    """

    begins: ClassVar[bool] = False

    def windows(self, module: nn.Module, seat: Seat) -> dict[str, Window]:
        """The part of a seat, of those of its parameters that are divided.

        Raises:
            ValueError: they cannot be divided so.
        """
        return {}

    def forward(self, module: nn.Module, entrances: Entrances, team: Communicator) -> Forward:
        """What the module does, with what it has. It must not hold the module, which holds it."""
        return plain_forward(module)

    def attributes(self, module: nn.Module, team: Communicator) -> dict[str, Any]:
        """What else is other with the part of this rank."""
        return {}

    def summed(self, module: nn.Module) -> tuple[str, ...]:
        """Parameters that are not divided, of whose gradient each rank has a part."""
        return ()


@dataclass(frozen=True)
class Colwise(Style):
    """A linear layer by its outputs.

    Args:
        gathers: whether they leave side by side.
        packed: how many tensors in a row they are.
    """

    gathers: bool = False
    packed: int = 1
    begins: ClassVar[bool] = True

    def windows(self, module: nn.Module, seat: Seat) -> dict[str, Window]:
        found = {"weight": _window(module, "weight", _outputs(module), seat, self.packed)}
        if module._parameters.get("bias") is not None:
            found["bias"] = _window(module, "bias", 0, seat, self.packed)
        return found

    def forward(self, module: nn.Module, entrances: Entrances, team: Communicator) -> Forward:
        parameters, transposed = module._parameters, _transposed(module)

        def forward(value: torch.Tensor) -> torch.Tensor:
            bias = parameters.get("bias")
            found = _product(entrances.enter(value), parameters["weight"], bias, transposed)
            return side_by_side(found, -1, team) if self.gathers else found

        return forward


class Rowwise(Style):
    """A linear layer by its inputs, of which each rank has its part."""

    def windows(self, module: nn.Module, seat: Seat) -> dict[str, Window]:
        return {"weight": _window(module, "weight", 1 - _outputs(module), seat)}

    def forward(self, module: nn.Module, entrances: Entrances, team: Communicator) -> Forward:
        parameters, transposed = module._parameters, _transposed(module)

        def forward(value: torch.Tensor) -> torch.Tensor:
            found = entrances.leave(_product(value, parameters["weight"], None, transposed))
            bias = parameters.get("bias")
            return found if bias is None else found + bias

        return forward


class EmbeddingRowwise(Style):
    """A table by its rows: each rank looks up what it has. What the module's class does with that
    (Gemma's scales it) each does with its own."""

    def windows(self, module: nn.Module, seat: Seat) -> dict[str, Window]:
        _require(module, nn.Embedding)
        if module.max_norm is not None:
            raise ValueError("a table with `max_norm` is changed by looking things up")
        return {"weight": _window(module, "weight", 0, seat)}

    def attributes(self, module: nn.Module, team: Communicator) -> dict[str, Any]:
        padding = getattr(module, "padding_idx", None)
        first, rows = _rows(module, team)
        own = padding is not None and first <= padding < first + rows
        return {} if padding is None else {"padding_idx": padding - first if own else None}

    def forward(self, module: nn.Module, entrances: Entrances, team: Communicator) -> Forward:
        inner, (first, rows) = plain_forward(module), _rows(module, team)

        def forward(numbers: torch.Tensor) -> torch.Tensor:
            there = (numbers >= first) & (numbers < first + rows)
            found = inner(torch.where(there, numbers - first, 0))
            return leave(found.masked_fill(~there.unsqueeze(-1), 0.0), team)

        return forward


class EmbeddingColwise(Style):
    """A table by its columns, inside of a region."""

    def windows(self, module: nn.Module, seat: Seat) -> dict[str, Window]:
        _require(module, nn.Embedding)
        return {"weight": _window(module, "weight", 1, seat)}


class Repeated(Style):
    """Inside of a region: what it does on each rank is a part of the whole."""

    def summed(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, p in module._parameters.items() if p is not None)


class PositionBias(Style):
    """T5's attention: takes and returns a bias of all heads, [1, heads, queries, keys]."""

    def forward(self, module: nn.Module, entrances: Entrances, team: Communicator) -> Forward:
        inner = plain_forward(module)

        def forward(*args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
            if position_bias is not None:
                own = part_of(position_bias, 1, team)
                output, _, *rest = inner(*args, position_bias=own, **kwargs)
                return output, position_bias, *rest
            output, own, *rest = inner(*args, **kwargs)
            return output, side_by_side(own, 1, team), *rest

        return forward


STYLES: dict[str, Style | None] = {
    "colwise": Colwise(),
    "colwise_rep": Colwise(gathers=True),
    "colwise_gather_output": Colwise(gathers=True),
    "packed_colwise_2": Colwise(packed=2),
    "packed_colwise_3": Colwise(packed=3),
    "rowwise": Rowwise(),
    "embedding_rowwise": EmbeddingRowwise(),
    "embedding_colwise": EmbeddingColwise(),
    "replicated_with_grad_allreduce": Repeated(),
    "position_bias": PositionBias(),
    "replicate": None,
}
"""By the names that `transformers` gives them, and some more. `divided` is for numbers that a
module has as an attribute: how many heads there are, say."""


def plain_forward(module: nn.Module) -> Forward:
    """The forward that a module has now, as a function that does not hold it."""
    replaced: Forward | None = vars(module).get("forward")
    if replaced is not None:
        return replaced
    there, forward = weakref.ref(module), type(module).forward
    return lambda *args, **kwargs: forward(there(), *args, **kwargs)


def _require(module: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(module, kind):
        raise ValueError(f"it is a {type(module).__name__}, not a {kind.__name__}")


def _require_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """One whose forward is replaced must do nothing else there."""
    _require(module, kind)
    if type(module).forward is not kind.forward:
        raise ValueError(f"a {type(module).__name__} does more than a {kind.__name__}")


def _transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs]: GPT-2's layers."""
    return type(module).__name__ == "Conv1D"


def _outputs(module: nn.Module) -> int:
    """The dimension of the weight that is the layer's outputs."""
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


def _rows(table: nn.Module, team: Communicator) -> tuple[int, int]:
    """The first row that this rank has of a table, and how many."""
    assert isinstance(table, nn.Embedding)
    count = table.num_embeddings // team.world
    return team.rank * count, count


def _window(module: nn.Module, name: str, dim: int, seat: Seat, packed: int = 1) -> Window:
    whole = module._parameters[name]
    assert whole is not None
    return Window(whole.shape, dim, seat.parts, seat.part, packed)
