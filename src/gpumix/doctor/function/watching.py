"""Observation of a function's steps: waits, recomputation and settings. Patches run in every
window, with and without a change, at equal cost."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpumix.data.loader import Loader
from gpumix.data.workers.autotune import MEASURED_STEPS
from gpumix.doctor.function.between import HostGapTimer
from gpumix.doctor.function.lines import SiteCounts, WaitingLines
from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_user_line
from gpumix.doctor.function.roots import RootModules
from gpumix.doctor.function.seen import LoaderObservation, Observations, OptimizerObservation
from gpumix.doctor.function.steps import StepCounter
from gpumix.hardware import runtime
from gpumix.hardware.host.cpu import count_cores, has_bf16
from gpumix.hardware.host.environment import has_cpp_compiler, host_memory_bytes

FUSIBLE = (Adam, AdamW, SGD, Adagrad)
UNFUSIBLE = ("differentiable", "capturable", "foreach")  # options incompatible with `fused`
# Process-wide settings, and the torch function setting each.
SETTERS = {
    "threads": "set_num_threads",
    "deterministic": "use_deterministic_algorithms",
    "anomaly": "set_anomaly_enabled",
}


class _PrefetchState:
    """Batches prefetched by workers, step after step.

    Args:
        ready: returns the number of ready batches; None: unknown.
        most: capacity.
        settling: steps for the workers' own tuning.
    """

    def __init__(self, ready: Callable[[], int | None], most: int, settling: int = 0) -> None:
        self._ready, self.most, self._settling = ready, most, settling
        self._counts: deque[int] = deque(maxlen=most + 1)

    def settled(self) -> bool:
        """Return whether the next steps no longer consume batches prefetched earlier: none is
        ready, or no fewer than at the oldest recorded step."""
        if (count := self._ready()) is None:
            return True
        self._counts.append(count)
        self._settling -= 1
        full = len(self._counts) == self._counts.maxlen
        return self._settling < 0 and (count == 0 or (full and count >= self._counts[0]))


def _get_prefetch_state(iterator: Any) -> _PrefetchState:
    """Return the prefetch state of a DataLoader's iterator, without keeping it alive."""
    kept = ref(iterator)

    def ready() -> int | None:
        if (iterator := kept()) is None:
            return None
        queues = {iterator._data_queue, iterator._worker_result_queue}
        # Out-of-order batches are buffered outside of the queues.
        beside = sum(len(told) > 1 for told in list(iterator._task_info.values()))
        try:
            return beside + sum(queue.qsize() for queue in queues)
        except NotImplementedError:  # on macOS
            return None

    return _PrefetchState(ready, iterator._num_workers * (iterator._prefetch_factor or 0))


def _get_gpumix_prefetch_state(loader: Loader) -> _PrefetchState:
    """Return the prefetch state of a gpumix loader, with its current setting."""
    kept = ref(loader)

    def ready() -> int | None:
        return None if (loader := kept()) is None else loader.ready

    return _PrefetchState(ready, loader.setting.ahead, settling=MEASURED_STEPS)


@dataclass
class _LoaderRecord:
    """All loaders created by one line, with the settings of the last."""

    place: str
    made: Mapping[str, Any] = field(default_factory=dict)
    ahead: _PrefetchState | None = None
    waited_s: float = 0.0
    cpu_s: float = 0.0
    begun: int = 0
    samples: int = 0

    def forget(self) -> None:
        self.waited_s = self.cpu_s = 0.0
        self.begun = self.samples = 0

    def begin(self, loader: Any) -> None:
        self.begun += 1
        self.made = {
            "workers": loader.num_workers,
            "batch_size": loader.batch_size,
            "persistent": loader.persistent_workers,
            "pinned": loader.pin_memory,
            "streams": isinstance(loader.dataset, IterableDataset),
        }

    def goes_on(self, loader: Loader) -> None:
        """Update from a gpumix loader, whose setting may have changed."""
        if self.ahead is None or self.ahead.most != loader.setting.ahead:
            self.ahead = _get_gpumix_prefetch_state(loader)
        self.made = {
            "workers": loader.setting.workers,
            "batch_size": None,
            "persistent": True,
            "pinned": True,
            "streams": False,
            "tunes": True,
            "limit": loader.limit,
        }

    def fetched(self, batch: Any, waited_s: float, cpu_s: float) -> None:
        """Record a batch; waits count only in the function's own thread."""
        self.samples += get_batch_size(batch)
        if _in_main_thread():
            self.waited_s += waited_s
            self.cpu_s += cpu_s

    def seen(self) -> LoaderObservation:
        return LoaderObservation(
            place=self.place,
            **self.made,
            waited_s=self.waited_s,
            cpu_s=self.cpu_s,
            begun=self.begun,
            samples=self.samples,
        )


@dataclass
class _Optimizer:
    place: str
    seconds: float = 0.0

    def seen(self, one: Optimizer) -> OptimizerObservation:
        settings = one.defaults
        other = any(settings.get(key) for key in UNFUSIBLE)
        return OptimizerObservation(
            place=self.place,
            name=type(one).__name__,
            fused=bool(settings.get("fused")),
            fusible=isinstance(one, FUSIBLE) and not other,
            seconds=self.seconds,
        )


