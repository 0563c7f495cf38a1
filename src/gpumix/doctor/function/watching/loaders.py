"""Waits of a function for its data, by the line making each loader."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpumix.data.loader import Loader
from gpumix.data.workers.autotune import MEASURED_STEPS
from gpumix.doctor.function.observations import LoaderObservation
from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_user_line


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


class LoaderWatch:
    """The waits for loaders, none of which is kept alive."""

    def __init__(self) -> None:
        self._loaders: dict[str, _LoaderRecord] = {}

    def install(self, patches: Patches) -> None:
        for kind in (DataLoader, Loader):
            patches.replace(kind, "__init__", self._making)
        patches.replace(DataLoader, "_get_iterator", self._beginning)
        patches.replace(_BaseDataLoaderIter, "__next__", partial(self._fetching, _get_record))
        patches.replace(Loader, "__next__", partial(self._fetching, self._of_gpumix))

    def begin(self) -> None:
        """Restart counting."""
        for loader in self._loaders.values():
            loader.forget()

    def settled(self) -> bool:
        """Return whether step times have settled with respect to data. Call once per step, since
        each loader counts the calls."""
        found = [one.ahead.settled() for one in self._loaders.values() if one.ahead is not None]
        return all(found)

    @property
    def waited_s(self) -> float:
        return sum(one.waited_s for one in self._loaders.values())

    def seen(self) -> tuple[LoaderObservation, ...]:
        return tuple(one.seen() for one in self._loaders.values() if one.samples)

    # -- patched functions -------------------------------------------------------------------------

    def _making(self, before: Any) -> Any:
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
            batch = None
            try:
                batch = before(source)
                return batch
            finally:  # the end of an epoch, too, which waits for its workers to end
                waited_s = time.perf_counter() - begun_s
                cpu_s = time.thread_time() - begun_cpu_s
                if (known := known_of(source)) is not None:
                    known.fetched(batch, waited_s, cpu_s)

        return fetch


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
