"""Names of torch's own tensor-parallel styles among the styles here."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from gpumix.schema.errors import InputError

# torch's layouts of a module's inputs and outputs, by their last dimension.
_REPLICATED, _SHARDED_LAST_DIM = (Replicate(),), (Shard(-1),)
_SEQUENCE_HINT = "positions are divided with `techniques: {sequence_parallel: true}`"


def translate_style(pattern: str, style: Any) -> str:
    """Return the name of torch's `ColwiseParallel` or `RowwiseParallel`.

    Args:
        pattern: pattern of the modules with the style, for messages.

    Raises:
        InputError: the style is something else, or has an option that is not followed.
    """
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        of_torch = type(style).__module__ == ColwiseParallel.__module__
        raise InputError(
            f"the style of '{pattern}' in the tensor plan is a {type(style).__name__}",
            code="tensor-style-unknown",
            fix=f"leave it out: {_SEQUENCE_HINT}"
            if of_torch
            else "give the name of a style, or torch's ColwiseParallel or RowwiseParallel",
        )
    colwise = type(style) is ColwiseParallel
    followed = {
        "input_layouts": (_REPLICATED,) if colwise else (_SHARDED_LAST_DIM,),
        "output_layouts": (_SHARDED_LAST_DIM, _REPLICATED) if colwise else (_REPLICATED,),
        "use_local_output": (True,),
    }
    for key, values in followed.items():
        if getattr(style, key) not in values:
            raise _make_option_error(pattern, style, key)
    if not colwise:
        return "rowwise"
    return "colwise_gather_output" if style.output_layouts == _REPLICATED else "colwise"


def _make_option_error(pattern: str, style: Any, key: str) -> InputError:
    """Return the error of a torch style with an option that modules here do not follow."""
    value, fix = getattr(style, key), "leave it out"
    if key == "use_local_output":
        fix += ": modules return plain tensors"
    elif value == _REPLICATED:  # as in torch for tables
        fix += ", or of an embedding write 'embedding_rowwise'"
    elif value != _SHARDED_LAST_DIM:
        fix += f": {_SEQUENCE_HINT}"
    (shown,) = value if isinstance(value, tuple) else (value,)
    return InputError(
        f"the {type(style).__name__} of '{pattern}' in the tensor plan has {key}={shown!r}, which "
        "is not followed",
        code="tensor-style-option",
        fix=fix,
    )
