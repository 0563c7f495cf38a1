"""Optimizers of a function, by the line making each. An optimizer made anew in each step is gone
after it, so all optimizers of one line are added up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gpumix.doctor.function.observations import OptimizerObservation
from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_user_line

FUSIBLE = (Adam, AdamW, SGD, Adagrad)
UNFUSIBLE = ("differentiable", "capturable", "foreach")  # options incompatible with `fused`
_PLACE = "_gpumix_place"  # attribute of optimizers; not part of their state or pickles


class ParameterReferences:
    """Weak references to an optimizer's parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._kept = [ref(one) for one in list_parameters(optimizer.param_groups)]

    @property
    def alive(self) -> bool:
        return any(one() is not None for one in self._kept)

    def match(self, parameters: list[Tensor]) -> bool:
        """Return whether `parameters` are the same tensors, in the same order."""
        same = len(parameters) == len(self._kept)
        return same and all(one() is other for one, other in zip(self._kept, parameters))


def list_parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of an optimizer's groups, in order."""
    return [one for group in groups for one in group["params"]]


@dataclass
class _OptimizerRecord:
    """All optimizers made by one line, with the settings of the last."""

    place: str
    name: str = ""
    fused: bool = False
    fusible: bool = False
    seconds: float = 0.0
    steps: int = 0
    remade: int = 0
    known: list[ParameterReferences] = field(default_factory=list)

    def forget(self) -> None:
        self.seconds, self.steps, self.remade = 0.0, 0, 0

    def update(self, one: Optimizer) -> None:
        """Update the settings, which are complete once an optimizer steps."""
        settings = one.defaults
        other = any(settings.get(key) for key in UNFUSIBLE)
        self.name, self.fused = type(one).__name__, bool(settings.get("fused"))
        self.fusible = isinstance(one, FUSIBLE) and not other

    def made(self, one: Optimizer) -> None:
        """Record the making of an optimizer."""
        parameters = list_parameters(one.param_groups)
        if any(known.match(parameters) for known in self.known):
            self.remade += 1
        else:
            self.known = [known for known in self.known if known.alive]
            self.known.append(ParameterReferences(one))

    def seen(self) -> OptimizerObservation:
        return OptimizerObservation(
            place=self.place,
            name=self.name,
            fused=self.fused,
            fusible=self.fusible,
            seconds=self.seconds,
            remade=self.remade,
        )


class OptimizerWatch:
    """The host time of optimizers, including the time to make them."""

    def __init__(self) -> None:
        self._records: dict[str, _OptimizerRecord] = {}
        self.making_s = 0.0
        """Seconds of making optimizers so far."""

    def install(self, patches: Patches) -> None:
        patches.replace(Optimizer, "__init__", self._making)

    def begin(self) -> None:
        """Restart counting."""
        for record in self._records.values():
            record.forget()

    def stepping(self, optimizer: Any) -> None:
        """Record the start of an optimizer's step."""
        self._record(optimizer).seconds -= time.perf_counter()

    def stepped(self, optimizer: Any) -> None:
        """Record the end of an optimizer's step."""
        record = self._record(optimizer)
        record.seconds += time.perf_counter()
        record.steps += 1
        record.update(optimizer)

    def seen(self) -> tuple[OptimizerObservation, ...]:
        return tuple(one.seen() for one in self._records.values() if one.steps)

    def _record(self, optimizer: Any) -> _OptimizerRecord:
        place = vars(optimizer).get(_PLACE, LIBRARY_LINE)
        return self._records.setdefault(place, _OptimizerRecord(place))

    def _making(self, before: Any) -> Any:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            begun_s = time.perf_counter()
            before(optimizer, *args, **kwargs)
            vars(optimizer)[_PLACE] = find_user_line()
            record = self._record(optimizer)
            record.made(optimizer)
            passed_s = time.perf_counter() - begun_s
            record.seconds += passed_s
            self.making_s += passed_s

        return made
