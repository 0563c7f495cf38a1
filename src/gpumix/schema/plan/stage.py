"""Stages of a plan: a range of units, and each worker's compute and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, KernelSettings
from gpumix.schema.plan.splitting import split_micro_batches
from gpumix.schema.value import Value, refuse_duplicates

ComputeDtype = Literal["fp32", "bf16", "fp16"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
Place = Literal["device", "host"]
Head = Literal["whole", "chunked"]


class Mode(Value):
    """Execution mode of a worker's micro-batches, and data kept for the backward.

    With `recompute` (activation checkpointing) a unit is recomputed in the backward from its saved
    inputs, on the device or the host (`boundary`); without it the graph is kept. `sequential` runs
    forward and backward of one micro-batch after the other, the smaller one first; `layered` runs
    each unit for all micro-batches. A `chunked` head computes some rows of a micro-batch's logits
    at a time, provided the model uses the logits only for its loss.
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
        """Return a short description for tables."""
        kept = "recompute" if self.recompute else "keep graphs"
        where = " from host" if self.boundary == "host" else ""
        order = ", sequential" if self.order == "sequential" else ""
        return f"{kept}{where}{order}{', chunked cross-entropy' if self.head == 'chunked' else ''}"


PLAIN = Mode()


class Worker(Value):
    """A device's samples of each global batch, and its share of the state.

    `samples` may be zero (storage only), and `state_share` may be zero (compute only).
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
    parts: int = Field(
        default=1,
        ge=1,
        description="of the parts into which its stage divides units, those that it computes; its "
        "tensor-parallel group computes the others",
    )
    compile: bool = Field(default=False, description="whether its units run in compiled code")
    compute_dtype: ComputeDtype = "fp32"
    efficiency: KernelSettings = PLAIN_EFFICIENCY

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

    def divide_micro_batches(self, waves: int) -> tuple[tuple[int, ...], ...]:
        """Return the samples in each micro-batch of each wave."""
        return _divide_micro_batches(self.samples, self.micro_batch, waves)


@lru_cache(maxsize=1024)
def _divide_micro_batches(samples: int, size: int, waves: int) -> tuple[tuple[int, ...], ...]:
    sizes = split_micro_batches(samples, size)
    ends = [len(sizes) * wave // waves for wave in range(waves + 1)]
    return tuple(sizes[begin:end] for begin, end in pairwise(ends))


class StageInput(Value):
    """An input of a stage from an earlier stage: a tensor returned by a unit call."""

    call: int = Field(ge=0, description="number of the call, counted over all stages")
    output: int = Field(ge=0, description="number of the tensor's place in what the call returns")
    differentiable: bool = Field(default=True, description="whether its gradient goes back")


class WavePart(NamedTuple):
    """A tensor-parallel group's part of a wave: its seats (worker indices), and the start of its
    micro-batches of the wave, as a micro-batch number of the stage and a row of the global
    batch."""

    seats: range
    wave: int
    first: int
    row: int


@dataclass(frozen=True)
class StageMicroBatch:
    """A micro-batch of a stage: indices of the computing workers, the wave, and the rows of the
    global batch."""

    seats: range
    wave: int
    rows: range

    @property
    def worker(self) -> int:
        """Index of the first worker."""
        return self.seats.start


class Stage(Value):
    """A contiguous range of units, and their workers in rank order.

    With tensor parallelism units are divided into `tensor` parts. Consecutive workers with all
    parts are a *tensor-parallel group*: they compute the same micro-batches together, and share the
    state of each part with the workers of other groups having that part. A worker with all parts is
    a group of its own, so workers of a stage may differ in tensor parallel degree.

    `units` are the module names of the unit calls in forward order, without the root unit; a unit
    called twice is listed twice. With several stages, `takes` and `root` are all that a stage needs
    from outside its units.
    """

    units: tuple[str, ...]
    workers: tuple[Worker, ...]
    tensor: int = Field(
        default=1,
        ge=1,
        description="parts into which units are divided: the largest tensor parallel degree",
    )
    sequence: bool = Field(
        default=False,
        description="sequence parallelism: whether each worker of a tensor-parallel group has a "
        "part of the positions of a sample where units are not divided",
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
    takes: tuple[StageInput, ...] = ()
    root: tuple[str, ...] | None = Field(
        default=None, description="parameters of the root that the stage uses; null: all"
    )

    @field_validator("takes")
    @classmethod
    def _in_the_order_of_calls(cls, takes: tuple[StageInput, ...]) -> tuple[StageInput, ...]:
        """Sort by call and output."""
        return tuple(sorted(takes, key=lambda taken: (taken.call, taken.output)))

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.workers:
            raise ValueError("a stage without devices: nobody computes its units")
        if not self.units:
            raise ValueError("a stage without units: there are more stages than units to compute")
        return self

    @model_validator(mode="after")
    def _nothing_twice(self) -> Self:
        refuse_duplicates("parameter of 'root'", self.root or ())
        refuse_duplicates(
            "entry of 'takes'", (f"call {t.call}, output {t.output}" for t in self.takes)
        )
        return self

    @model_validator(mode="after")
    def _whole_tp_groups(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "only workers of a tensor-parallel group divide the positions of a sample"
            )
        for tp_group in self.tp_groups:
            names = ", ".join(w.device for w in tp_group)
            parts = [w.parts for w in tp_group]
            if len(set(parts)) > 1 or sum(parts) != self.tensor:
                raise ValueError(
                    f"{'workers' if len(tp_group) > 1 else 'worker'} {names} cannot form a "
                    f"tensor-parallel group: their parts ({', '.join(map(str, parts))}) are to be "
                    f"alike and to add up to {self.tensor}, the stage's tensor parallel degree"
                )
            alike = {
                (w.samples, w.micro_batch, w.state_share, w.mode, w.kept_graphs, w.compute_dtype)
                for w in tp_group
            }
            if len(alike) > 1:
                raise ValueError(
                    f"the workers of a tensor-parallel group ({names}) must have the same samples, "
                    "micro-batch, state share, mode, kept graphs and dtype"
                )
            if len(tp_group) > 1 and any(w.compile for w in tp_group):
                raise ValueError("units that several workers compute together are not compiled")
        if self.tensor > 1 and len({w.mode.head for w in self.workers}) > 1:
            raise ValueError(
                "with tensor parallelism all workers of a stage use chunked cross-entropy, or none "
                "does: it does not divide the head"
            )
        if min(w.parts for w in self.workers) > 1:
            raise ValueError(
                f"a tensor parallel degree of {self.tensor} is more than any group has workers: "
                f"make it {max(len(tp_group) for tp_group in self.tp_groups)}"
            )
        return self

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(w.state_share for w in self.workers)

    @cached_property
    def tp_groups(self) -> tuple[tuple[Worker, ...], ...]:
        """Workers of each tensor-parallel group; single workers without tensor parallelism."""
        return tuple(self.workers[seats.start : seats.stop] for seats in self.seats)

    @cached_property
    def seats(self) -> Sequence[range]:
        """Worker indices of each tensor-parallel group."""
        if self.tensor == 1:
            return [range(n, n + 1) for n in range(len(self.workers))]
        found, first, parts = [], 0, 0
        for number, worker in enumerate(self.workers, 1):
            parts += worker.parts
            if parts >= self.tensor or number == len(self.workers):
                found.append(range(first, number))
                first, parts = number, 0
        return found

    @property
    def has_mixed_degrees(self) -> bool:
        """True if tensor-parallel groups differ in size."""
        return len({worker.parts for worker in self.workers}) > 1

    def get_tp_size(self, worker: Worker) -> int:
        """Return the size of a worker's tensor-parallel group."""
        return self.tensor // worker.parts

    def stored_by(self, worker: Worker) -> float:
        """Return the part of the stage's state stored by a worker."""
        return worker.state_share * worker.parts / self.tensor

    @property
    def leaders(self) -> tuple[Worker, ...]:
        """First worker of each tensor-parallel group, acting for the group."""
        if self.tensor == 1:
            return self.workers
        return tuple(self.workers[seats.start] for seats in self.seats)

    def micro_batches(self, waves: int) -> tuple[StageMicroBatch, ...]:
        """Return the micro-batches of the global batch in sample order: wave after wave, and worker
        after worker within a wave."""
        return tuple(
            StageMicroBatch(turn.seats, turn.wave, rows)
            for turn in self.turns(waves)
            for rows in self.rows_in(turn, waves)
        )

    def turns(self, waves: int) -> Iterator[WavePart]:
        """Yield the tensor-parallel groups computing the micro-batches, in micro-batch order."""
        first = row = 0
        for wave in range(waves):
            for seats in self.seats:
                sizes = self._sizes_in(wave, waves, seats)
                yield WavePart(seats, wave, first, row)
                first += len(sizes)
                row += sum(sizes)

    def rows_in(self, turn: WavePart, waves: int) -> list[range]:
        """Return the rows of each micro-batch of a turn."""
        sizes = self._sizes_in(turn.wave, waves, turn.seats)
        ends = list(accumulate(sizes, initial=turn.row))
        return [range(begin, end) for begin, end in pairwise(ends)]

    def _sizes_in(self, wave: int, waves: int, seats: range) -> tuple[int, ...]:
        """Return the samples in each micro-batch of a tensor-parallel group in a wave."""
        return self.workers[seats.start].divide_micro_batches(waves)[wave]


def pair_replicas(givers: Sequence[int], takers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (giver, taker) pairs for transfers between tensor-parallel groups with replicated data,
    each taker once."""
    return ((givers[number % len(givers)], taker) for number, taker in enumerate(takers))


def group_shared_names(roots: Sequence[Sequence[str]]) -> dict[tuple[int, ...], list[str]]:
    """Return the root names used by several stages, grouped by these stages."""
    users: dict[str, list[int]] = {}
    for stage, names in enumerate(roots):
        for name in names:
            users.setdefault(name, []).append(stage)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in users.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), []).append(name)
    return found
