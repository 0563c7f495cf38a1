"""How well the cost model foretells published runs on real GPUs.

Every run of OPT-350M that Sailor measured with pipelines of one stage is predicted from the
published profile of its GPUs and the published fits of its links. Nothing is fitted to a run; what
is assumed of the engine is in `published/sailor_runs.py`.

    python benchmarks/planner_accuracy.py [--json]

Figures: `runs`, `time_mape` (mean absolute error of the step time, a fraction),
`memory_underestimates` (runs whose fullest GPU held more than was predicted), `memory_mape`,
`time_mape_mixed` (of the runs on several types of GPU alone) and, for each run, `time_error_...`
and `memory_error_...` (predicted / measured - 1).

What the data says against itself is printed with it. On GH200 the profile is not monotone: a
micro-batch of 1 takes longer than one of 2 on groups of four. The cost model lowers it to the later
point, but the two runs with micro-batches of 1 are faster still, and those of 2 and 4 slower than
profiled: no common factor brings the mean error of these runs much lower.

What else was tried: the disturbed point as it is, 26 %; collectives that hide perfectly, 15 %; the
median of the blocks, 13.5 %; the disturbed point left out and a line through the next two drawn on,
8 %. The last is not done, for the runs in pipelines, which no plan of one stage can express, speak
against it: two have micro-batches of 1, and with such a line their schedule would take 28 % and
20 % less than they took, with the lowered point 6 % less and 4 % more.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean

from common import Figures, print_figures
from gpumix.cost.predict import predict
from published import NotHereError
from published.sailor import layers
from published.sailor_runs import Run, runs


@dataclass(frozen=True)
class Outcome:
    """What was predicted of a run."""

    run: Run
    step_s: float
    communication_s: float
    update_s: float
    peak_bytes: float  # of one GPU

    @classmethod
    def of(cls, run: Run) -> Outcome:
        profile = run.profile()
        found = predict(profile, run.plan(profile))
        return cls(
            run=run,
            step_s=found.step_s,
            communication_s=found.exposed_communication_s,
            update_s=max(w.optimizer_s for w in found.workers),
            peak_bytes=max(w.peak_bytes for w in found.workers) / run.degree,
        )

    @property
    def time_error(self) -> float:
        return self.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_bytes / self.run.peak_bytes - 1

    @property
    def mixed(self) -> bool:
        return len({group.gpu for group in self.run.groups}) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        outcomes = [Outcome.of(run) for run in runs()]
    except NotHereError as error:
        print(error)
        return
    if not arguments.json:
        for outcome in outcomes:
            print(_line(outcome))
        for outcome in outcomes:
            print(_contradiction(outcome))
        print(f"mean error under the best common factor: {_best_factor(outcomes):.1%}")
    print_figures(figures(outcomes), as_json=arguments.json)


def figures(outcomes: list[Outcome]) -> Figures:
    """The result, flat."""
    mixed = [abs(o.time_error) for o in outcomes if o.mixed]
    found: Figures = {
        "runs": len(outcomes),
        "time_mape": fmean(abs(o.time_error) for o in outcomes),
        "memory_underestimates": sum(o.memory_error < 0 for o in outcomes),
        "memory_mape": fmean(abs(o.memory_error) for o in outcomes),
    }
    if mixed:
        found["time_mape_mixed"] = fmean(mixed)
    for outcome in outcomes:
        name = outcome.run.name.replace("/", "_")
        found[f"time_error_{name}"] = round(outcome.time_error, 4)
        found[f"memory_error_{name}"] = round(outcome.memory_error, 4)
    return found


def _line(outcome: Outcome) -> str:
    run = outcome.run
    what = " + ".join(f"{g.degree} {g.gpu}" for g in run.groups)
    return (
        f"{run.name:<20} {run.step_s:8.3f} s, predicted {outcome.time_error:+6.1%} (reduction "
        f"{run.reduce_s:.3f} s, predicted {outcome.communication_s:.3f}); "
        f"{run.peak_bytes / 1e9:5.2f} GB, predicted {outcome.memory_error:+6.1%}; {what}, "
        f"{run.global_batch} samples in micro-batches of {run.micro_batch}"
    )


def _contradiction(outcome: Outcome) -> str:
    """What one micro-batch took in the run and in the profile, of the slowest type of GPU."""
    run = outcome.run
    count = run.global_batch // len(run.groups) // run.micro_batch
    profiled = {
        group.gpu: sum(
            f + g for f, g, _ in layers(group.gpu, group.degree)[run.micro_batch].values()
        )
        for group in run.groups
        if run.micro_batch in layers(group.gpu, group.degree)
    }
    if not profiled:
        return f"{run.name:<20} its micro-batch was not profiled"
    slowest = max(profiled.values())
    rest = run.step_s - outcome.communication_s - outcome.update_s
    return (
        f"{run.name:<20} a micro-batch of {run.micro_batch} took {rest / count * 1e3:.1f} ms in "
        f"the run (less predicted reduction and update), {slowest * 1e3:.1f} in the profile"
    )


def _best_factor(outcomes: list[Outcome]) -> float:
    """The least mean error if all predictions could be scaled alike: a sum of |c a - 1| is least
    where one of its terms is zero."""
    ratios = [1 + o.time_error for o in outcomes]
    return min(fmean(abs(ratio / other - 1) for ratio in ratios) for other in ratios)


if __name__ == "__main__":
    main()
