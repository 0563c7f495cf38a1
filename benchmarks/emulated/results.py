"""What the ranks of a study brought home, put together: speeds, ratios, agreement, a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from emulated.rounds import Outcome, Run, Study, work
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.schema.plan.plan import Plan
from gpumix.schema.units import show_bytes
from gpumix.train.processes.local_launcher import launch


@dataclass(frozen=True)
class Results:
    """A study and the outcome of each rank."""

    study: Study
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(cls, study: Study) -> Results:
        """Run the study, one process per device."""
        return cls(study, tuple(launch(work, study.setting.devices, study)))

    def of_system(self, name: str) -> list[tuple[Run, ...]]:
        """For each round the runs of all ranks."""
        by_rank = ([run for run in o.runs if run.system == name] for o in self.outcomes)
        return list(zip(*by_rank))

    def counted(self, name: str) -> list[Run]:
        """The runs that count, as rank 0 saw them: those without overruns, all if there is none."""
        runs = [ranks[0] for ranks in self.of_system(name)]
        return [run for run in runs if not run.overruns] or runs

    def tokens_per_s(self, name: str) -> float:
        """Median over rounds of the global batch over the median step."""
        steps = [median(run.step_s) for run in self.counted(name)]
        return self.study.setting.tokens / median(steps)

    @property
    def overruns(self) -> int:
        """In the runs that count; not 0 only where a system had some in all rounds and tries."""
        names = {run.system for run in self.outcomes[0].runs}
        return sum(run.overruns for name in names for run in self.counted(name))

    @property
    def spoiled(self) -> int:
        """Runs with overruns, in all tries."""
        return sum(run.spoiled + (run.overruns > 0) for run in self.outcomes[0].runs)

    @property
    def worst_loss_difference(self) -> float:
        """Relative, over all steps of all systems, to the first round of the first system."""
        wanted = self.of_system(self.study.contestants[0].name)[0][0].losses
        found = [run.losses for run in self.outcomes[0].runs]
        return max(abs(a / b - 1) for losses in found for a, b in zip(losses, wanted))

    def recordings(self, name: str) -> list[RecordedStep]:
        """One step in detail, by rank."""
        return [outcome.recordings[name] for outcome in self.outcomes]

    def busiest_cpu(self) -> float:
        """The largest share of a core that any rank used."""
        return max(run.cpu_share for outcome in self.outcomes for run in outcome.runs)

    def worst_memory(self, name: str) -> str:
        """The highest peak of its device's limit, over ranks."""
        setting = self.study.setting
        peaks = [
            (run.peak_bytes / setting.class_of(rank).memory_bytes, run.peak_bytes)
            for ranks in self.of_system(name)
            for rank, run in enumerate(ranks)
            if run.peak_bytes is not None
        ]
        return f"{max(peaks)[0]:.0%} ({show_bytes(max(peaks)[1])})" if peaks else "unknown"

    def table(self, ours: str) -> str:
        """One row per system: tokens/s, how much faster `ours` is, the rounds (* with overruns),
        the highest peak of memory."""
        rows = [("system", "tokens/s", f"{ours} is", "by round, tokens/s", "memory")]
        for name in (contestant.name for contestant in self.study.contestants):
            speed = self.tokens_per_s(name)
            runs = [ranks[0] for ranks in self.of_system(name)]
            rounds = [
                f"{self.study.setting.tokens / median(run.step_s):.1f}{'*' if run.overruns else ''}"
                for run in runs
            ]
            rows.append(
                (
                    name,
                    f"{speed:.1f}",
                    f"{self.tokens_per_s(ours) / speed:.3f} x",
                    " ".join(rounds),
                    self.worst_memory(name),
                )
            )
        return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for row in rows:
        first, *others = (
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def plan_line(plan: Plan) -> str:
    """Who computes and who stores what, in one line."""
    parts = [
        f"{w.device} {w.samples} in {'+'.join(map(str, w.micro_batches)) or 'none'}, "
        f"{w.state_share:.0%} of the state{' on the host' if w.state_on == 'host' else ''}"
        f"{', recompute' if w.mode.recompute else ''}"
        for w in plan.workers
    ]
    return "plan: " + "; ".join(parts)
