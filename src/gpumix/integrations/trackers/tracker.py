"""Protocol of trackers, and the values reported: the run, numbers and events.

Common to this package; nothing here imports a tracker's library, or torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_manifest import get_versions

PACKAGES = ("gpumix", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Series:
    """A curve of `what`, measured of `of` (empty for a single one), in a group listed in
    docs/trackers.md."""

    group: str
    what: str
    of: str = ""

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.group, self.of, self.what)))


@dataclass(frozen=True)
class Numbers:
    """Measurements up to the end of a step, at a time (`time.time()`)."""

    step: int
    time_s: float
    values: Mapping[Series, float]

    def by_name(self) -> dict[str, float]:
        return {series.name: value for series, value in self.values.items()}


@dataclass(frozen=True)
class TrackedEvent:
    """An event after a step, with its kind and a text."""

    step: int
    time_s: float
    kind: str
    text: str

    @property
    def series(self) -> Series:
        """A curve with a point of 1 at each event of this kind, to show next to other curves."""
        return Series("event", self.kind)


@dataclass(frozen=True)
class TrackedRun:
    """A run as reported to a tracker.

    `id` is the tracker's own id of a run to resume; None for a new run. `done` is the last step
    reported to the tracker.
    """

    job: Job
    plan: Plan
    id: str | None = None
    done: int = 0

    @property
    def name(self) -> str:
        """The run's default name: its folder's."""
        return self.job.output_dir.name or "run"

    def config(self) -> dict[str, Any]:
        """Return the resolved job, a summary of the plan, and versions; without settings of
        trackers, with addresses that may contain a password."""
        return {
            "job": self.job.model_dump(mode="json", exclude={"report_to"}),
            "plan": summarize_plan(self.plan),
            "versions": {"python": platform.python_version(), **get_versions(PACKAGES)},
        }

    def flat_config(self) -> dict[str, Any]:
        """Return the config by dotted keys, for trackers without nested mappings."""
        return dict(_flatten(self.config()))


class Tracker(Protocol):
    """Interface of a tracker. A single thread makes all calls, `prepare` first; after an error the
    run continues without the tracker."""

    def prepare(self) -> None:
        """Import the library and get resources, before measuring and planning.

        Raises:
            GpumixError: the tracker certainly cannot work.
        """
        ...

    def begin(self, run: TrackedRun) -> str:
        """Begin after the first step. Return the tracker's id for resuming this run."""
        ...

    def numbers(self, numbers: Numbers) -> None:
        """Report numbers of a later step, or more of the current step."""
        ...

    def event(self, event: TrackedEvent) -> None: ...

    def flush(self) -> None:
        """Flush the values reported so far; by default the library has them already."""
        return

    def end(self, state: str) -> None:
        """End the run: it has "finished", "failed", or was "interrupted"."""
        ...

    @property
    def where(self) -> str:
        """Command or address to view the run; after `begin`."""
        ...


def summarize_plan(plan: Plan) -> dict[str, Any]:
    """Summarize a plan: work and storage of each worker, and the predictions."""
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


def strip_secrets(address: str) -> str:
    """Return an address fit to show: without user, password and query."""
    return re.sub(r"//[^/@]*@", "//", address.partition("?")[0])


def _flatten(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{above}.{key}" if above else str(key))
    else:
        yield above, value
