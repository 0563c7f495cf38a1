"""What a tracker is, and what it is told of: the run, numbers and events.

The protocol that all of this package meet at; nothing here knows a tracker's library, or torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from gpumix.spec.job import Job
from gpumix.spec.plan import Plan

PACKAGES = ("gpumix", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Series:
    """One curve: `what` is measured, of `of` where there are several, in one of the groups that
    docs/trackers.md lists."""

    group: str
    what: str
    of: str = ""

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.group, self.of, self.what)))


@dataclass(frozen=True)
class Numbers:
    """What was measured up to the end of a step, at a time (`time.time()`)."""

    step: int
    time_s: float
    values: Mapping[Series, float]

    def by_name(self) -> dict[str, float]:
        return {series.name: value for series, value in self.values.items()}


@dataclass(frozen=True)
class Event:
    """Something that happened after a step: its kind, and what is to be said of it."""

    step: int
    time_s: float
    kind: str
    text: str

    @property
    def series(self) -> Series:
        """A curve that has a point, a 1, wherever this happened: it shows beside others."""
        return Series("event", self.kind)


@dataclass(frozen=True)
class Run:
    """A run, as it is told to a tracker.

    `id` is that of the tracker's own, where the run goes on in it; None where it begins there.
    `done` is the last step that the tracker was told of.
    """

    job: Job
    plan: Plan
    id: str | None = None
    done: int = 0

    @property
    def folder(self) -> Path:
        return self.job.output

    @property
    def name(self) -> str:
        """What it is called where the job does not say: its folder."""
        return self.folder.name or "run"

    def config(self) -> dict[str, Any]:
        """The resolved job, what the plan is, and what it runs with. Not where trackers are: their
        addresses may hold a password."""
        return {
            "job": self.job.model_dump(mode="json", exclude={"trackers"}),
            "plan": plan_in_short(self.plan),
            "versions": versions(),
        }

    def flat_config(self) -> dict[str, Any]:
        """The same by dotted keys, for trackers that know no mappings."""
        return dict(_flat(self.config()))


class Tracker(Protocol):
    """One tracker. All is called by one thread, `prepare` first, and what it raises leaves the
    tracker out; the run goes on."""

    def prepare(self) -> None:
        """Before anything is measured or planned: import the library, take what it needs.

        Raises:
            GpumixError: it is clear already that the tracker cannot be told.
        """
        ...

    def begin(self, run: Run) -> str:
        """The first step is done. Returns the id by which the tracker goes on with this run."""
        ...

    def numbers(self, numbers: Numbers) -> None:
        """Of later steps than before, or more of the same step."""
        ...

    def event(self, event: Event) -> None: ...

    def flush(self) -> None:
        """All that is there for now was told."""
        ...

    def end(self, state: str) -> None:
        """The run has "finished", "failed", or was "interrupted"."""
        ...

    @property
    def where(self) -> str:
        """Where it can be seen, as a command or an address; after `begin`."""
        ...


def plan_in_short(plan: Plan) -> dict[str, Any]:
    """Who computes and stores what, and what was promised of it."""
    expected = plan.prediction
    return {
        "strategy": plan.strategy,
        "emulated": plan.emulated,
        "stages": len(plan.stages),
        "zero_stage": plan.zero_stage,
        "global_batch": plan.global_batch,
        "sequence_length": plan.sequence_length,
        "predicted_step_s": expected.step_s if expected is not None else None,
        "predicted_tokens_per_s": expected.tokens_per_s if expected is not None else None,
        "workers": [
            {
                "device": worker.device,
                "class": worker.device_class,
                "host": worker.host,
                "samples": worker.samples,
                "micro_batch": worker.micro_batch,
                "state_share": worker.state_share,
            }
            for worker in plan.workers
        ],
    }


def without_secrets(address: str) -> str:
    """An address as it may be shown: without user, password and query."""
    return re.sub(r"//[^/@]*@", "//", address.partition("?")[0])


def versions() -> dict[str, str]:
    """Of Python, and of those packages that are here; none is imported."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{above}.{key}" if above else str(key))
    else:
        yield above, value
