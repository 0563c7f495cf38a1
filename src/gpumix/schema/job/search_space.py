"""Search space of the planner: the techniques a plan may use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from gpumix.schema.plan.plan import Plan, Schedule, Sharding, ZeroStage
from gpumix.schema.plan.stage import Head, Mode, Place
from gpumix.schema.value import Value

T = TypeVar("T")


def wrap_single_value(value: Any) -> Any:
    """Accept a single value for a list: `zero_stages: 3` means `zero_stages: [3]`."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Some = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(wrap_single_value)]


class Space(Value):
    """Techniques available to a plan, besides samples, micro-batches and shares; a value or a list
    of values each. All by default."""

    zero_stages: Some[ZeroStage] = Field(
        default=(3, 2, 1, 0), description="ZeRO stages: the parts of the state that are sharded"
    )
    shardings: Some[Sharding] = Field(
        default=("all", "host"),
        description="whether all devices shard the state, or those of each host",
    )
    gradient_checkpointing: Some[bool] = Field(
        default=(True, False),
        description="whether backward recomputes blocks (activation checkpointing) or keeps "
        "their graphs; with both, as many graphs are kept as fit",
    )
    checkpoints_on: Some[Place] = Field(
        default=("device", "host"), description="place of the checkpointed inputs"
    )
    orders: Some[Literal["layered", "sequential"]] = Field(
        default=("layered", "sequential"),
        description="each block for all micro-batches, or one micro-batch after the other",
    )
    cross_entropy: Some[Head] = Field(
        default=("whole", "chunked"),
        description="logits of a micro-batch at once, or some rows at a time",
    )
    state_on: Some[Place] = Field(
        default=("device", "host"),
        description="place of fp32 parameters and optimizer state, which are updated there",
    )
    parameters_on: Some[Place] | None = Field(
        default=None,
        description="where all parameters are: divided between the devices, or one copy in memory "
        "of each host, from which devices copy block by block; null: on hosts where nothing else "
        "fits",
    )
    tensor_parallel_size: Some[Annotated[int, Field(ge=1)]] = Field(
        default=(1, 2, 4, 8),
        description="tensor-parallel degrees: number of devices of one type and host that "
        "compute each block together",
    )
    sequence_parallel: Some[bool] = Field(
        default=(False, True),
        description="whether tensor-parallel groups also divide the positions of a sample "
        "where blocks are not divided: sequence parallelism",
    )
    max_pipeline_stages: int | None = Field(
        default=None,
        ge=1,
        description="most stages of a plan; null: as many as devices or blocks",
    )
    min_pipeline_stages: int = Field(
        default=1,
        ge=1,
        description="fewest stages of a plan; for strategies `staged` and `optimal`",
    )
    pipeline_schedules: Some[Schedule] = Field(
        default=("1f1b", "eager-1f1b", "gpipe", "interleaved", "zero-bubble"),
        description="order of micro-batches through several stages",
    )
    waves: bool = Field(
        default=True,
        description="whether a batch may go through the model in several parts, one after "
        "another, where it does not fit otherwise or is faster so",
    )
    leave_out: bool | None = Field(
        default=None,
        description="whether devices may be left out if the others are faster alone; null: if "
        "no processes are started yet, as with `gpumix train` on one host",
    )
    padded: bool = Field(
        default=True, description="whether nearly equal shares may be moved as equal ones"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        least, most = self.min_pipeline_stages, self.max_pipeline_stages
        if most is not None and most < least:
            raise ValueError(
                f"'min_pipeline_stages' is {least}, 'max_pipeline_stages' {most}: the least is to "
                "be no more than the most"
            )
        if self.sequence_parallel == (True,) and max(self.tensor_parallel_size) == 1:
            raise ValueError(
                "`sequence_parallel: true` has no effect without a tensor degree above 1"
            )
        return self

    def leaving_out(self) -> Space:
        """Return the space for planning before any processes are started."""
        return self if self.leave_out is not None else self.model_copy(update={"leave_out": True})

    def with_all_devices(self) -> Space:
        """Return the space without leaving out devices."""
        return self.model_copy(update={"leave_out": False})

    def in_one_stage(self) -> Space:
        """Return the space without several stages and tensor parallelism."""
        return self.without_tensor_parallel().model_copy(update={"max_pipeline_stages": 1})

    def without_tensor_parallel(self) -> Space:
        """Return the space without tensor parallelism."""
        return self.model_copy(update={"tensor_parallel_size": (1,)})

    def of_one_wave(self) -> Space | None:
        """Return the space of a wave of several; None if several waves are not in the space."""
        stages = tuple(stage for stage in self.zero_stages if stage >= 2)
        single = self.min_pipeline_stages == 1
        if not (self.waves and single and stages and "layered" in self.orders):
            return None
        return self.model_copy(
            update={
                "zero_stages": stages,
                "orders": ("layered",),
                "max_pipeline_stages": 1,
                "waves": False,
            }
        )

    def modes(self, zero_stage: ZeroStage) -> Iterator[Mode]:
        """Yield the modes of a worker at a ZeRO stage, plainest first.

        Sequential micro-batches need the full parameters and the full gradient to accumulate into,
        so they require stage 0 or 1.
        """
        choices = product(
            self.orders, self.gradient_checkpointing, self.checkpoints_on, self.cross_entropy
        )
        for order, recompute, boundary, head in choices:
            if order == "sequential" and zero_stage > 1:
                continue
            if boundary == "host" and (not recompute or order == "sequential"):
                continue
            yield Mode(recompute=recompute, boundary=boundary, order=order, head=head)

    def missing(self, plan: Plan) -> str:
        """Describe the first technique of `plan` outside this space; return "" if there is none."""
        if plan.zero_stage not in self.zero_stages:
            return f"ZeRO stage {plan.zero_stage}"
        if other := set(plan.degrees) - set(self.tensor_parallel_size):
            return f"tensor parallel degree {min(other)}"
        ways = {stage.sequence for stage in plan.stages if stage.tensor > 1}
        if unwanted := ways - set(self.sequence_parallel):
            have = "with" if True in unwanted else "without"
            return f"tensor parallelism {have} sequence parallelism"
        stages = len(plan.stages)
        if not self.min_pipeline_stages <= stages <= (self.max_pipeline_stages or stages):
            return f"{stages} stages"
        if stages > 1 and plan.schedule not in self.pipeline_schedules:
            return f"schedule '{plan.schedule}'"
        if len(plan.stages) == 1 and plan.waves > 1 and not self.waves:
            return f"{plan.waves} waves"
        if plan.sharding not in self.shardings:
            return "state that each host divides for itself"
        if not self.padded and plan.collectives.is_padded:
            return "padded collectives"
        if elsewhere := {w.state_on for w in plan.workers} - set(self.state_on):
            return f"state on the {min(elsewhere)}"
        if self.parameters_on and plan.parameters_on not in self.parameters_on:
            return f"parameters on the {plan.parameters_on}"
        modes = tuple(self.modes(plan.zero_stage))
        last = {w.mode for w in plan.stages[-1].workers} - set(modes)
        headless = {mode.model_copy(update={"head": "whole"}) for mode in modes}
        before = {
            w.mode.model_copy(update={"head": "whole"}) for s in plan.stages[:-1] for w in s.workers
        }
        return next((mode.describe() for mode in (*last, *(before - headless))), "")


EVERYTHING = Space()