@dataclass
class FunctionWatch:
    """All observations from `begin` to `end`."""

    roots: RootModules
    lines: WaitingLines = field(default_factory=WaitingLines)
    losses: list[Tensor] = field(default_factory=list)
    copies: SiteCounts = field(default_factory=SiteCounts)
    recomputed: SiteCounts = field(default_factory=SiteCounts)
    # Loaders and optimizers are not kept alive by these fields.
    _loaders: dict[str, _LoaderRecord] = field(default_factory=dict)
    _optimizers: WeakKeyDictionary[Optimizer, _Optimizer] = field(default_factory=WeakKeyDictionary)
    _set: dict[str, str] = field(default_factory=dict)
    _retries: int = 0

    def __post_init__(self) -> None:
        self._between = HostGapTimer(self._told_s)

    def _told_s(self) -> float:
        """Return the seconds so far attributed to loaders and to lines of user code."""
        sites = (self.copies, self.lines.syncs, self.lines.writes)
        waited_s = sum(one.waited_s for one in self._loaders.values())
        return waited_s + sum(seconds for found in sites for _, seconds in found.values())

    def install(self, patches: Patches, *, gpu: bool) -> None:
        """Install the patches; with `gpu`, copies to and from the GPU are watched too."""
        for kind in (DataLoader, Loader):
            patches.replace(kind, "__init__", self._making_loader)
        patches.replace(DataLoader, "_get_iterator", self._beginning)
        patches.replace(_BaseDataLoaderIter, "__next__", partial(self._fetching, _get_record))
        patches.replace(Loader, "__next__", partial(self._fetching, self._of_gpumix))
        self.roots.on_forward = self._between.end
        patches.replace(Tensor, "backward", self._backward)
        patches.replace(Optimizer, "__init__", self._making_optimizer)
        patches.replace_everywhere(checkpoint, "checkpoint", self._recomputing)
        for what, name in SETTERS.items():
            patches.replace(torch, name, self._setting(what))
        self.lines.install(patches, gpu=gpu)
        hook = register_optimizer_step_pre_hook(self._stepping)
        patches.callback(hook.remove)
        if gpu:
            for name in ("to", "cuda"):
                patches.replace(Tensor, name, self._copying)

    def begin(self) -> None:
        """Restart counting."""
        for loader in self._loaders.values():
            loader.forget()
        for optimizer in self._optimizers.values():
            optimizer.seconds = 0.0
        self.lines.begin()
        for sites in (self.copies, self.recomputed):
            sites.clear()
        self._between.forget()
        self._retries = _retries()

    def settled(self) -> bool:
        """Return whether step times have settled with respect to data. Call once per step, since
        each loader counts the calls."""
        found = [one.ahead.settled() for one in self._loaders.values() if one.ahead is not None]
        return all(found)

    def end(self, steps: StepCounter) -> Observations:
        """Return the observations; lines come first, because reading losses adds syncs."""
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
            loaders=tuple(one.seen() for one in self._loaders.values() if one.samples),
            between_s=self._between.seconds,
            optimizers=tuple(one.seen(o) for o, one in self._optimizers.items() if one.seconds),
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

    def _making_loader(self, before: Any) -> Any:
        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            before(loader, *args, **kwargs)
            loader._gpumix_place = find_user_line()

        return made

    def _beginning(self, before: Any) -> Any:
        """Watch the creation of an iterator, which starts workers."""

        def begin(loader: Any) -> Any:
            begun_s = time.perf_counter()
            iterator = before(loader)
            known = self._known(loader)
            known.begin(loader)
            if _in_main_thread():
                known.waited_s += time.perf_counter() - begun_s
            iterator._gpumix_loader = known
            known.ahead = _get_prefetch_state(iterator) if loader.num_workers else None
            return iterator

        return begin

    def _known(self, loader: Any) -> _LoaderRecord:
        place = getattr(loader, "_gpumix_place", LIBRARY_LINE)
        return self._loaders.setdefault(place, _LoaderRecord(place))

    def _of_gpumix(self, loader: Loader) -> _LoaderRecord:
        known = self._known(loader)
        known.goes_on(loader)
        return known

    def _fetching(self, known_of: Callable[[Any], _LoaderRecord | None], before: Any) -> Any:
        """Watch fetching of a batch, with the loader found by `known_of`."""

        def fetch(source: Any) -> Any:
            begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
            batch = before(source)
            waited_s = time.perf_counter() - begun_s
            cpu_s = time.thread_time() - begun_cpu_s
            if (known := known_of(source)) is not None:
                known.fetched(batch, waited_s, cpu_s)
            return batch

        return fetch

    def _backward(self, before: Any) -> Any:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1:
                self.losses.append(loss.detach())
            before(loss, *args, **kwargs)
            self._between.begin()

        return backward

    def _making_optimizer(self, before: Any) -> Any:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._optimizers[optimizer] = _Optimizer(find_user_line())
            before(optimizer, *args, **kwargs)

        return made

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        known = self._optimizers.setdefault(optimizer, _Optimizer(LIBRARY_LINE))
        known.seconds -= time.perf_counter()
        self._between.drop()

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Record an optimizer's step, in a hook of torch running before the step counter's hook."""
        self._optimizers[optimizer].seconds += time.perf_counter()
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


def _get_record(iterator: Any) -> _LoaderRecord | None:
    """Return the loader of a DataLoader's iterator; None if its creation was not seen."""
    known: _LoaderRecord | None = getattr(iterator, "_gpumix_loader", None)
    return known


def get_batch_size(batch: Any) -> int:
    """Return the batch size of the first tensor found in a batch; 0 without a tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() else 1
    inner: Iterable[Any] = ()
    if hasattr(batch, "values"):
        inner = batch.values()
    elif isinstance(batch, list | tuple):
        inner = batch
    return next((rows for one in inner if (rows := get_batch_size(one))), 0)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _pinned(tensor: Tensor) -> bool:
    return runtime.is_available() and tensor.is_pinned()


def _retries() -> int:
    if not runtime.is_initialized():
        return 0
    return runtime.allocator_retries()


def _memory_share(cuda: bool) -> float:
    if cuda:
        return runtime.peak_allocated_bytes() / runtime.free_and_total_bytes()[1]
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / host_memory_bytes()
