"""Call of a model with a batch, derived before the loop makes the call."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

from gpumix.schema.errors import InputError

ARGS, KWARGS = "args", "kwargs"
FIX_NAME_PARTS = (
    "let the loader name the parts of a batch as forward's arguments, or give a plan: "
    "Accelerator(plan=...)"
)

_POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def bind_batch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the arguments of `model`'s forward found in a batch.

    Parts of the batch named like arguments are these arguments. Required arguments left over take
    the other parts in order; if no name is known, the first part is the argument.

    Returns:
        A tuple by `ARGS`, a dictionary by `KWARGS`.

    Raises:
        InputError: forward requires more arguments than the batch has parts.
    """
    known = signature(_unwrap_peft(model).forward).parameters
    wanted = [one.name for one in known.values() if one.kind in _POSITIONAL_KINDS]
    needed = [name for name in wanted if known[name].default is Parameter.empty]
    if isinstance(batch, Mapping):
        takes_all = not wanted and any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
        named = {key: part for key, part in batch.items() if takes_all or key in known}
        others = [part for key, part in batch.items() if key not in named]
    else:
        named = {}
        others = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    missing = [name for name in needed if name not in named]
    if not named and not missing:
        return {ARGS: tuple(others[:1]), KWARGS: {}}
    if len(missing) > len(others):
        raise InputError(
            f"the model cannot be measured: its forward takes {', '.join(needed)}, and a batch of "
            f"the loader has {_describe_parts(batch)}",
            code="model-inputs-unknown",
            fix=FIX_NAME_PARTS,
        )
    return {ARGS: (), KWARGS: named | dict(zip(missing, others))}


def _unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, for the names of forward's arguments."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _describe_parts(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(map(str, batch))
    return f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else "one part"
