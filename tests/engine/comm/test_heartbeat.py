"""Who has fallen silent, by heartbeats and a clock of our own."""

from __future__ import annotations

from gpumix.engine.comm.heartbeat import CHECK_INTERVAL_S, ENDED, SilenceDetector


class Hospital:
    def __init__(self, ranks: int, silence_s: float) -> None:
        self.now = 100.0
        self.beats = [""] * ranks
        self.pulse = SilenceDetector(
            lambda rank: self.beats[rank], ranks, silence_s, clock=lambda: self.now
        )

    def after(self, seconds: float, *beats: str) -> set[int]:
        self.now += seconds
        self.beats[: len(beats)] = beats
        return self.pulse.silent()


def test_who_stops_is_found_after_the_silence():
    hospital = Hospital(2, silence_s=3.0)
    for beat in range(5):
        assert hospital.after(CHECK_INTERVAL_S, str(beat), str(beat)) == set()
    found = [hospital.after(CHECK_INTERVAL_S, f"more {n}") for n in range(4)]
    assert found == [set(), set(), {1}, {1}]


def test_a_rank_that_has_not_begun_or_has_left_is_not_silent():
    hospital = Hospital(2, silence_s=3.0)
    hospital.after(CHECK_INTERVAL_S, "", ENDED)
    assert all(hospital.after(CHECK_INTERVAL_S) == set() for _ in range(10))


def test_time_in_which_nobody_asked_does_not_count():
    """The launcher was stopped together with its ranks, for an hour."""
    hospital = Hospital(1, silence_s=10.0)
    hospital.after(CHECK_INTERVAL_S, "1")
    assert hospital.after(3600.0) == set()
    assert hospital.after(CHECK_INTERVAL_S) == set()
