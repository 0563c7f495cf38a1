"""Where the time of a step goes, by what the engine recorded of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated.results import aligned
from gpumix.engine.comm.step_recorder import RecordedStep

COMPUTE = ("forward", "head", "backward")
COPIES = ("copy to host", "copy from host")
HEADINGS = ("compute", "exposed communication", "copies", "optimizer", "Python and rest")


def seconds_by_use(recordings: Sequence[RecordedStep]) -> tuple[float, ...]:
    """Mean over ranks, in the order of `HEADINGS`.

    Python's time between operations is part of what it prepares; what stands alone is the rest.
    """
    uses = dict.fromkeys(HEADINGS, 0.0)
    for recording in recordings:
        for activity in recording.activities:
            kind = str(activity.kind)
            if kind in COMPUTE:
                use = "compute"
            elif kind == "waiting":
                use = "exposed communication"
            elif kind in COPIES:
                use = "copies"
            else:
                use = "optimizer" if kind == "optimizer" else "Python and rest"
            uses[use] += (activity.end_s - activity.start_s) / len(recordings)
    return tuple(uses.values())


def where_time_goes(recorded: Mapping[str, Sequence[RecordedStep]]) -> str:
    """One row per name: milliseconds and shares of one step, mean over ranks."""
    rows = [("one step", *HEADINGS, "step")]
    for name, recordings in recorded.items():
        parts = seconds_by_use(recordings)
        step_s = sum(parts)
        shares = (f"{1e3 * part:.1f} ms {part / step_s:4.0%}" for part in parts)
        rows.append((name, *shares, f"{1e3 * step_s:.1f} ms"))
    return aligned(rows)
