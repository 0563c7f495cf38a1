"""How long the default search takes, by CPU time, and how near its plans are proven to be.

Estimates of a Llama-shaped 7B from datasheets, for 2 RTX 4090 and 4 RTX 3090 in one host; for a
host each of 8 A100-40 and A100-80; and for hosts of eight cards of four classes, of sixteen and of
32, with InfiniBand between hosts. Everything that `gpumix plan` knows is searched: one stage and
several, devices alone, in tensor-parallel groups and in mixtures of these, and clusters with
devices left out.

    python benchmarks/planner_speed.py [--json] [--only 6 64]

Figures: `cpu_s_6`, `cpu_s_16`, `cpu_s_64`, `cpu_s_1024`, `cpu_s_10240`, `cpu_s_10240_16_classes`,
`cpu_s_10240_32_classes` (seconds of this process from the profile to the finished plan, the least
of some rounds); `bounded_cpu_s_...` (the same with the bounds that `--verbose` shows); `gap_...`
(1 - proven bound / step, over all that is searched; of several stages the bound is the step of
devices that never wait) and `step_s_...` of each; `gap_one_stage_...`, the same of the fastest plan
in one stage of single devices, whose search is a proof; `why_cpu_s_6` (the search with the reasons
of the plan); and `peak_mb`, the most memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial

from common import Figures, make_parser, print_figures
from gpumix.hardware.estimates import gpu_catalogue
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.plan import plan as plan_with_reasons
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile

CARDS = ("a100-80gb-sxm", "h100-sxm", "v100-32gb-sxm", "l40s")
ON_A_HOST = 8
SEQUENCE_LENGTH = 2048
ROUNDS = 2  # of fewer than `LARGE` devices
LARGE = 1_024
GIB = 2**30


def main() -> None:
    arguments = _arguments()
    figures: Figures = {}
    for name, (described, batch) in CASES.items():
        if arguments.only and name not in arguments.only:
            continue
        profile = described_profile(described)
        few = len(profile.cluster.devices) < LARGE
        request, rounds = PlanRequest(global_batch=batch), ROUNDS if few else 1
        unbounded = request.model_copy(update={"bounds": False})
        seconds, _ = timed(partial(plan_fastest, profile, unbounded), rounds)
        bounded_s, plan = timed(partial(plan_fastest, profile, request), rounds)
        step_s = get_prediction(plan).step_s
        figures[f"cpu_s_{name}"] = round(seconds, 3)
        figures[f"bounded_cpu_s_{name}"] = round(bounded_s, 3)
        figures[f"gap_{name}"] = gap(plan)
        figures[f"step_s_{name}"] = step_s
        figures[f"gap_one_stage_{name}"] = gap(plan_one_stage(profile, request))
        if name == "6":
            seconds, _ = timed(partial(plan_with_reasons, profile, batch), ROUNDS)
            figures["why_cpu_s_6"] = round(seconds, 3)
        if not arguments.json:
            print(f"{described[:60]}: {figures[f'cpu_s_{name}']} s, {step_s:.4g} s a step")
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print_figures(figures, as_json=arguments.json)


def hosts_of(devices: int, classes: tuple[str, ...]) -> str:
    """As many hosts of each class."""
    hosts = devices // (ON_A_HOST * len(classes))
    return "; ".join(f"{hosts} hosts of {ON_A_HOST}x {card}" for card in classes)


def many_classes(count: int) -> tuple[str, ...]:
    """So many cards of NVIDIA's in the catalogue that have room for a part of the model."""
    able = [
        card.name
        for card in gpu_catalogue.load_cards()
        if card.memory_bytes >= 16 * GIB and card.vendor == "nvidia"
    ]
    return tuple(sorted(able)[:count])


CASES: dict[str, tuple[str, int]] = {
    "6": ("2x rtx4090, 4x rtx3090", 128),
    "16": ("8x a100-40gb-sxm; 8x a100-80gb-sxm", 128),
    "64": (hosts_of(64, CARDS), 256),
    "1024": (hosts_of(1_024, CARDS), 4_096),
    "10240": (hosts_of(10_240, CARDS), 40_960),
    "10240_16_classes": (hosts_of(10_240, many_classes(16)), 40_960),
    "10240_32_classes": (hosts_of(10_240, many_classes(32)), 40_960),
}


def described_profile(described: str) -> Profile:
    """The estimate for a cluster, as `gpumix plan --cluster` makes it."""
    shape = make_llama_like(7e9)
    return estimate_profile(
        lambda dtype: shape.model(SEQUENCE_LENGTH, dtype, "7B"),
        parse_cluster(described, "auto", "ib-ndr" if ";" in described else None),
        sequence_length=SEQUENCE_LENGTH,
        parts_in=lambda dtype: shape.parts(SEQUENCE_LENGTH, dtype, "7B"),
    )


def gap(plan: Plan) -> float:
    """The part of a plan's step by which no plan is proven to be shorter."""
    expected = get_prediction(plan)
    return 1.0 - (expected.bound_s or 0.0) / expected.step_s


def timed(search: Callable[[], Plan], rounds: int) -> tuple[float, Plan]:
    """The least CPU time of some rounds, and the plan."""
    taken, plan = [], None
    for _ in range(rounds):
        begun = time.process_time()
        plan = search()
        taken.append(time.process_time() - begun)
    assert plan is not None
    return min(taken), plan


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=tuple(CASES), help="these clusters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
