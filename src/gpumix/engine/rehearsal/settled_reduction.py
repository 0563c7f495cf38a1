"""Result of a rehearsal, kept for a run that starts again by the same plan after a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpumix.engine.loss.reduction import ReductionRule


@dataclass(frozen=True)
class SettledReduction:
    """Reduction of losses: how those of a model's micro-batches add up.

    Attributes:
        rule: the denominator.
        trims: whether padding columns are cut off.
        kinds: kinds of losses known to add up (`loss_graph.kind_of`).
        training_alone: whether losses of evaluation mode are yet to be rehearsed.
        told: description of the rule for records.
    """

    rule: ReductionRule
    trims: bool
    kinds: Sequence[int]
    training_alone: bool
    told: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kinds": list(self.kinds)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SettledReduction:
        """Rebuild from `to_json`.

        Raises:
            KeyError, TypeError: the values are not of `to_json`.
        """
        return cls(**{**values, "rule": ReductionRule(**values["rule"])})
