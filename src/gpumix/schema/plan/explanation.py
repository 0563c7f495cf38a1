"""Reasons for a plan: alternatives considered, bottlenecks, and the worth of each class."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gpumix.schema.value import Value

SINGLE_CLASS_PREFIX = "only "  # before the class name: strategy of an alternative on one class
EVEN_WITHOUT_PREFIX = "even without "  # before the class names: an even split of the others


class RejectedPlan(Value):
    """A rejected plan, with the reason."""

    strategy: str
    step_s: float | None = Field(default=None, description="None: it is not possible")
    why: str


class MixingComparison(Value):
    """Comparison of the plan with the best plan for a single class."""

    pays: bool
    best_class: str | None = Field(
        default=None, description="None: no class could train this alone"
    )
    speedup: float | None = Field(default=None, description="against the best single class")
    left_out: tuple[str, ...] = Field(
        default=(), description="classes that would cost the others more than they give"
    )

    @model_validator(mode="after")
    def _says_against_what(self) -> Self:
        if (self.best_class is None) != (self.speedup is None):
            raise ValueError("best_class and speedup are there together, or neither is")
        if not self.pays and self.speedup is None:
            raise ValueError("mixing that does not pay has a best_class, and a speedup against it")
        return self


class Bottlenecks(Value):
    """Bottlenecks of the step."""

    compute: tuple[str, ...] = Field(description="classes that compute all the time that any does")
    memory: tuple[str, ...] = Field(default=(), description="classes whose memory is full")
    link: str = Field(default="", description="where the waiting for the network comes from")
    waiting: float = Field(default=0.0, description="part of the step that waits for the network")


class ClassWorth(Value):
    """Worth of a class: relative gain of the best plan in tokens per second; 0.1 is 10 % more."""

    device_class: str
    whole: float | None = Field(
        default=None, description="all its devices, against none; None: nothing fits without them"
    )
    one_more: float = Field(description="one more device of the class")


class DtypeReason(Value):
    """Compute dtype of a class, with the reason."""

    device_class: str
    compute_dtype: str
    why: str


class Reasons(Value):
    """All reasons for a plan; `mixing` is None if only one class could train."""

    mixing: MixingComparison | None = None
    hosts_left_out: tuple[str, ...] = Field(
        default=(), description="the links to them would cost more than their devices give"
    )
    devices_left_out: tuple[str, ...] = Field(
        default=(), description="single ones: others of their class, and on their host, take part"
    )
    in_no_tp_group: tuple[str, ...] = Field(
        default=(),
        description="devices that may not compute alone, and are too few on their host for a "
        "tensor-parallel group",
    )
    dtypes: tuple[DtypeReason, ...] = Field(
        default=(), description="of the classes, where not all compute in the same, or not well"
    )
    binds: Bottlenecks
    worth: tuple[ClassWorth, ...] = ()
    alternatives: tuple[RejectedPlan, ...] = ()
