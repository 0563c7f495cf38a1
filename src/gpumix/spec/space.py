"""Which techniques a plan may use. The planner searches a space, never more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from gpumix.spec.base import Value
from gpumix.spec.plan import Mode, Plan, Sharding, ZeroStage


class Space(Value):
    """The choices that a plan may make beside samples, micro-batches and shares; all by default."""

    zero_stages: tuple[ZeroStage, ...] = (3, 2, 1, 0)
    shardings: tuple[Sharding, ...] = ("all", "host")
    recompute: tuple[bool, ...] = (True, False)
    boundaries: tuple[Literal["device", "host"], ...] = ("device", "host")
    orders: tuple[Literal["layered", "sequential"], ...] = ("layered", "sequential")
    padded: bool = True

    def modes(self, zero_stage: ZeroStage) -> Iterator[Mode]:
        """What a worker may do at this stage, the plainest first.

        Micro-batches run one after the other only where each rank has the whole gradient, to which
        they add, and all parameters: at stages 0 and 1.
        """
        for order, recompute, boundary in product(self.orders, self.recompute, self.boundaries):
            if order == "sequential" and zero_stage > 1:
                continue
            if boundary == "host" and (not recompute or order == "sequential"):
                continue
            yield Mode(recompute=recompute, boundary=boundary, order=order)

    def missing(self, plan: Plan) -> str:
        """What `plan` uses that is not in this space, in words; empty if nothing."""
        if plan.zero_stage not in self.zero_stages:
            return f"ZeRO stage {plan.zero_stage}"
        if plan.sharding not in self.shardings:
            return "state that each host divides for itself"
        if not self.padded and "padded" in (plan.collectives.gather, plan.collectives.reduce):
            return "padded collectives"
        modes = tuple(self.modes(plan.zero_stage))
        return next((w.mode.describe() for w in plan.workers if w.mode not in modes), "")


EVERYTHING = Space()

ENGINE = Space()
"""What the engine runs."""
