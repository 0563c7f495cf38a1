"""One of four devices slows down threefold while a run trains, and recovers.

Four emulated devices train a small GPT; from step 20 to step 60 one computes at a third of its
speed. Measured: the run with and without splitting samples anew, and, for the ideal of each phase,
runs by plans that were made for four sound devices, and for three and a slow one.

    python benchmarks/straggler.py [--json] [--factor 3]

Figures: `worst_phase_efficiency` (ideal over measured step time, median over the steps of a phase
from the fifth after its change on; the worst of three phases), `first`, `slow` and `recovered` of
each phase, `vs_no_rebalancing` (time of the run without over that with), `slow_vs_no_rebalancing`
(the same of the slow phase), `vs_bound` (throughput of the slow phase over that of the bound
N/((N-n)+sum(1/x)), by sound steps), `steps_to_adapt` and `steps_to_recover` (from the change on
until the efficiency stays at 0.9 or above, by the median of each five steps; all steps of the
phase if it does not), `changes`, and `worst_loss_difference` between the runs with and without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import TEXT, Figures, emulated_cluster, make_parser, print_figures, small_gpt2
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.advanced import AdvancedSpec
from gpumix.schema.job.job import DataSpec, Job, ModelSpec
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController
from gpumix.train.processes.local_launcher import RankAddress, launch
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.rank_setup.context import Task, join_run
from gpumix.train.trainer_builder import build_trainer

RATE = 4e9  # FLOP/s
DEVICES = 4
SLOW_FROM, SLOW_UNTIL, STEPS = 20, 60, 90
SETTLE_STEPS = 5
GOOD, MEDIAN_OF = 0.9, 5
GPT = small_gpt2(64, positions=64)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--factor", type=float, default=3.0)
    arguments = parser.parse_args()
    factor = arguments.factor
    sound = {"device": (DEVICES, RATE)}
    mixed = {"device": (DEVICES - 1, RATE), "slowed": (1, RATE / factor)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ideal = {
            "sound": _steady(folder / "sound", sound),
            "slow": _steady(folder / "mixed", mixed),
        }
        run = _run(folder / "with", sound, factor, rebalance=True)
        without = _run(folder / "without", sound, factor, rebalance=False)
    print_figures(_figures(run, without, ideal, factor), as_json=arguments.json)


def _figures(
    run: dict[str, Any], without: dict[str, Any], ideal: dict[str, float], factor: float
) -> Figures:
    times = run["times"]
    phases = {
        "first": ("sound", times[SETTLE_STEPS:SLOW_FROM]),
        "slow": ("slow", times[SLOW_FROM + SETTLE_STEPS : SLOW_UNTIL]),
        "recovered": ("sound", times[SLOW_UNTIL + SETTLE_STEPS :]),
    }
    efficiency = {name: ideal[kind] / median(own) for name, (kind, own) in phases.items()}
    slow_s = median(phases["slow"][1])
    slow_without_s = median(without["times"][SLOW_FROM:SLOW_UNTIL])
    bound = DEVICES / (DEVICES - 1 + 1 / factor)
    losses = zip(run["losses"], without["losses"], strict=True)
    return {
        "worst_phase_efficiency": round(min(efficiency.values()), 3),
        **{name: round(value, 3) for name, value in efficiency.items()},
        "vs_no_rebalancing": round(sum(without["times"]) / sum(times), 3),
        "slow_vs_no_rebalancing": round(slow_without_s / slow_s, 3),
        "vs_bound": round(ideal["sound"] * bound / slow_s, 3),
        "steps_to_adapt": _steps_until_good(times[SLOW_FROM:SLOW_UNTIL], ideal["slow"]),
        "steps_to_recover": _steps_until_good(times[SLOW_UNTIL:], ideal["sound"]),
        "changes": run["changes"],
        "worst_loss_difference": max(abs(a / b - 1) for a, b in losses),
        "overruns": run["overruns"],
    }


def _steps_until_good(times: Sequence[float], ideal_s: float) -> int:
    """How many pass before; what takes long by chance does not count."""
    windows = [times[n : n + MEDIAN_OF] for n in range(len(times) - MEDIAN_OF + 1)]
    bad = [n for n, window in enumerate(windows) if ideal_s < GOOD * median(window)]
    if not bad:
        return 0
    return bad[-1] + (MEDIAN_OF + 1) // 2 if bad[-1] + 1 < len(windows) else len(times)


def _steady(folder: Path, classes: dict[str, tuple[int, float]]) -> float:
    """What a step takes by a plan for these very devices."""
    found = _run(folder, classes, 1.0, rebalance=False, steps=SLOW_FROM)
    return median(found["times"][SETTLE_STEPS:])


def _run(
    folder: Path,
    classes: dict[str, tuple[int, float]],
    factor: float,
    *,
    rebalance: bool,
    steps: int = STEPS,
) -> dict[str, Any]:
    folder.mkdir()
    cluster = emulated_cluster(classes, memory_bytes=2**29)
    job = Job(
        model=ModelSpec(config=GPT),
        data=DataSpec(text=(TEXT,), pattern="*.py"),
        sequence_length=64,
        global_batch_size=48,
        max_steps=steps,
        memory_save_steps=0,
        techniques=Space(max_pipeline_stages=1, tensor_parallel_size=(1,), leave_out=False),
        advanced=AdvancedSpec(rebalance=rebalance),
        cluster=cluster,
        output_dir=folder / "run",
    )
    pipeline = JobController(job, folder, LocalRunner())
    profile = pipeline.profile()
    plan = pipeline.plan(profile)
    task = Task(job, cluster, folder)
    devices = cluster.in_rank_order()
    return launch(_training, devices, task, plan, profile, devices, factor)[0]


def _training(
    seat: RankAddress,
    task: Task,
    plan: Plan,
    profile: Profile,
    devices: tuple[Device, ...],
    factor: float,
) -> dict[str, Any]:
    """In one rank; the last one is slow for a while."""
    with join_run(seat, task) as context:
        trainer = build_trainer(context, plan.for_devices([d.id for d in devices]), profile)
        timeline = context.runtime._pacer.timeline  # type: ignore[attr-defined]
        usual, step = timeline.flops_per_s, trainer.issue_step

        def give_step(*arguments: Any) -> Any:
            slow = SLOW_FROM <= trainer.step < SLOW_UNTIL and seat.rank == DEVICES - 1
            timeline.flops_per_s = usual / factor if slow else usual
            return step(*arguments)

        trainer.issue_step = give_step  # type: ignore[method-assign]
        summary = trainer.run()
        return {
            "times": trainer.taken.times_s,
            "losses": summary.losses,
            "changes": trainer._balancing.changes if trainer._balancing is not None else 0,
            "overruns": summary.overruns,
        }


if __name__ == "__main__":
    main()
