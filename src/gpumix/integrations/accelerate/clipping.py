"""Parameters named in a loop's call that clips gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gpumix.engine.engine import Engine
from gpumix.schema.errors import InputError


def select_clipped_pieces(
    parameters: Any, model: nn.Module, engine: Engine, names: Mapping[int, str]
) -> list[nn.Parameter] | None:
    """Return this rank's pieces of the parameters to be clipped; None for all that are trained.

    Args:
        parameters: the loop's own: of the model, or of groups of an optimizer.
        model: the sharded model.
        names: of the model's parameters before it was sharded, by id.

    Raises:
        InputError: none of them is a trained parameter of the model.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    full, pieces = list(model.named_parameters()), list(engine.named_parameters())
    known = dict(names) | {id(one): name for name, one in (*full, *pieces)}
    asked = {known[id(one)] for one in given if id(one) in known}
    trained = {name for name, one in full if one.requires_grad}
    if asked >= trained:
        return None
    if not asked & trained:
        raise InputError(
            "gradients are to be clipped, and no trained parameter of the model is given",
            code="clip-without-parameters",
            where="Accelerator.clip_grad_norm_ or clip_grad_value_",
            fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        )
    return [piece for name, piece in pieces if name in asked]
