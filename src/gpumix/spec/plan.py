"""Who computes what and who stores what: the value that the engine runs.

A plan is a list of stages; a stage is a run of units and the workers that compute them. Data
parallelism is one stage with many workers. Compute (`samples`, `micro_batch`) and memory
(`state_share`) are decided apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpumix.spec.base import Document, Value, refuse_twins
from gpumix.spec.cut import split_micro_batches
from gpumix.spec.efficiency import PLAIN_EFFICIENCY, Efficiency
from gpumix.spec.errors import InputError
from gpumix.spec.peak import Peak
from gpumix.spec.reasons import Reasons
from gpumix.spec.units import LARGEST_BATCH, LARGEST_LENGTH

ComputeDtype = Literal["fp32", "bf16", "fp16"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

GatherForm = Literal["native", "padded", "broadcast", "list"]
ReduceForm = Literal["native", "padded", "all_to_all", "list"]
ZeroStage = Literal[0, 1, 2, 3]
TokenRate = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(lambda v: inf if v == "Infinity" else v),  # which JSON has no number for
]
"""Tokens a second: infinite where a step takes no time."""
Seconds = Annotated[float, Field(ge=0)]
Sharding = Literal["all", "host"]
Place = Literal["device", "host"]
Head = Literal["whole", "chunked"]
Schedule = Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"]


class Collectives(Value):
    """Which form each collective takes; `engine.comm` says what each form does.

    `native` is the backend's own collective for equal shares; it is used only where the shares of a
    unit are equal, the other form elsewhere. `padded` is the native one on intervals that are all
    filled up to `padding` times an equal one.
    """

    gather: GatherForm = "broadcast"
    reduce: ReduceForm = "all_to_all"
    padding: float = Field(default=1.0, ge=1, description="no share is larger, times the ranks")


class Mode(Value):
    """How a worker runs its micro-batches, and what it keeps for their backward.

    With `recompute` a unit is computed again in the backward pass from its saved inputs, which lie
    on the device or on the host (`boundary`); without it the graph is kept. `sequential` runs
    forward and backward of one micro-batch after the other, the smaller one first, `layered` each
    unit for all of them. A `chunked` head makes some rows of a micro-batch's logits at a time, if
    the model takes nothing but its loss of them.
    """

    recompute: bool = True
    boundary: Place = "device"
    order: Literal["layered", "sequential"] = "layered"
    head: Head = "whole"

    @model_validator(mode="after")
    def _only_boundaries_go_to_the_host(self) -> Self:
        if self.boundary == "host" and not self.recompute:
            raise ValueError("the host keeps inputs to recompute from, no graphs")
        return self

    def describe(self) -> str:
        """A few words for tables."""
        kept = "recompute" if self.recompute else "keep graphs"
        where = " from host" if self.boundary == "host" else ""
        order = ", sequential" if self.order == "sequential" else ""
        return f"{kept}{where}{order}{', head in chunks' if self.head == 'chunked' else ''}"


PLAIN = Mode()


class Worker(Value):
    """One device's part: its samples of each global batch, and its share of the state.

    `samples` may be zero (it only stores) and `state_share` may be zero (it only computes).
    """

    device: str
    device_class: str
    host: str = "localhost"
    samples: int = Field(ge=0)
    micro_batch: int = Field(ge=0, description="the most samples that run at once; 0 for none")
    state_share: float = Field(
        ge=0, le=1, description="of what is sharded; with ZeRO stage 0 of nothing"
    )
    mode: Mode = PLAIN
    kept_graphs: int = Field(
        default=0,
        ge=0,
        description="of its (unit call, micro-batch) pairs, how many keep their graph though the "
        "mode recomputes: the last ones of the forward pass",
    )
    state_on: Place = Field(
        default="device",
        description="where its share of fp32 parameters, of their gradients and of the optimizer's "
        "state lies, and is updated",
    )
    compile: bool = Field(default=False, description="whether its units run in compiled code")
    compute_dtype: ComputeDtype = "fp32"
    efficiency: Efficiency = PLAIN_EFFICIENCY

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> Self:
        if (self.samples == 0) != (self.micro_batch == 0) or self.micro_batch > self.samples:
            raise ValueError(
                f"worker '{self.device}' has {self.samples} samples in micro-batches of "
                f"{self.micro_batch}"
            )
        return self

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples in each micro-batch; only the last may be smaller."""
        return split_micro_batches(self.samples, self.micro_batch)


