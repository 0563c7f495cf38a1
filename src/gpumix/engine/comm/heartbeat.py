"""Heartbeats of ranks, and detection of silent ranks. Nothing here imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpumix.engine.comm.hang_attribution import RankProgress

HEARTBEAT_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 1.0  # between two checks of the heartbeats
ENDED = "ended"  # the last heartbeat
# A process stopped for longer, or a host not heard for longer, is given up.
STOPPED_TIMEOUT_S = 20.0


def format_heartbeat(number: int, stand: RankProgress) -> str:
    """Return a rank's heartbeat, which differs from all before and reports the rank's progress."""
    return f"{number} {stand.to_text()}"


def parse_heartbeat(beat: str) -> RankProgress | None:
    """Return the progress of a heartbeat's rank; None before the first beat and after the last."""
    return None if beat in ("", ENDED) else RankProgress.from_text(beat.partition(" ")[2])


class SilenceDetector:
    """Detector of silent ranks, by their heartbeats.

    Args:
        beat_of: the last beat of a rank; empty before the first, and `ENDED` after the last.
        silence_s: silence allowed between beats.
    """

    def __init__(
        self,
        beat_of: Callable[[int], str],
        ranks: int,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat_of = beat_of
        self.silence_s = silence_s
        self._clock = clock
        self._looked = clock()
        self._heard = [("", self._looked)] * ranks

    def silent(self) -> set[int]:
        """Check all ranks and return silent ones. Time without checks does not count: this process
        may have been stopped together with the ranks."""
        now = self._clock()
        missed = max(0.0, now - self._looked - 2 * CHECK_INTERVAL_S)
        self._looked = now
        found = set()
        for rank, (before, since) in enumerate(self._heard):
            beat = self._beat_of(rank)
            at = now if beat != before else since + missed
            self._heard[rank] = beat, at
            if beat not in ("", ENDED) and now - at >= self.silence_s:
                found.add(rank)
        return found
