"""What a window of a function showed: values that its process sends. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Order:
    """What a window's process is to do.

    Attributes:
        reference: the function, as module:function; its module is looked for in `folder`.
        changes: what to do otherwise; see `changing`.
        warm_up, steps: steps that do not count, and those that do; more of them if they take less
            than `least_s`.
        profiled: steps more whose kernels are added up; 0: nor is looked at each operation of the
            warm-up, which finds attention that is written out.
        threads: of torch, as a process of the user's own would have.
        debug: show the traceback of an error.
    """

    reference: str
    folder: str
    changes: Mapping[str, Any]
    warm_up: int
    steps: int
    least_s: float
    profiled: int
    threads: int
    debug: bool = False


@dataclass(frozen=True)
class Site:
    """A line of the user's that does something, in all counted steps.

    Attributes:
        place: file:line.
        what: it does, as it is written.
    """

    place: str
    what: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class LoaderSeen:
    """A DataLoader of the user's, or a loader of gpumix.

    Attributes:
        waited_s: that the loop waited for its batches in counted steps; `cpu_s` of it in which this
            process computed.
        begun: how often an iteration over it began then.
        samples: that it gave then.
        streams: its dataset is iterable, not one with numbers.
        tunes: it is of gpumix, and finds its workers itself; `limit`: what holds it back then.
    """

    place: str
    workers: int
    batch_size: int | None
    persistent: bool
    pinned: bool
    streams: bool
    waited_s: float
    cpu_s: float
    begun: int
    samples: int
    tunes: bool = False
    limit: str = ""


@dataclass(frozen=True)
class OptimizerSeen:
    """An optimizer that stepped. `seconds`: of the host, in counted steps."""

    place: str
    name: str
    fused: bool
    fusible: bool
    seconds: float


@dataclass(frozen=True)
class ModelSeen:
    """A module that is trained, and that no other module calls.

    Attributes:
        place: where it is called from.
        fp32: its parameters are fp32, and no autocast was on.
        eager_attention: it has a fused attention, and does not use it.
        compiled: it runs compiled code.
    """

    place: str
    name: str
    fp32: bool
    eager_attention: bool
    compiled: bool


@dataclass(frozen=True)
class Seen:
    """A window: some steps, and what was seen in them.

    Attributes:
        seconds: of these steps.
        losses: all, from the first step on; what `backward` was called of.
        cuda: whether there is a GPU, of this `capability` (0: none).
        between_s: of the host, in these steps, from a backward pass or an update to the next
            forward pass, without what is told of elsewhere here.
        copies: from memory that is not pinned to a GPU, which block.
        syncs: values that the host waits for, of a GPU.
        writes: to stdout and stderr.
        threads: of torch; `cores` that this process may use.
        set: lines that set what slows it down, by what they set.
        cpu_bf16: whether the CPU has instructions for bf16; `compiler`: there is one for C++.
        retries: of the allocator in these steps.
        kernels_s: of a step, in which the GPU computed; None: not measured.
        attention: lines that write it out; empty where that was not looked for.
        memory_share: of the device's memory, that was needed at the most.
    """

    steps: int
    seconds: float
    losses: tuple[float, ...]
    cuda: bool = False
    capability: int = 0
    loaders: tuple[LoaderSeen, ...] = ()
    optimizers: tuple[OptimizerSeen, ...] = ()
    models: tuple[ModelSeen, ...] = ()
    between_s: float = 0.0
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
    memory_share: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def samples(self) -> float:
        """Of a step; 0: not known."""
        return sum(one.samples for one in self.loaders) / self.steps

    @property
    def input_share(self) -> float:
        """Of a step, in which it waits for its data."""
        return sum(one.waited_s for one in self.loaders) / self.seconds

    @property
    def limit(self) -> str:
        """What holds the loader back that is waited for longest; empty: not known."""
        return max(self.loaders, key=lambda one: one.waited_s).limit if self.loaders else ""

    def share_of(self, seconds: float) -> float:
        """Of all counted steps."""
        return seconds / self.seconds
