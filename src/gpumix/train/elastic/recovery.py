"""Recovery after the loss of a rank: whether the run restarts, and with which devices.

Pure: ranks are ended and started elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from gpumix.hardware.estimates.what_if import drop_devices, scale_memory, with_slower
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import (
    DeviceFailure,
    GpumixError,
    OutOfMemory,
    PlanOutdated,
    RankInterrupted,
    TrainingError,
    convert_error,
)
from gpumix.schema.plan.plan import Plan, WorkerPrediction
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import format_count
from gpumix.train.elastic.plan_change import PlanParts, describe_device_changes, diff_plan_parts

# A device losing its rank this often in a row, without a step between, is left out. A restart some
# steps later tries it once more, and leaves it out if its rank is lost at once.
BLAMED_TIMES = 2
# Factors on a class's plannable memory after it ran out: of its limit, of the predicted peak.
LESS_MEMORY = 0.92
BELOW_PEAK = 0.97


@dataclass(frozen=True)
class Restart:
    """Reason of a restart, and the decision; both empty until known. `failed_at` is the time of the
    failure (`time.time()`), `step_s` the step time by a plan left for a faster plan."""

    why: str
    failed_at: float
    decided: str = ""
    step_s: float | None = None


@dataclass(frozen=True)
class Lessons:
    """Lessons of a run's failures, for processes continuing the run. `without` are the devices left
    out now, `ever` the devices left out at some time."""

    restart: Restart
    tried: int = 0
    newest: int = -1
    memory: tuple[tuple[str, float], ...] = ()
    slower: tuple[tuple[str, float], ...] = ()
    blamed: tuple[tuple[str, int], ...] = ()
    without: tuple[str, ...] = ()
    ever: tuple[str, ...] = ()

    def at(self, newest: int) -> Lessons:
        """Return the lessons for a run with a state after step `newest`."""
        if newest <= self.newest:
            return self
        return replace(self, newest=newest, tried=0, blamed=(), without=())

    def to_text(self) -> str:
        return TypeAdapter(type(self)).dump_json(self).decode()

    @classmethod
    def from_text(cls, text: str) -> Lessons:
        """Parse the text of `to_text`; raise ValueError for any different text."""
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True)
class RestartTerms:
    """Terms of a restart: devices left out, memory planned for classes, speeds of devices."""

    without: frozenset[str] = frozenset()
    memory: tuple[tuple[str, float], ...] = ()  # parts of a class's memory, by class
    slower: tuple[tuple[str, float], ...] = ()  # factors on the measured time, by device
    told: str = ""

    @property
    def memory_by_class(self) -> dict[str, float]:
        return dict(self.memory)

    def known(self, profile: Profile) -> Profile:
        """Return the profile without the devices left out, with the lessons applied."""
        left = drop_devices(profile, self.without)
        return with_slower(scale_memory(left, self.memory_by_class), dict(self.slower))


class Recovery:
    """Decisions after the failures of a run.

    Args:
        most: restarts in a row without a step between.
        lessons: of the run in earlier processes.
    """

    def __init__(self, most: int, lessons: Lessons | None = None) -> None:
        self._most = most
        self._tried = lessons.tried if lessons else 0
        self._newest = lessons.newest if lessons else -1
        self._blamed: Counter[str] = Counter(dict(lessons.blamed) if lessons else {})
        self._left_out = set(lessons.ever if lessons else ())  # at some time
        self.again = RestartTerms(
            without=frozenset(lessons.without if lessons else ()),
            memory=lessons.memory if lessons else (),
            slower=lessons.slower if lessons else (),
        )
        """Terms of the last start."""

    def lessons(self, restart: Restart) -> Lessons:
        """Return the lessons for processes continuing the run after `restart`."""
        again = self.again
        return Lessons(
            restart,
            self._tried,
            self._newest,
            again.memory,
            again.slower,
            blamed=tuple(self._blamed.items()),
            without=tuple(sorted(again.without)),
            ever=tuple(sorted(self._left_out)),
        )

    def after(
        self, error: DeviceFailure | RankInterrupted | PlanOutdated, newest: int, plan: Plan | None
    ) -> RestartTerms:
        """Decide how to restart after an error.

        Args:
            newest: the last step with a state to resume from.
            plan: the plan of the run, if it had one.

        Raises:
            GpumixError: the run cannot continue: `error`, or an error reporting its repetition.
        """
        if not self._most:
            raise error
        if newest > self._newest:
            self._newest, self._tried = newest, 0
            self._blamed.clear()
            self.again = replace(self.again, without=frozenset())
        if isinstance(error, PlanOutdated):
            return self._plan_with_slower_devices(error)
        self._tried += 1
        if isinstance(error, OutOfMemory) and plan is not None:
            return self._plan_with_less_memory(error, plan)
        if self._tried > self._most:
            raise _in_a_row(error, self._tried)
        if isinstance(error, DeviceFailure):
            self._blamed[error.device] += 1
            alone = plan is not None and {w.device for w in plan.workers} <= {error.device}
            times = 1 if error.device in self._left_out else BLAMED_TIMES
            if error.device and not alone and self._blamed[error.device] >= times:
                return self._leave_out_device(error.device)
        self.again = replace(self.again, told="starting again")
        return self.again

    def _plan_with_slower_devices(self, error: PlanOutdated) -> RestartTerms:
        slower = dict(self.again.slower)
        for device, factor in error.slower.items():
            slower[device] = slower.get(device, 1.0) * factor
        told = "planning again, by the times that devices take now"
        self.again = replace(self.again, slower=tuple(slower.items()), told=told)
        return self.again

    def _leave_out_device(self, device: str) -> RestartTerms:
        self._tried = 0  # may succeed without the device
        self._blamed.clear()
        often = "again" if device in self._left_out else f"{BLAMED_TIMES} times in a row"
        told = f"device '{device}' is left out: its rank was lost {often}"
        self._left_out.add(device)
        self.again = replace(self.again, without=self.again.without | {device}, told=told)
        return self.again

    def _plan_with_less_memory(self, error: OutOfMemory, plan: Plan) -> RestartTerms:
        """Plan with so little memory that the plan must change. Planning ends the retries, once no
        plan fits."""
        memory = self.again.memory_by_class
        if error.fragmented and self._tried == 1:
            told = "its memory was in pieces, not full: starting again"
        else:
            name = error.device_class
            part = memory.get(name, 1.0)
            less = part * min(LESS_MEMORY, _filled(plan, error.device))
            # Memory set aside for the framework has no tensors and remains.
            memory[name] = min(less, error.obtainable + part * _framework(plan, error.device))
            told = f"planning again, with {memory[name]:.0%} of the memory of class '{name}'"
        self.again = replace(self.again, memory=tuple(memory.items()), told=told)
        return self.again


def complete_restart(
    restart: Restart, before: Plan | None, after: Plan, there: Cluster, taking: Cluster
) -> Restart:
    """Complete a restart with the knowledge of the processes making it: present devices and plan.

    Args:
        before: the plan by which the run trained; None if it had not trained yet.
        after: the plan by which it continues.
        taking: the devices taking part, of all `there`.
    """
    if before is None:
        changes, otherwise = "", "it was ended before it trained"
        how = "trains with {}, by its first plan"
    else:
        changes = describe_device_changes(before, there, taking)
        otherwise = "a rank was lost, or failed: the same devices are there"
        other = diff_plan_parts(PlanParts.of(before), PlanParts.of(after))
        how = "trains on with {}, by " + ("another plan" if other else "the same plan")
    if restart.decided and not changes:
        return restart
    why = [restart.why, changes] if restart.why or changes else [otherwise]
    number = len({worker.device for worker in after.workers})
    decided = [restart.decided, how.format(format_count(number, "device"))]
    return replace(
        restart, why="; ".join(filter(None, why)), decided="; ".join(filter(None, decided))
    )


def _filled(plan: Plan, device: str) -> float:
    """Return a little less than the part of a device's memory filled by the plan's prediction."""
    parts = [w.peak_bytes / w.memory_limit_bytes for w in _predicted(plan, device)]
    return min(parts, default=1.0) * BELOW_PEAK


def _framework(plan: Plan, device: str) -> float:
    """Return the part of a device's memory that the plan leaves to context and libraries."""
    parts = [
        w.memory_bytes.get("framework", 0) / w.memory_limit_bytes for w in _predicted(plan, device)
    ]
    return max(parts, default=0.0)


def _predicted(plan: Plan, device: str) -> list[WorkerPrediction]:
    """Return a device's predictions, one per stage; empty without a prediction."""
    told = plan.prediction.workers if plan.prediction is not None else ()
    return [worker for worker in told if worker.device == device]


def _in_a_row(error: GpumixError, times: int) -> GpumixError:
    why = "; ".join(filter(None, [error.why, f"that happened {times} times in a row"]))
    return convert_error(error, TrainingError, why=why)
