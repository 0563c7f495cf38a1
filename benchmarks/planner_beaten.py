"""Whether anything finds a faster plan than the default search.

On clusters with stragglers, slow links, little memory, batches below their devices and batches for
many passes, with and without the memory of hosts, the default plan is held against every strategy,
against the default plans of the clusters that it contains (a class less), and against searches that
know nothing of the planner's. One climbs from random plans of several stages, and from those of the
default search and of `staged`, by devices, cuts, tensor-parallel groups, modes, schedules, ZeRO
stages, micro-batch sizes, waves and deals (`tests/helpers/plans/climb.py`); the other from the best
plans of one stage and of one wave, and from random ones in several waves, by samples,
micro-batches, waves, modes, kept graphs, state and buckets
(`tests/helpers/plans/climb_one_stage.py`). All are judged by the cost model.

    python benchmarks/planner_beaten.py [--json] [--clusters 40] [--budget 2000]

Figures: `clusters`, `beaten` (of how many clusters a plan was more than 0.1 % faster),
`worst_beaten_by` (the part by which the step of the fastest of these is shorter; 0 where none is),
`cpu_s` (of the default search, in the mean), `staged` and `in_waves`, of how many the default plan
has several stages, or one stage in several waves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from statistics import fmean

from common import Figures, make_parser, print_figures
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.baselines.best_subset import iterate_class_requests
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.plans.climb import Climb
from helpers.plans.climb_one_stage import OneStageClimb

BEATEN = 1e-3
SEQUENCE_LENGTH = 1024
HOSTS = (
    "2x rtx4090, 1x rtx3090",
    "1x rtx4090; 2x rtx3090",
    "2x a100-40gb-sxm; 2x v100-32gb-sxm",
    "2x l40s; 1x a10g; 1x a10g",
    "4x rtx3090, 1x v100-16gb-pcie",
    "1x h100-sxm; 1x l40s; 1x rtx4090; 1x a10g",
    "2x rtx4090; 4x rtx3090",
    "8x a100-40gb-sxm; 8x v100-32gb-sxm",
)
LINKS = ("10GbE", "ib-hdr")
MODELS = (1e9, 3e9, 7e9)
BATCHES = (3, 16, 64, 128, 250)
# Techniques, without and with those that keep something on hosts.
ON_DEVICES = Space(state_on="device", checkpoints_on="device", parameters_on="device")
SPACES = {"without hosts' memory": ON_DEVICES, "with": Space()}


def main() -> None:
    arguments = _arguments()
    worst, beaten, count, seconds = 0.0, 0, 0, []
    with_stages = in_waves = 0
    for described, profile, request in _cases(arguments.first):
        if count == arguments.clusters:
            break
        begun = time.process_time()
        try:
            plan = plan_fastest(profile, request)
        except (InputError, NoFeasiblePlanError):
            continue
        seconds.append(time.process_time() - begun)
        count, with_stages = count + 1, with_stages + (len(plan.stages) > 1)
        in_waves += len(plan.stages) == 1 and plan.waves > 1
        ours = get_prediction(plan).step_s
        name, other_s = min(
            _others(profile, request, plan, arguments.budget), key=lambda one: one[1]
        )
        by = max(0.0, 1.0 - other_s / ours)
        worst, beaten = max(worst, by), beaten + (by > BEATEN)
        if not arguments.json:
            print(f"{described}: {ours:.5g} s, {name} {other_s:.5g} s", flush=True)
    figures: Figures = {
        "clusters": count,
        "beaten": beaten,
        "worst_beaten_by": worst,
        "cpu_s": round(fmean(seconds), 3),
        "staged": with_stages,
        "in_waves": in_waves,
    }
    print_figures(figures, as_json=arguments.json)


def _cases(first: int) -> Iterator[tuple[str, Profile, PlanRequest]]:
    """Clusters, in an order in which the first ones differ in all."""
    every = list(product(HOSTS, LINKS, MODELS, BATCHES, SPACES))
    step = 41  # coprime to their number
    for number in range(first, len(every)):
        hosts, link, size, batch, techniques = every[number * step % len(every)]
        shape = make_llama_like(size)
        profile = estimate_profile(
            lambda dtype, shape=shape: shape.model(SEQUENCE_LENGTH, dtype, "llama"),
            parse_cluster(hosts, "auto", link if ";" in hosts else None),
            sequence_length=SEQUENCE_LENGTH,
            parts_in=lambda dtype, shape=shape: shape.parts(SEQUENCE_LENGTH, dtype, "llama"),
        )
        described = f"{hosts} by {link}, {size / 1e9:.0f}B, batch {batch}, {techniques}"
        yield described, profile, PlanRequest(global_batch=batch, space=SPACES[techniques])


def _others(
    profile: Profile, request: PlanRequest, plan: Plan, budget: int
) -> Iterator[tuple[str, float]]:
    """Who else plans, and the seconds of the step; infinite where nothing fits."""
    starts = [plan]
    for name, strategy in STRATEGIES.items():
        if name != "optimal":
            try:
                found = strategy(profile, request)
            except (InputError, NoFeasiblePlanError):
                continue
            starts += [found] if name == "staged" else []
            yield name, get_prediction(found).step_s
    for name, alone in iterate_class_requests(profile, request):
        try:
            yield f"only {name}", get_prediction(plan_fastest(profile, alone)).step_s
        except (InputError, NoFeasiblePlanError):
            continue
    with suppress(InputError, NoFeasiblePlanError):
        yield "climb", Climb(profile, request, budget=budget, seed=0, starts=starts).run()
    with suppress(InputError, NoFeasiblePlanError):
        space = request.space.in_one_stage()
        first = [plan_fastest(profile, request.model_copy(update={"space": space}))]
        if first[0].waves > 1:
            in_one = space.model_copy(update={"waves": False})
            with suppress(NoFeasiblePlanError):
                first.append(plan_fastest(profile, request.model_copy(update={"space": in_one})))
        climb = OneStageClimb(profile, request, *first, budget=budget, seed=0)
        yield "climb in one stage", climb.run()


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--budget", type=int, default=2_000, help="plans of a climb")
    parser.add_argument("--first", type=int, default=0, help="the first cluster to plan for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
