"""Stage `predict`: `gpumix train` from a job file to its end, and whether it is as predicted."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from common import records
from proof.bench import Bench
from proof.jobs import Command, fast_folder, well, write_job
from proof.lines import Bar
from proof.outcome import Outcome
from proof.speed import shape_of

STEPS, GLOBAL_BATCH = 12, 16
STATE_BYTES = 12  # of a parameter in a checkpoint
EVERY_S = 0.1


def run(bench: Bench) -> Outcome:
    spec, _ = shape_of(bench)
    folder = fast_folder(bench, STATE_BYTES * spec.parameters)
    try:
        keys = {"output_dir": str(folder / "run"), "memory_save_steps": 0}
        steps = 4 if bench.rehearses else STEPS
        file = write_job(
            bench, "run", spec, global_batch_size=GLOBAL_BATCH, max_steps=steps, **keys
        )
        with Clocks(bench) as clocks:
            command = Command(bench, "train", str(file), "--json")
            done = well(command.wait(), "gpumix train")
        times = [one["time"] for one in records(folder / "run", "step")]
        figures = _figures(bench, done.json) | clocks.told(begun=min(times), ended=max(times))
        figures["seconds_to_first_step"] = min(times) - command.begun
    finally:
        if folder != bench.folder:
            shutil.rmtree(folder, ignore_errors=True)
    bars = (
        Bar("step_error", least=-0.10, most=0.10, judges="gpu"),
        Bar("peak_over_planned", least=0.90, most=1.00, judges="gpu"),
        Bar("allocator_retries", most=0),
        Bar("loop_cost", least=0.97, judges="gpu"),
    )
    return Outcome(figures, bars)


def _figures(bench: Bench, told: dict[str, Any]) -> dict[str, Any]:
    """What the run said of itself at its end."""
    (row,) = told["classes"]
    predicted, measured = told["predicted_step_s"], told["step_s"]
    alone = bench.earlier("speed").get("gpumix_tokens_per_s")
    peak, planned = row["peak_bytes"], row["planned_peak_bytes"]
    return {
        "predicted_step_s": predicted,
        "measured_step_s": measured,
        "step_error": predicted / measured - 1 if predicted else None,
        "planned_peak_bytes": planned,
        "measured_peak_bytes": peak,
        "peak_over_planned": peak / planned if peak and planned else None,
        "reserved_peak_bytes": row["reserved_bytes"],
        "allocator_retries": row["retries"],
        "busy_share": row["busy_share"],
        "shares": row["shares"],
        "planned_memory": row["planned_memory"],
        "measured_memory": row["measured_memory"],
        "tokens_per_s": told["tokens_per_s"],
        "mfu": row["mfu"],
        "hfu": row["hfu"],
        "loop_cost": told["tokens_per_s"] / alone if alone else None,
        "last_loss": told["loss"],
    }


@dataclass
class Clocks:
    """The clock and the power of the card, read again and again while something else runs."""

    bench: Bench
    readings: list[tuple[float, int | None, float | None]] = field(default_factory=list)

    def __enter__(self) -> Clocks:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self.bench.card is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def told(self, *, begun: float, ended: float) -> dict[str, Any]:
        """Of the readings before the first step those at which the card worked, for it was measured
        then; and those of training. By `time.time()`."""
        before = [(c, p) for at, c, p in self.readings if at < begun and c and p]
        most = max((p for _, p in before), default=0.0)
        measuring = [c for c, p in before if p > 0.6 * most]
        training = [c for at, c, _ in self.readings if begun <= at <= ended and c]
        powers = [p for at, _, p in self.readings if begun <= at <= ended and p]
        return {
            "clock_profiling_mhz": median(measuring) if measuring else None,
            "clock_training_mhz": median(training) if training else None,
            "power_profiling_w": most or None,
            "power_training_w": median(powers) if powers else None,
        }

    def _read(self) -> None:
        assert self.bench.card is not None
        while not self._over.wait(EVERY_S):
            now = self.bench.card.read()
            self.readings.append((time.time(), now.sm_clock_mhz, now.power_w))
