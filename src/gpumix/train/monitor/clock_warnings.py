"""Warnings about GPUs training at clocks different from the profiled clocks: step times then differ
from the prediction."""

from __future__ import annotations

from collections.abc import Sequence

from gpumix.schema.cluster.clocks import APART
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.run_log.metrics import RankRecord, RunEvent


class ClockMonitor:
    """Comparison of clocks at each exchange of records, reporting each device class once.

    Args:
        profile: the profile behind the plan, if known.
    """

    def __init__(self, profile: Profile | None) -> None:
        classes = () if profile is None else profile.classes
        self._measured = {
            one.device_class: one.clocks.sm_mhz for one in classes if one.clocks is not None
        }
        self._before: set[int] = set()  # ranks apart the last time: once is no reason
        self._told: set[str] = set()

    def find_clock_changes(self, plan: Plan, records: Sequence[RankRecord]) -> list[RunEvent]:
        """Return the reports for the ranks' last records."""
        apart = {rank for rank, one in enumerate(records) if self._is_apart(one)}
        lasting, self._before = apart & self._before, apart
        found = []
        for rank in sorted(lasting):
            one = records[rank]
            if one.device_class in self._told:
                continue
            self._told.add(one.device_class)
            found.append(self._of(plan.workers[rank].device, one))
        return found

    def _is_apart(self, one: RankRecord) -> bool:
        measured = self._measured.get(one.device_class)
        return (
            measured is not None
            and one.sm_mhz is not None
            and abs(one.sm_mhz / measured - 1) > APART
        )

    def _of(self, device: str, one: RankRecord) -> RunEvent:
        measured, now = self._measured[one.device_class], one.sm_mhz
        assert now is not None, "it is apart"
        fields = {"device": device, "sm_mhz": now, "measured_sm_mhz": measured}
        way = "slower" if now < measured else "faster"
        return RunEvent(
            "clocks",
            fields,
            f"{device} runs at {now:.0f} MHz, class '{one.device_class}' was measured at "
            f"{measured:.0f} MHz: steps that it computes are up to {abs(measured / now - 1):.0%} "
            f"{way} than predicted; profile again (--fresh), or look at its cooling and power "
            "limit (gpumix doctor)",
        )
