"""The plan: division of compute and state among ranks, executed by the engine.

A plan is a list of pipeline stages; a stage is a range of units and the workers computing them.
Data parallelism is one stage with many workers. Compute (`samples`, `micro_batch`) and memory
(`state_share`) are decided separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil, inf
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from gpumix.schema.errors import InputError
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.explanation import Reasons
from gpumix.schema.plan.optimizer_state import OptimizerState, get_cut_multiple
from gpumix.schema.plan.stage import ComputeDtype, Place, Stage, WavePart, Worker
from gpumix.schema.units import LARGEST_BATCH, LARGEST_LENGTH
from gpumix.schema.value import Document, Value, refuse_duplicates

GatherForm = Literal["native", "padded", "broadcast", "list"]
ReduceForm = Literal["native", "padded", "all_to_all", "list"]
ZeroStage = Literal[0, 1, 2, 3]
TokenRate = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(lambda v: inf if v == "Infinity" else v),  # JSON has no number for infinity
]
"""Tokens per second; infinite if a step takes no time."""
Seconds = Annotated[float, Field(ge=0)]
Sharding = Literal["all", "host"]
Schedule = Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"]
_OF_DEVICE = ("host", "device_class", "compute_dtype", "state_on", "compile", "efficiency")
"""Worker fields describing the device, equal in all stages."""


class Collectives(Value):
    """Algorithm of each collective; `engine.comm` describes them.

    `native` is the backend's own collective for equal shares, used for units with equal shares
    only; other units use the configured form. `padded` runs the native collective on intervals
    filled up to `padding` times an equal interval.
    """

    gather: GatherForm = "broadcast"
    reduce: ReduceForm = "all_to_all"
    padding: float = Field(default=1.0, ge=1, description="no share is larger, times the ranks")

    @property
    def is_padded(self) -> bool:
        """True if `padding` limits the shares."""
        return "padded" in (self.gather, self.reduce)


class BatchWorker(NamedTuple):
    """A worker that processes parts of the batch.

    Attributes:
        parts: numbers of the parts, in processing order.
        speed: relative throughput.
    """

    parts: tuple[int, ...]
    speed: float


class WorkerPrediction(Value):
    """Cost-model prediction for a worker in one step."""

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
    """Cost-model prediction for one step of the plan."""

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
        description="no plan that was searched takes less, unless units are joined, single graphs "
        "kept, or devices of one stage of several differ in mode or share its state less equally "
        "than they have room for; of many rows of stages, and of many mixtures of tensor parallel "
        "degrees, only some are searched",
    )
    loading_bytes: int = Field(
        default=0,
        description="host memory of a process for reading weights, at most, beyond what it keeps; "
        "0: not known",
    )
    workers: tuple[WorkerPrediction, ...]
    peaks: dict[str, Peak] = Field(default={}, description="by class, of those that are known")


class Plan(Document):
    """Work of every rank, valid for one model, sequence length, batch and set of devices."""

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
        description="at ZeRO stages 2 and 3: into how many parts each worker's micro-batches are "
        "divided; a part goes forward and backward through the stage's layers together",
    )
    ranks: tuple[str, ...] = Field(
        default=(), description="devices in the order of their ranks; empty: as stages name them"
    )
    zero_stage: ZeroStage = 3
    sharding: Sharding = Field(
        default="all", description="whether all ranks divide the state, or those of each host"
    )
    optimizer_state: OptimizerState = Field(
        default="fp32",
        description="that the plan is for: with `8bit`, cuts are at multiples of 256 elements of a "
        "parameter, so that what is quantised together is on one rank",
    )
    parameters_on: Place = Field(
        default="device",
        description="where all parameters are: divided between the devices, or in memory shared by "
        "the devices of a host, one copy a host, from which each device copies a block when it "
        "needs it and where gradients are summed",
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
            refuse_duplicates("device", (w.device for w in stage.workers))
        if self.schedule != "interleaved":
            devices = (w.device for stage in self.stages for w in stage.workers)
            refuse_duplicates("device", devices, "is in two stages, which is for interleaved ones")
        there = {worker.device for stage in self.stages for worker in stage.workers}
        if self.ranks and sorted(self.ranks) != sorted(there):
            raise ValueError(
                f"'ranks' must name each device of the stages once ({', '.join(sorted(there))}), "
                f"and names {', '.join(self.ranks)}"
            )
        told = [w.device for w in self.prediction.workers] if self.prediction is not None else []
        refuse_duplicates("device", told, "is predicted twice")
        if strangers := set(told) - there:
            raise ValueError(f"device '{min(strangers)}' is predicted, and is in no stage")
        if self.collectives.padding > len(self.workers):
            raise ValueError(
                f"intervals padded to {self.collectives.padding:g} times an equal one are longer "
                f"than a whole buffer over {len(self.workers)} workers"
            )
        for stage in self.stages:
            samples = sum(w.samples for w in stage.leaders)
            if samples != self.global_batch:
                raise ValueError(
                    f"the workers' samples add up to {samples}, not to the global batch of "
                    f"{self.global_batch}"
                )
            alike = len({len(seats) for seats in stage.seats}) == 1
            for where, shares in self._state_shares(stage):
                self._check_state_shares(where, shares, alike=alike)
        if self.sharding == "host" and any(stage.tensor > 1 for stage in self.stages):
            raise ValueError(
                "hosts repeat no state of tensor-parallel groups: sharding 'host' excludes them"
            )
        if self.waves > 1:
            self._check_waves()
        if self.parameters_on == "host":
            self._check_parameters_on_hosts()
        if len(self.stages) > 1:
            self._check_stages()
        return self

    def _check_parameters_on_hosts(self) -> None:
        """Check that each host can have a copy of all parameters, and update it."""
        if len(self.stages) > 1 or self.uses_tensor_parallel:
            raise ValueError(
                "`parameters_on: host` is for plans of one stage, without tensor-parallel groups"
            )
        if self.zero_stage != 3:
            raise ValueError(
                "`parameters_on: host` keeps no parameters on devices: write `zero_stage: 3`"
            )
        for worker in self.workers:
            if worker.state_on != "host":
                raise ValueError(
                    "the host updates parameters that it keeps: write `state_on: host` for device "
                    f"'{worker.device}'"
                )
        hosts = {worker.host for worker in self.workers}
        if len(hosts) > 1 and self.sharding != "host":
            raise ValueError(
                f"each of {len(hosts)} hosts keeps a copy of all parameters: write "
                "`sharding: host`, with state shares that add up to 1 on each"
            )

    def _check_waves(self) -> None:
        """Check that workers can process several waves."""
        if not self.in_waves:
            raise ValueError("several waves are for ZeRO stages 2 and 3: others gather nothing")
        for number, stage in enumerate(self.stages, 1):
            if self.waves > (most := max(len(w.micro_batches) for w in stage.workers)):
                raise ValueError(
                    f"{self.waves} waves need as many micro-batches: no worker of stage {number} "
                    f"has more than {most}"
                )
        if len(self.stages) > 1:
            return
        for worker in self.workers:
            if worker.mode.order != "layered" or worker.kept_graphs:
                raise ValueError(
                    "a worker in several waves takes each block for all micro-batches of a wave "
                    "and keeps no single graphs: write `mode.order: layered` and `kept_graphs: 0` "
                    f"for device '{worker.device}', or one wave"
                )

    def _check_devices(self) -> None:
        """Check that a device in several stages has equal settings in all stages."""
        first = {worker.device: worker for worker in self.workers}
        for number, stage in enumerate(self.stages, 1):
            for worker in stage.workers:
                for key in _OF_DEVICE:
                    now, before = getattr(worker, key), getattr(first[worker.device], key)
                    if now != before:
                        raise ValueError(
                            f"device '{worker.device}' has {key} '{now}' in stage {number}, and "
                            f"'{before}' in an earlier one"
                        )

    def _check_stages(self) -> None:
        """Check the consistency of several stages."""
        cuts = [[one.rows for one in s.micro_batches(self.waves)] for s in self.stages]
        if any(rows != cuts[0] for rows in cuts):
            raise ValueError("the stages do not cut the batch into the same micro-batches")
        refuse_duplicates(
            "unit",
            (name for stage in self.stages for name in dict.fromkeys(stage.units)),
            "is in two stages, which would have its weights twice",
        )
        self._check_takes()
        self._check_devices()
        if self.schedule == "interleaved":
            rows = [
                (s.tensor, *((w.device, w.samples, w.parts) for w in s.workers))
                for s in self.stages
            ]
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
        """Check that stages take from earlier stages only, and use each stage's output."""
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

    def _check_state_shares(self, where: str, shares: Sequence[float], *, alike: bool) -> None:
        """Check that shares of one copy of the state are all of it, and fit padded intervals where
        tensor-parallel groups are `alike`."""
        if abs(sum(shares) - 1.0) > 1e-6:
            raise ValueError(f"the state shares of {where} add up to {sum(shares):.6f}, not to 1")
        forms, relative = self.collectives, max(shares) * len(shares)
        padded = alike and self.zero_stage > 0 and forms.is_padded
        if padded and relative > forms.padding + 1e-6:
            raise ValueError(
                f"the largest state share of {where} is {relative:.3f} times an equal one, and "
                f"intervals are padded to {forms.padding:g} times: write "
                f"`padding: {ceil(100 * relative) / 100:g}` or more"
            )

    def _state_shares(self, stage: Stage) -> Iterator[tuple[str, list[float]]]:
        """Yield the state shares of each group of workers dividing the state."""
        if self.sharding == "all":
            yield "a stage", [w.state_share for w in stage.leaders]
            return
        shares: dict[str, list[float]] = {}
        for worker in stage.workers:
            shares.setdefault(worker.host, []).append(worker.state_share)
        for host, of_host in shares.items():
            yield f"host '{host}'", of_host

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """Worker of each rank in rank order; for a rank in several stages, the first stage's
        worker."""
        first: dict[str, Worker] = {}
        for worker in (w for stage in self.stages for w in stage.workers):
            first.setdefault(worker.device, worker)
        return tuple(first[device] for device in self.ranks or first)

    @property
    def cut_multiple(self) -> int:
        """Number of elements of a parameter of which cuts of the state are multiples."""
        return get_cut_multiple(self.optimizer_state)

    @property
    def in_waves(self) -> bool:
        """True if workers of a stage gather and reduce in the middle of a step, so all of them
        process waves of micro-batches together."""
        return self.zero_stage >= 2

    def puts_off(self, stage: int, worker: Worker) -> bool:
        """Return True if a worker computes parameter gradients in separate passes: `zero-bubble`
        with saved graphs. In waves workers reduce together, so the answer is equal for the whole
        stage."""
        together = self.stages[stage].workers if self.in_waves else (worker,)
        recomputes = any(one.mode.recompute for one in together if one.micro_batches)
        return self.schedule == "zero-bubble" and not recomputes

    @cached_property
    def is_uncut(self) -> bool:
        """True if all samples of a batch are computed at once."""
        return len(self.stages[0].micro_batches(1)) == 1

    @property
    def uses_tensor_parallel(self) -> bool:
        """True if tensor-parallel groups compute units together."""
        return any(stage.tensor > 1 for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sizes of the tensor-parallel groups, each once, in ascending order."""
        sizes = {stage.get_tp_size(worker) for stage in self.stages for worker in stage.workers}
        return tuple(sorted(sizes))

    @property
    def of_leaders(self) -> Plan:
        """The plan reduced to the first worker of each tensor-parallel group, acting for the
        group."""
        if not self.uses_tensor_parallel:
            return self
        stages = tuple(
            stage.model_copy(
                update={
                    "workers": tuple(
                        worker.model_copy(update={"parts": 1}) if worker.parts > 1 else worker
                        for worker in stage.leaders
                    ),
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
        """Return the prediction for a rank. Predictions are looked up by device: their order is
        that of the ranks at planning time, which may differ."""
        return self.expected_by_device.get(self.workers[rank].device)

    @cached_property
    def expected_by_device(self) -> Mapping[str, WorkerPrediction]:
        """Prediction by device; empty without a prediction."""
        told = self.prediction.workers if self.prediction is not None else ()
        return {expected.device: expected for expected in told}

    def get_tp_group(self, rank: int, stage: int) -> tuple[int, ...]:
        """Return the ranks of the tensor-parallel group containing `rank` in a stage, in order."""
        seats = self._turns_of(rank, stage)[0].seats
        return self.ranks_of(stage)[seats.start : seats.stop]

    def list_tp_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each tensor-parallel group of a stage, in order."""
        ranks = self.ranks_of(stage)
        return tuple(ranks[seats.start : seats.stop] for seats in self.stages[stage].seats)

    def parts_of(self, rank: int, stage: int) -> range:
        """Return the tensor-parallel parts of a stage's units computed by a rank."""
        parts = self.worker_of(rank, stage).parts
        first = self.get_tp_group(rank, stage).index(rank) * parts
        return range(first, first + parts)

    def shares_among(self, stages: Sequence[int], part: int | None = None) -> dict[int, float]:
        """Return the state share of each rank over `stages`, in rank order.

        Args:
            part: only ranks with this tensor-parallel part share the state; None: all ranks.
        """
        shares: dict[int, float] = {}
        for number in stages:
            ranks, stage = self.ranks_of(number), self.stages[number]
            for seats in stage.seats:
                among = seats
                if part is not None:
                    seat = seats.start + part // stage.workers[seats.start].parts
                    among = range(seat, seat + 1)
                for seat in among:
                    share = stage.workers[seat].state_share / (len(stages) * len(among))
                    shares[ranks[seat]] = shares.get(ranks[seat], 0.0) + share
        return dict(sorted(shares.items()))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages computed by a rank."""
        return tuple(number for number, seats in enumerate(self._seats) if rank in seats)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage, in the order of its workers."""
        return self._ranks[stage]

    def worker_of(self, rank: int, stage: int) -> Worker:
        """Return the worker of a rank in a stage."""
        return self.stages[stage].workers[self._seats[stage][rank]]

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the workers of each stage."""
        numbers = {worker.device: rank for rank, worker in enumerate(self.workers)}
        return tuple(tuple(numbers[w.device] for w in stage.workers) for stage in self.stages)

    @cached_property
    def _seats(self) -> tuple[Mapping[int, int], ...]:
        """For each stage, the index among its workers by rank."""
        return tuple({rank: seat for seat, rank in enumerate(ranks)} for ranks in self._ranks)

    def rows_of(self, rank: int) -> tuple[range, ...]:
        """Return the rows of the global batch in each of a rank's micro-batches, in order. The rows
        are equal in all stages of a rank."""
        number = self.stages_of(rank)[0]
        stage, turns = self.stages[number], self._turns_of(rank, number)
        return tuple(rows for turn in turns for rows in stage.rows_in(turn, self._waves_of_rows))

    def numbers_of(self, rank: int, stage: int) -> tuple[int, ...]:
        """Return the numbers of a rank's micro-batches in a stage."""
        return tuple(
            turn.first + place
            for turn in self._turns_of(rank, stage)
            for place in range(len(self.stages[stage].rows_in(turn, self._waves_of_rows)))
        )

    def _turns_of(self, rank: int, stage: int) -> Sequence[WavePart]:
        """Return the turns of a rank in a stage: the positions of its micro-batches in each
        wave."""
        return self._turns[stage][self._seats[stage][rank]]

    @cached_property
    def _turns(self) -> tuple[Mapping[int, Sequence[WavePart]], ...]:
        """For each stage, the turns of the tensor-parallel group by worker index."""
        found: list[dict[int, list[WavePart]]] = []
        for stage in self.stages:
            of_seat: dict[int, list[WavePart]] = {}
            for turn in stage.turns(self._waves_of_rows):
                of_group = of_seat.setdefault(turn.seats.start, [])
                of_group.append(turn)
                of_seat.update(dict.fromkeys(turn.seats, of_group))
            found.append(of_seat)
        return tuple(found)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each part of the global batch as divided for reading: a part for each worker,
        or for each micro-batch if several workers read the same samples."""
        if self._is_read_once:
            return tuple(worker.samples for worker in self.workers)
        micro_batches = self.stages[0].micro_batches(self._waves_of_rows)
        return tuple(len(one.rows) for one in micro_batches)

    @property
    def _waves_of_rows(self) -> int:
        """Waves that follow each other in the batch. With one stage each worker's samples are in a
        row: it gives none to other workers."""
        return self.waves if len(self.stages) > 1 else 1

    @cached_property
    def batch_workers(self) -> tuple[BatchWorker, ...]:
        """Workers of the first stage with their parts of the batch, in order. Without a prediction
        a worker's speed is its number of samples."""
        if self._is_read_once:
            return tuple(BatchWorker((n,), self._speed(w)) for n, w in enumerate(self.workers))
        stage, ranks = self.stages[0], self.ranks_of(0)
        return tuple(
            BatchWorker(
                self.numbers_of(ranks[seats.start], 0), self._speed(stage.workers[seats.start])
            )
            for seats in stage.seats
        )

    def parts_read_by(self, rank: int) -> tuple[int, ...]:
        """Return the indices into `sizes` of the parts of the batch read by a rank."""
        return (rank,) if self._is_read_once else self.numbers_of(rank, self.stages_of(rank)[0])

    @property
    def _is_read_once(self) -> bool:
        """True if each sample is read by a single rank."""
        return len(self.stages) == 1 and not self.uses_tensor_parallel

    def _speed(self, worker: Worker) -> float:
        """Return samples per second of compute, or samples per step without a prediction."""
        predicted = self.expected_by_device.get(worker.device)
        computes_s = 0.0 if predicted is None else predicted.busy_s - predicted.optimizer_s
        return worker.samples / computes_s if computes_s > 0 else float(worker.samples)

    def first_call(self, stage: int) -> int:
        """Return the number of a stage's first unit call, counted over all stages."""
        return sum(len(earlier.units) for earlier in self.stages[:stage])

    def for_devices(self, devices: Sequence[str]) -> Plan:
        """Return the plan with workers ordered by `devices`, the id of each rank's device.

        Raises:
            InputError: the plan was made for other devices.
        """
        by_device = {w.device: w for w in self.workers}
        missing, extra = set(by_device) - set(devices), set(devices) - set(by_device)
        if missing or extra:
            raise InputError(
                "the plan was made for other devices",
                code="plan-of-other-devices",
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
        ranks = tuple(devices) if len(stages) > 1 or self.uses_tensor_parallel else ()
        return self.model_copy(update={"stages": tuple(stages), "ranks": ranks})