class Taken(Value):
    """What a stage needs of an earlier one: a tensor that a unit call returns."""

    call: int = Field(ge=0, description="number of the call, counted over all stages")
    output: int = Field(ge=0, description="number of the tensor's place in what the call returns")
    differentiable: bool = Field(default=True, description="whether its gradient goes back")


@dataclass(frozen=True)
class MicroBatchOf:
    """A micro-batch of a stage: which of its workers computes it (of a team the first), in which
    wave, and its rows of the global batch."""

    worker: int
    wave: int
    rows: range


class Stage(Value):
    """A contiguous run of units, and the workers that compute them, in rank order.

    With tensor parallelism so many workers in a row are a *team*: each has its part of every unit,
    they compute the same micro-batches together, and divide the state with the workers who have
    the same part in other teams.

    `units` are the module names of the unit calls in the order of the forward pass, without the
    root unit; a unit that is called twice is named twice. Where there are several stages, `takes`
    and `root` are all that a stage needs of what lies outside of its units.
    """

    units: tuple[str, ...]
    workers: tuple[Worker, ...]
    tensor: int = Field(
        default=1,
        ge=1,
        description="workers in a row that compute each unit together: the tensor parallel degree",
    )
    sequence: bool = Field(
        default=False,
        description="whether each worker of a team has a part of the positions of a sample where "
        "units are not divided: sequence parallelism",
    )
    joined: int = Field(
        default=1, ge=1, description="units in a row that are gathered and reduced as one"
    )
    before: tuple[str, ...] = Field(
        default=(),
        description="parameters of the root that only the code before the units looks up",
    )
    after: tuple[str, ...] = Field(
        default=(), description="parameters of the root that only head and loss use"
    )
    takes: tuple[Taken, ...] = ()
    root: tuple[str, ...] | None = Field(
        default=None, description="parameters of the root that the stage uses; null: all"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.workers:
            raise ValueError("a stage without devices: nobody computes its units")
        if not self.units:
            raise ValueError("a stage without units: there are more stages than units to compute")
        return self

    @model_validator(mode="after")
    def _nothing_twice(self) -> Self:
        refuse_twins("parameter of 'root'", self.root or ())
        refuse_twins("entry of 'takes'", (f"call {t.call}, output {t.output}" for t in self.takes))
        return self

    @model_validator(mode="after")
    def _whole_teams(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("only workers that are a team divide the positions of a sample")
        if len(self.workers) % self.tensor:
            raise ValueError(
                f"{len(self.workers)} workers cannot form teams of {self.tensor}, the stage's "
                "tensor parallel degree"
            )
        for team in self.teams if self.tensor > 1 else ():
            parts = {
                (w.samples, w.micro_batch, w.state_share, w.mode, w.kept_graphs, w.compute_dtype)
                for w in team
            }
            if len(parts) > 1:
                raise ValueError(
                    f"the workers of a team ({', '.join(w.device for w in team)}) must have the "
                    "same samples, micro-batch, state share, mode, kept graphs and dtype"
                )
            if any(w.compile for w in team):
                raise ValueError("units that several workers compute together are not compiled")
        return self

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(w.state_share for w in self.workers)

    @property
    def teams(self) -> tuple[tuple[Worker, ...], ...]:
        """The workers that compute together; of one each without tensor parallelism."""
        return tuple(
            self.workers[n : n + self.tensor] for n in range(0, len(self.workers), self.tensor)
        )

    def micro_batches(self, waves: int) -> tuple[MicroBatchOf, ...]:
        """Those of the global batch, in the order of its samples: wave after wave, and of each
        wave worker after worker."""
        found: list[MicroBatchOf] = []
        begin = 0
        for wave in range(waves):
            for number in range(0, len(self.workers), self.tensor):
                sizes = self.workers[number].micro_batches
                first, last = (len(sizes) * w // waves for w in (wave, wave + 1))
                for size in sizes[first:last]:
                    found.append(MicroBatchOf(number, wave, range(begin, begin + size)))
                    begin += size
        return tuple(found)


class WorkerPrediction(Value):
    """What the cost model expects of one worker in one step."""

    device: str
    forward_s: Seconds = Field(description="waits for gathers included")
    backward_s: Seconds = Field(description="waits for gathers and reductions included")
    optimizer_s: Seconds
    busy_s: Seconds = Field(description="of all these, what is no waiting")
    memory_bytes: dict[str, int] = Field(description="peak by cause; the sum is the peak")
    memory_limit_bytes: int
    host_bytes: int = Field(default=0, description="what the host keeps for it")
    model_flops: float | None = Field(
        default=None, description="of its samples, forward and backward; None: not counted"
    )
    hardware_flops: float | None = Field(
        default=None, description="the same with all that is computed again"
    )

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory_bytes.values())


class Prediction(Value):
    """What the cost model expects of one step of the plan."""

    step_s: Seconds
    tokens_per_s: TokenRate
    exposed_communication_s: Seconds
    input_s: Seconds = Field(
        default=0.0,
        description="that reading its samples takes on the host where it takes longest, while the "
        "step before is computed: no step is shorter",
    )
    bound_s: Seconds | None = Field(
        default=None,
        description="no plan of these devices and techniques takes less, unless units are joined, "
        "single graphs kept, or devices of one stage of several differ in mode or share its state "
        "less equally than they have room for",
    )
    workers: tuple[WorkerPrediction, ...]
    peaks: dict[str, Peak] = Field(default={}, description="by class, of those that are known")


class Plan(Document):
    """What every rank does, valid for one model, sequence length, batch and set of devices."""

    KIND: ClassVar[str] = "plan"
    kind: Literal["plan"] = "plan"

    strategy: str
    model: str = Field(description="fingerprint of the model's units and parameter shapes")
    sequence_length: int = Field(gt=0, le=LARGEST_LENGTH)
    global_batch: int = Field(gt=0, le=LARGEST_BATCH)
    communication_dtype: ComputeDtype = Field(
        default="fp32",
        description="parameters are rounded to it before any rank computes with them; gradients "
        "are summed in fp32",
    )
    stages: tuple[Stage, ...] = Field(min_length=1)
    schedule: Schedule = Field(
        default="1f1b", description="in which order micro-batches go through several stages"
    )
    waves: int = Field(
        default=1,
        ge=1,
        description="of several stages at ZeRO stages 2 and 3: into how many parts each worker's "
        "micro-batches are divided; a part goes through the stage's layers together",
    )
    ranks: tuple[str, ...] = Field(
        default=(), description="devices in the order of their ranks; empty: as stages name them"
    )
    zero_stage: ZeroStage = 3
    sharding: Sharding = Field(
        default="all", description="whether all ranks divide the state, or those of each host"
    )
    collectives: Collectives = Collectives()
    prediction: Prediction | None = None
    reasons: Reasons | None = None
    emulated: bool = False
    estimated: tuple[str, ...] = Field(
        default=(), description="device classes whose times are estimates from their datasheets"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for stage in self.stages:
            refuse_twins("device", (w.device for w in stage.workers))
        if self.schedule != "interleaved":
            devices = (w.device for stage in self.stages for w in stage.workers)
            refuse_twins("device", devices, "is in two stages, which is for interleaved ones")
        there = {worker.device for stage in self.stages for worker in stage.workers}
        if self.ranks and sorted(self.ranks) != sorted(there):
            raise ValueError(
                f"'ranks' must name each device of the stages once ({', '.join(sorted(there))}), "
                f"and names {', '.join(self.ranks)}"
            )
        told = [w.device for w in self.prediction.workers] if self.prediction is not None else []
        refuse_twins("device", told, "is predicted twice")
        if strangers := set(told) - there:
            raise ValueError(f"device '{min(strangers)}' is predicted, and is in no stage")
        if self.collectives.padding > len(self.workers):
            raise ValueError(
                f"intervals padded to {self.collectives.padding:g} times an equal one are longer "
                f"than a whole buffer over {len(self.workers)} workers"
            )
        for stage in self.stages:
            samples = sum(w.samples for w in stage.workers[:: stage.tensor])
            if samples != self.global_batch:
                raise ValueError(
                    f"the workers' samples add up to {samples}, not to the global batch of "
                    f"{self.global_batch}"
                )
            for where, total in self._sums_of_shares(stage):
                if abs(total - 1.0) > 1e-6:
                    raise ValueError(f"the state shares of {where} add up to {total:.6f}, not to 1")
        if self.sharding == "host" and any(stage.tensor > 1 for stage in self.stages):
            raise ValueError("hosts repeat no state of teams: sharding 'host' is without them")
        if len(self.stages) > 1:
            self._check_stages()
        return self

    def _check_stages(self) -> None:
        """What one stage alone cannot have wrong."""
        cuts = [[one.rows for one in s.micro_batches(self.waves)] for s in self.stages]
        if any(rows != cuts[0] for rows in cuts):
            raise ValueError("the stages do not cut the batch into the same micro-batches")
        if self.waves > 1 and not self.in_waves:
            raise ValueError("several waves are for ZeRO stages 2 and 3: others gather nothing")
        for number, stage in enumerate(self.stages, 1):
            if self.waves > (most := max(len(w.micro_batches) for w in stage.workers)):
                raise ValueError(
                    f"{self.waves} waves need as many micro-batches: no worker of stage {number} "
                    f"has more than {most}"
                )
        if self.schedule == "zero-bubble" and self.zero_stage > 1:
            raise ValueError(
                "schedule 'zero-bubble' keeps gradients whole until a step's end, ZeRO stage "
                f"{self.zero_stage} divides them before"
            )
        refuse_twins(
            "unit",
            (name for stage in self.stages for name in dict.fromkeys(stage.units)),
            "is in two stages, which would have its weights twice",
        )
        self._check_takes()
        if self.schedule == "interleaved":
            rows = [(s.tensor, *((w.device, w.samples) for w in s.workers)) for s in self.stages]
            around = len(set(rows))
            if len(rows) % around or rows != rows[:around] * (len(rows) // around):
                raise ValueError(
                    "interleaved stages go round the same devices, with the same samples, again "
                    "and again"
                )
            if around == len(rows):
                raise ValueError(
                    "schedule 'interleaved' has several stages on each device, here each has one: "
                    "write '1f1b', which is the same then"
                )
        if self.sharding == "host":
            raise ValueError("the hosts of a stage repeat no state: sharding 'host' is for one")

    def _check_takes(self) -> None:
        """Stages give to later ones, and each gives something: else it computes for nobody."""
        calls = 0
        for number, stage in enumerate(self.stages):
            late = [taken.call for taken in stage.takes if taken.call >= calls]
            if late:
                raise ValueError(
                    f"stage {number + 1} takes what call {late[0]} returns, which is not in an "
                    f"earlier stage: {f'those have calls 0 to {calls - 1}' if calls else 'none is'}"
                )
            calls += len(stage.units)
        for number in range(len(self.stages) - 1):
            begin = self.first_call(number)
            own = range(begin, begin + len(self.stages[number].units))
            if not any(t.call in own for later in self.stages[number + 1 :] for t in later.takes):
                raise ValueError(
                    f"nobody takes what stage {number + 1} computes: 'takes' of stage {number + 2} "
                    f"has none of its calls ({own[0]} to {own[-1]})"
                )

    def _sums_of_shares(self, stage: Stage) -> Iterator[tuple[str, float]]:
        """The sum of the shares of those that divide the state between them."""
        if self.sharding == "all":
            yield "a stage", sum(stage.shares[:: stage.tensor])
            return
        sums: dict[str, float] = {}
        for worker in stage.workers:
            sums[worker.host] = sums.get(worker.host, 0.0) + worker.state_share
        for host, total in sums.items():
            yield f"host '{host}'", total

    @property
    def workers(self) -> tuple[Worker, ...]:
        """A worker of each rank, in rank order: of a rank with several stages that of the first."""
        first: dict[str, Worker] = {}
        for worker in (w for stage in self.stages for w in stage.workers):
            first.setdefault(worker.device, worker)
        return tuple(first[device] for device in self.ranks or first)

    @property
    def in_waves(self) -> bool:
        """Whether a stage's workers gather and reduce for each other in the middle of a step, so
        that all of them go through waves of micro-batches together."""
        return self.zero_stage >= 2

    @property
    def in_teams(self) -> bool:
        """Whether ranks compute units together."""
        return any(stage.tensor > 1 for stage in self.stages)

    @property
    def of_leaders(self) -> Plan:
        """The same with the first worker of each team alone, which stands for it."""
        if not self.in_teams:
            return self
        stages = tuple(
            stage.model_copy(
                update={
                    "workers": stage.workers[:: stage.tensor],
                    "tensor": 1,
                    "sequence": False,
                }
            )
            for stage in self.stages
        )
        left = {worker.device for stage in stages for worker in stage.workers}
        ranks = tuple(worker.device for worker in self.workers if worker.device in left)
        return self.model_copy(update={"stages": stages, "ranks": ranks})

    def expected_of(self, rank: int) -> WorkerPrediction | None:
        """What is predicted of a rank. The prediction has the order of the ranks for which it was
        made: by it alone devices of other ranks would be taken for this one."""
        device = self.workers[rank].device
        told = self.prediction.workers if self.prediction is not None else ()
        return next((expected for expected in told if expected.device == device), None)

    def team_of(self, rank: int, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage's units together with this one, in their order."""
        ranks, size = self.ranks_of(stage), self.stages[stage].tensor
        first = ranks.index(rank) // size * size
        return ranks[first : first + size]

    def shares_among(self, stages: Sequence[int], member: int = 0) -> dict[int, float]:
        """By rank, in their order: its share of what these stages divide between them. Of one
        stage alone those do who are number `member` of their teams; of several, all of them."""
        if len(stages) == 1:
            size, ranks = self.stages[stages[0]].tensor, self.ranks_of(stages[0])
            workers = zip(ranks[member::size], self.stages[stages[0]].shares[member::size])
            return dict(sorted(workers))
        shares: dict[int, float] = {}
        for stage in stages:
            parts = len(stages) * self.stages[stage].tensor
            for rank, share in zip(self.ranks_of(stage), self.stages[stage].shares):
                shares[rank] = shares.get(rank, 0.0) + share / parts
        return dict(sorted(shares.items()))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the stages that a rank computes."""
        device = self.workers[rank].device
        return tuple(
            number
            for number, stage in enumerate(self.stages)
            if any(w.device == device for w in stage.workers)
        )

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage, in its order."""
        numbers = {worker.device: rank for rank, worker in enumerate(self.workers)}
        return tuple(numbers[worker.device] for worker in self.stages[stage].workers)

    def worker_of(self, rank: int, stage: int) -> Worker:
        """A rank's part of a stage that it computes."""
        return self.stages[stage].workers[self.ranks_of(stage).index(rank)]

    def rows_of(self, rank: int) -> tuple[range, ...]:
        """Which samples of the global batch a rank computes: those of each of its micro-batches,
        in order. Where it has several stages, they are the same for all."""
        stage = self.stages_of(rank)[0]
        parts = self.stages[stage].micro_batches(self.waves)
        return tuple(parts[number].rows for number in self.numbers_of(rank, stage))

    def numbers_of(self, rank: int, stage: int) -> tuple[int, ...]:
        """The numbers of the micro-batches that a rank computes in a stage."""
        worker = self.ranks_of(stage).index(self.team_of(rank, stage)[0])
        parts = self.stages[stage].micro_batches(self.waves)
        return tuple(number for number, one in enumerate(parts) if one.worker == worker)

    def first_call(self, stage: int) -> int:
        """Number of a stage's first unit call, counted over all stages."""
        return sum(len(earlier.units) for earlier in self.stages[:stage])

    def for_devices(self, devices: Sequence[str]) -> Plan:
        """The same plan with its workers in the order of `devices`, the id of each rank's device.

        Raises:
            InputError: the plan was made for other devices.
        """
        by_device = {w.device: w for w in self.workers}
        missing, extra = set(by_device) - set(devices), set(devices) - set(by_device)
        if missing or extra:
            raise InputError(
                "the plan was made for other devices",
                why=f"missing here: {', '.join(sorted(missing)) or 'none'}; not in the plan: "
                f"{', '.join(sorted(extra)) or 'none'}",
                fix="make a plan for these devices: gpumix plan JOB.yaml",
            )
        rank = {device: number for number, device in enumerate(devices)}
        stages = [
            stage.model_copy(
                update={"workers": tuple(sorted(stage.workers, key=lambda w: rank[w.device]))}
            )
            if stage.tensor == 1
            else stage
            for stage in self.stages
        ]
        ranks = tuple(devices) if len(stages) > 1 or self.in_teams else ()
        return self.model_copy(update={"stages": tuple(stages), "ranks": ranks})


def between_teams(givers: Sequence[int], takers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Who gives to whom where all members of a team have what those of another need: giver and
    taker, each taker once."""
    return ((givers[number % len(givers)], taker) for number, taker in enumerate(takers))


def of_several(roots: Sequence[Sequence[str]]) -> dict[tuple[int, ...], list[str]]:
    """Of the names that each stage has of the root, those that several have, by these stages."""
    users: dict[str, list[int]] = {}
    for stage, names in enumerate(roots):
        for name in names:
            users.setdefault(name, []).append(stage)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in users.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), []).append(name)
    return found
