"""Observation of a function's steps: waits, recomputation and settings. Patches run in every
window, with and without a change, at equal cost."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

from gpumix.doctor.function.observations import Observations
from gpumix.doctor.function.patches import Patches, find_user_line
from gpumix.doctor.function.watching.between import HostGapTimer
from gpumix.doctor.function.watching.lines import SiteCounts, WaitingLines
from gpumix.doctor.function.watching.loaders import LoaderWatch
from gpumix.doctor.function.watching.optimizers import OptimizerWatch
from gpumix.doctor.function.watching.roots import RootModules
from gpumix.doctor.function.watching.sampling import LineSampler
from gpumix.doctor.function.watching.steps import StepCounter
from gpumix.hardware import runtime
from gpumix.hardware.host.cpu import count_cores, has_bf16
from gpumix.hardware.host.environment import has_cpp_compiler, host_memory_bytes
from gpumix.hardware.host.resident_memory import read_peak_bytes

# Process-wide settings, and the torch function setting each.
SETTERS = {
    "threads": "set_num_threads",
    "deterministic": "use_deterministic_algorithms",
    "anomaly": "set_anomaly_enabled",
    "default_dtype": "set_default_dtype",
}


@dataclass
class FunctionWatch:
    """All observations from `begin` to `end`.

    Attributes:
        samples: whether to sample the lines of work between steps.
    """

    roots: RootModules
    lines: WaitingLines = field(default_factory=WaitingLines)
    losses: list[Tensor] = field(default_factory=list)
    copies: SiteCounts = field(default_factory=SiteCounts)
    recomputed: SiteCounts = field(default_factory=SiteCounts)
    loaders: LoaderWatch = field(default_factory=LoaderWatch)
    optimizers: OptimizerWatch = field(default_factory=OptimizerWatch)
    samples: bool = False
    _set: dict[str, str] = field(default_factory=dict)
    _retries: int = 0

    def __post_init__(self) -> None:
        self._between = HostGapTimer(self._told_s)
        watching = (FunctionWatch, LoaderWatch, OptimizerWatch, WaitingLines)
        self._sampler = LineSampler(self._between.get_interval, map(inspect.getfile, watching))

    def _told_s(self) -> float:
        """Return the seconds so far attributed to loaders, to making optimizers, and to lines of
        user code."""
        sites = (self.copies, self.lines.syncs, self.lines.writes)
        lines_s = sum(seconds for found in sites for _, seconds in found.values())
        return self.loaders.waited_s + self.optimizers.making_s + lines_s

    def install(self, patches: Patches, *, gpu: bool) -> None:
        """Install the patches; with `gpu`, copies to and from the GPU are watched too."""
        self.loaders.install(patches)
        self.optimizers.install(patches)
        self.roots.on_forward = self._between.end
        patches.replace(Tensor, "backward", self._backward)
        patches.replace_everywhere(checkpoint, "checkpoint", self._recomputing)
        for what, name in SETTERS.items():
            patches.replace(torch, name, self._setting(what))
        self.lines.install(patches, gpu=gpu)
        patches.callback(self._sampler.end)
        hook = register_optimizer_step_pre_hook(self._stepping)
        patches.callback(hook.remove)
        if gpu:
            for name in ("to", "cuda"):
                patches.replace(Tensor, name, self._copying)

    def begin(self) -> None:
        """Restart counting."""
        for one in (self.loaders, self.optimizers, self.lines):
            one.begin()
        for sites in (self.copies, self.recomputed):
            sites.clear()
        self._between.forget()
        self._retries = _retries()
        if self.samples:
            self._sampler.begin()

    def end(self, steps: StepCounter) -> Observations:
        """Return the observations; lines come first, because reading losses adds syncs."""
        self._sampler.end()
        watched = (self.copies, self.lines.syncs, self.lines.writes, self.recomputed)
        copies, syncs, writes, recomputed = [sites.seen() for sites in watched]
        cuda = runtime.is_initialized()
        capability = runtime.capability()[0] if cuda else 0
        return Observations(
            steps=steps.counted,
            seconds=steps.seconds,
            losses=tuple(loss.float().item() for loss in self.losses),
            cuda=cuda,
            capability=capability,
            loaders=self.loaders.seen(),
            between_s=self._between.seconds,
            between=self._sampler.seen(self._between.seconds),
            optimizers=self.optimizers.seen(),
            models=self.roots.seen(),
            copies=copies,
            syncs=syncs,
            writes=writes,
            recomputed=recomputed,
            threads=torch.get_num_threads(),
            cores=count_cores(),
            tf32=torch.backends.cuda.matmul.allow_tf32,
            cpu_bf16=has_bf16(),
            compiler=has_cpp_compiler(),
            anomaly=torch.is_anomaly_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            set=dict(self._set),
            retries=_retries() - self._retries,
            memory_share=_memory_share(cuda),
        )

    # -- patched functions -------------------------------------------------------------------------

    def _backward(self, before: Any) -> Any:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1:
                self.losses.append(loss.detach())
            before(loss, *args, **kwargs)
            self._between.begin()

        return backward

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        self.optimizers.stepping(optimizer)
        self._between.drop()

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Record an optimizer's step, in a hook of torch running before the step counter's hook."""
        self.optimizers.stepped(optimizer)
        self._between.begin()

    def _recomputing(self, before: Any) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            self.recomputed.add("checkpoint", 0.0)
            return before(*args, **kwargs)

        return compute

    def _setting(self, what: str) -> Callable[[Any], Any]:
        def setting(before: Any) -> Any:
            def to(*args: Any, **kwargs: Any) -> Any:
                self._set[what] = find_user_line()
                return before(*args, **kwargs)

            return to

        return setting

    def _copying(self, before: Any) -> Any:
        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            begun_s = time.perf_counter()
            result: Tensor = before(tensor, *args, **kwargs)
            foreign = self.lines.foreign
            if foreign(result) and not foreign(tensor) and not _pinned(tensor):
                self.copies.add("copy to the GPU", time.perf_counter() - begun_s)
            elif foreign(tensor) and not foreign(result):
                self.lines.syncs.add("to", time.perf_counter() - begun_s)
            return result

        return copied


def _pinned(tensor: Tensor) -> bool:
    return runtime.is_available() and tensor.is_pinned()


def _retries() -> int:
    if not runtime.is_initialized():
        return 0
    return runtime.allocator_retries()


def _memory_share(cuda: bool) -> float:
    if cuda:
        return runtime.peak_allocated_bytes() / runtime.free_and_total_bytes()[1]
    return read_peak_bytes() / host_memory_bytes()
