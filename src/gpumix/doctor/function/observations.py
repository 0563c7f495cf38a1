"""Observations of a function's window, as plain values sent by its process. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WindowLength:
    """Length of a window, in steps of the function's optimizer.

    Attributes:
        warm_up, steps: uncounted and counted steps.
        profiled: additional steps with profiled kernels.
        least_s: minimal seconds of counted steps; short steps run more often.
    """

    warm_up: int
    steps: int
    profiled: int = 0
    least_s: float = 0.0


@dataclass(frozen=True)
class WindowRequest:
    """Instructions for a window's process.

    Attributes:
        reference: the function, as module:function; its module is searched in `folder`.
        changes: to apply; see `changing`.
        length: of the window; without profiled steps, operations of the warm-up are not inspected
            either.
        threads: torch's threads, as in a process started by the user.
        debug: whether to show tracebacks.
    """

    reference: str
    folder: str
    changes: Mapping[str, Any]
    length: WindowLength
    threads: int
    debug: bool = False


@dataclass(frozen=True)
class Site:
    """A line of user code with a notable operation, over all counted steps.

    Attributes:
        place: file:line.
        what: operation, as written in code.
    """

    place: str
    what: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class RepeatedLine:
    """A line of user code whose operations are repeated with the same parameters, as by a loop over
    positions.

    Attributes:
        operations: per step, in forward passes.
        repeats: largest number of executions in one loop.
    """

    place: str
    operations: int
    repeats: int


@dataclass(frozen=True)
class OperationCounts:
    """Operations of one step.

    Attributes:
        total: including backward passes and updates; `forward`: others.
        lines: most operations first.
    """

    total: int
    forward: int
    lines: tuple[RepeatedLine, ...]


@dataclass(frozen=True)
class LoaderObservation:
    """A DataLoader of the user's, or a loader of gpumix, in the counted steps.

    Attributes:
        waited_s: time waiting for batches; `cpu_s` of it computed in this process.
        begun: number of iterations started.
        samples: number of samples loaded.
        streams: whether the dataset is iterable, without indices.
        tunes: whether it is gpumix's loader, tuning its workers itself; `limit` is its bottleneck.
    """

    place: str
    workers: int
    batch_size: int | None
    persistent: bool
    streams: bool
    waited_s: float
    cpu_s: float
    begun: int
    samples: int
    tunes: bool = False
    limit: str = ""


@dataclass(frozen=True)
class OptimizerObservation:
    """The optimizers made by one line and used in counted steps.

    Attributes:
        seconds: host time of updates and of making optimizers.
        remade: number of optimizers made for the parameters of an earlier one.
    """

    place: str
    name: str
    fused: bool
    fusible: bool
    seconds: float
    remade: int = 0


@dataclass(frozen=True)
class ModelObservation:
    """A root module in training, called by no other module.

    Attributes:
        place: line of the call.
        fp32: parameters are fp32, without autocast; `fp64`: some are fp64.
        eager_attention: fused attention is available but unused.
        compiled: runs compiled code.
    """

    place: str
    name: str
    fp32: bool
    eager_attention: bool
    compiled: bool
    fp64: bool = False


@dataclass(frozen=True)
class Observations:
    """Observations of a window's steps.

    Attributes:
        seconds: of the counted steps.
        losses: all tensors with a call of `backward`, from the first step on.
        cuda: whether a GPU is in use, of compute capability `capability` (0: none).
        between_s: host time in counted steps from a backward pass or an update to the next forward
            pass, without time listed elsewhere in this class; `between`: its lines, with their
            code and samples as calls, most seconds first; empty if not sampled.
        copies: blocking copies to a GPU from unpinned memory.
        syncs: reads of GPU values making the host wait.
        writes: to stdout and stderr.
        threads: of torch; `cores` are available to this process.
        set: lines setting a slow option, by option.
        cpu_bf16: whether the CPU has bf16 instructions; `compiler`: whether a C++ compiler exists.
        retries: of the allocator in counted steps.
        kernels_s: GPU compute time per step; None: not measured.
        attention: lines with unfused attention; empty if not searched.
        operations: of one step; None: not counted.
        memory_share: peak part of the device's memory in use.
    """

    steps: int
    seconds: float
    losses: tuple[float, ...]
    cuda: bool = False
    capability: int = 0
    loaders: tuple[LoaderObservation, ...] = ()
    optimizers: tuple[OptimizerObservation, ...] = ()
    models: tuple[ModelObservation, ...] = ()
    between_s: float = 0.0
    between: tuple[Site, ...] = ()
    copies: tuple[Site, ...] = ()
    syncs: tuple[Site, ...] = ()
    writes: tuple[Site, ...] = ()
    recomputed: tuple[Site, ...] = ()
    threads: int = 1
    cores: float = 1.0
    tf32: bool = False
    cpu_bf16: bool = False
    compiler: bool = False
    anomaly: bool = False
    deterministic: bool = False
    set: Mapping[str, str] = field(default_factory=dict)
    retries: int = 0
    kernels_s: float | None = None
    attention: tuple[str, ...] = ()
    operations: OperationCounts | None = None
    memory_share: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def samples(self) -> float:
        """Samples per step; 0: unknown."""
        return sum(one.samples for one in self.loaders) / self.steps

    @property
    def input_share(self) -> float:
        """Part of a step spent waiting for data."""
        return sum(one.waited_s for one in self.loaders) / self.seconds

    @property
    def limit(self) -> str:
        """Bottleneck of the loader with the longest wait; empty: unknown."""
        return max(self.loaders, key=lambda one: one.waited_s).limit if self.loaders else ""

    def share_of(self, seconds: float) -> float:
        """Return `seconds` as part of all counted steps."""
        return seconds / self.seconds
