"""How the search grows with devices and with classes.

A Llama-shaped 7B over clusters of eight cards of the catalogue, eight of a class on each host, with
NDR InfiniBand between hosts; times are estimates from datasheets. Everything that the planner knows
is searched: ZeRO stages, recompute, host memory, orders, shardings, collectives, and clusters with
classes left out.

    python benchmarks/planner_scale.py [--json]

Figures: `seconds_64`, `seconds_1024`, `seconds_10240`, `seconds_102400` (medians of whole calls,
from the profile to the finished plan), `gap_64` and so on (1 - proven bound / step), and the same
search of 1,024 devices of fewer classes: `seconds_2_classes`, `seconds_4_classes`.
"""

from __future__ import annotations

import time
from statistics import median

from common import Figures, make_parser, print_figures
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile

CARDS = ("a100-80gb-sxm", "a100-40gb-sxm", "h100-sxm", "v100-32gb-sxm",
         "l40s", "a10g", "rtx4090", "rtxa6000")  # fmt: skip
DEVICES = (64, 1_024, 10_240, 102_400)
ON_A_HOST = 8
SAMPLES_A_DEVICE = 4
SEQUENCE_LENGTH = 2048
ROUNDS = 3


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    figures: Figures = {}
    for devices in DEVICES:
        seconds, plan = search(devices, CARDS)
        expected = get_prediction(plan)
        assert expected.bound_s is not None
        figures[f"seconds_{devices}"] = round(seconds, 3)
        figures[f"gap_{devices}"] = 1.0 - expected.bound_s / expected.step_s
        if not arguments.json:
            used = sorted({w.device_class for w in plan.workers})
            print(
                f"{devices:>7} devices: {seconds:.2f} s; ZeRO {plan.zero_stage}, state divided by "
                f"{plan.sharding}, {len(plan.workers)} devices of {len(used)} classes take part"
            )
    for classes in (2, 4):
        seconds, _ = search(1_024, CARDS[:classes])
        figures[f"seconds_{classes}_classes"] = round(seconds, 3)
    print_figures(figures, as_json=arguments.json)


def search(devices: int, cards: tuple[str, ...]) -> tuple[float, Plan]:
    """The median time of a search, and the plan that it found."""
    profile = fleet(devices, cards)
    request = PlanRequest(global_batch=SAMPLES_A_DEVICE * devices, space=EVERYTHING)
    taken, plan = [], None
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        plan = plan_one_stage(profile, request)
        taken.append(time.perf_counter() - begun)
    assert plan is not None
    return median(taken), plan


def fleet(devices: int, cards: tuple[str, ...]) -> Profile:
    """As many hosts of each card."""
    hosts = devices // (ON_A_HOST * len(cards))
    described = "; ".join(f"{hosts} hosts of {ON_A_HOST}x {card}" for card in cards)
    model = make_llama_like(7e9)
    return estimate_profile(
        lambda dtype: model.model(SEQUENCE_LENGTH, dtype, "7B"),
        parse_cluster(described, "auto", "ib-ndr"),
        sequence_length=SEQUENCE_LENGTH,
    )


if __name__ == "__main__":
    main()
