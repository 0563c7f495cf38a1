"""Observation inside the ranks of a job's window, and changes of user code there. Settings of the
job are changed from outside."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gpumix.doctor.function.observations import OperationCounts, Site
from gpumix.schema.files import open_log

CODE_CHANGES = ("late_values", "quiet", "expandable_segments")
"""Changes of code or environment in ranks, in contrast to job settings."""


@dataclass(frozen=True)
class RankObservations:
    """Observations of the first rank in counted steps.

    Attributes:
        syncs: reads of GPU values making the host wait; `writes`: to stdout and stderr. Both only
            in lines of user code.
        attention: lines with unfused attention; `operations` of a step, None: not counted.
            `kernels_s`: GPU compute time per step; None: unknown. All from an inspected step.
    """

    syncs: tuple[Site, ...] = ()
    writes: tuple[Site, ...] = ()
    attention: tuple[str, ...] = ()
    operations: OperationCounts | None = None
    kernels_s: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> RankObservations:
        return TypeAdapter(cls).validate_python(told)


@dataclass
class RankWatch:
    """An implementation of `train.monitor.trial_hook.TrialObserver`.

    Attributes:
        changes: of `CODE_CHANGES`.
        log: file for printed output, kept out of the report.
        gpu: whether ranks have GPUs.
        looks: whether to inspect an additional step.
        operations: whether to inspect the operations of that step.
    """

    changes: Mapping[str, Any]
    log: Path
    gpu: bool
    looks: bool = False
    operations: bool = True
    _told: dict[str, Any] = field(default_factory=dict)
    _patches: Any = None
    _lines: Any = None

    def __enter__(self) -> RankWatch:
        from gpumix.doctor.function.changing import apply_changes
        from gpumix.doctor.function.patches import Patches
        from gpumix.doctor.function.watching.lines import WaitingLines

        self._patches, self._lines = Patches(), WaitingLines()
        log = self._patches.enter_context(open_log(self.log))
        self._patches.replace(sys, "stdout", lambda _: log)
        apply_changes(self.changes, self._patches)
        self._lines.install(self._patches, gpu=self.gpu)
        self._told = {"attention": [], "operations": None, "kernels_s": None}
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def begins(self) -> None:
        self._lines.begin()

    def ends(self) -> None:
        lines = self._lines
        self._told |= {
            "syncs": _keep_user_sites(lines.syncs.seen()),
            "writes": _keep_user_sites(lines.writes.seen()),
        }

    @contextmanager
    def looking(self) -> Iterator[None]:
        from gpumix.doctor.function.watching.attention import UnfusedAttentionFinder
        from gpumix.doctor.function.watching.kernels import KernelProfile
        from gpumix.doctor.function.watching.loops import OperationCounter
        from gpumix.doctor.function.watching.operations import OperationInspector

        kernels, attention, counter = KernelProfile(), UnfusedAttentionFinder(), OperationCounter()
        inspector = OperationInspector(attention, counter)
        kernels.begin()
        if self.operations:
            inspector.begin()
        try:
            yield
        finally:
            counter.next_step()
            inspector.end()
            self._told |= {
                "attention": attention.places,
                "operations": None if counter.last is None else asdict(counter.last),
                "kernels_s": kernels.seconds(),
            }

    def told(self) -> dict[str, Any]:
        return self._told


def _keep_user_sites(sites: Sequence[Site]) -> list[dict[str, Any]]:
    from gpumix.doctor.function.patches import LIBRARY_LINE

    return [asdict(site) for site in sites if site.place != LIBRARY_LINE]
