"""Which parameters of the root unit are used at one end of the model only.

The model is run once, and every function that is given such a parameter is noted. What the code
before the first unit looks up is needed nowhere else, not in backward either: the gradient of a
lookup takes indices alone. What head and loss use need not be here before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpumix.engine.away import HARMLESS
from gpumix.engine.units import Slot, frozen_bytes
from gpumix.profiler.specimen import Outputs, Specimens
from gpumix.spec.profile import End

LOOKUPS = (nn.functional.embedding, torch.embedding)
INSIDE = -1  # of a unit


class _Uses(TorchFunctionMode):
    """Notes where and by what parameters are used: the number of unit calls before, and whether
    they are looked up."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.found: dict[str, set[tuple[int, bool]]] = defaultdict(set)
        self.place = 0
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in HARMLESS:
            for value in tree_leaves((args, kwargs)):
                if id(value) in self._names:
                    self.found[self._names[id(value)]].add((self.place, func in LOOKUPS))
        return func(*args, **(kwargs or {}))


def find_ends(specimens: Specimens, batch: Any, *, in_chunks: bool) -> tuple[End, End]:
    """What is looked up before the first unit only, and what is used after the last one only, when
    the model runs on `batch`; `in_chunks` is without whole logits."""
    groups = specimens.root.bucket.groups
    names = {id(held): name for group in groups for held, name in group.names_by_parameter()}
    uses, outputs = _Uses(names), {}
    chunks = specimens.head_in_chunks() if in_chunks else nullcontext()
    with specimens.start(batch) as walk, chunks, uses:
        walk.go_on()
        while walk.call is not None:
            kind = specimens.kind_of[walk.call.unit]
            uses.place = INSIDE
            if kind not in outputs:
                outputs[kind] = Outputs(specimens.cut(walk.call, plain=True).forward())
            uses.place = len(walk.calls)
            walk.go_on(outputs[kind].again())
        last = len(walk.calls)
    before = [name for name, places in uses.found.items() if places == {(0, True)}]
    after = [name for name, places in uses.found.items() if {p for p, _ in places} == {last}]
    slots = specimens.root_slots
    return _end(slots, before, specimens.compute_dtype), _end(slots, after, specimens.compute_dtype)


def _end(slots: Sequence[Slot], names: list[str], compute_dtype: torch.dtype) -> End:
    chosen = [slot for slot in slots if slot.name in names]
    trained = [s.parameter.numel() for s in chosen if s.parameter.requires_grad]
    return End(
        names=tuple(slot.name for slot in chosen),
        trainable=sum(trained),
        frozen_bytes=frozen_bytes(chosen, compute_dtype),
    )
