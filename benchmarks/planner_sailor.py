"""Sailor's published contest: OPT-350M on A100-40 and V100-16 in hosts of four.

The same profile, links, global batch (1024), sequence length (2048) and precision (fp32) as in
their paper (SOSP '25, arXiv 2504.17096); each planner's step time is what its own judge says. The
space is everything that the planner knows; as for `gpumix plan`, plans of one stage and of several
are weighed, each of single GPUs and of 2 and 4 GPUs of a host that divide every layer. Such GPUs
are one device here, with times that were measured so.

    python benchmarks/planner_sailor.py [--json]

Figures: `step_s_32_96`, `step_s_80_240` (A100 + V100), `search_s_...` and `stages_...` of the plan
taken (1 stage where more do not pay); of single GPUs `one_stage_step_s_...`,
`one_stage_search_s_...` of the best of one stage alone and `staged_step_s_...`,
`staged_search_s_...` of the best that is found of several, and `staged_bound_s_...`, which none of
those that are looked at is faster than; `staged_in_hosts_step_s_...`,
`staged_in_hosts_search_s_...` of that of four GPUs that divide every layer. Where no plan of
several stages is found its figures are left out.

What is assumed, for it is not in their data: memory by the formula of `published/sailor.py`, AdamW
in fp32 (16 bytes a parameter), 1 GiB of each GPU for CUDA and NCCL, collectives that hide behind
computing where the schedule lets them (a contention of 0), and links as in
`gpumix.cost.network.link_times`: each step of a ring takes as long as a message of its size between
two hosts, all four GPUs sending; all-reduces between many hosts go by trees.

In words it also prints what binds, by how much the step falls when links, memory or samples do not
count; and what comes out if nothing hides, if four blocks are gathered and reduced as one unit, and
if each type of GPU has a degree of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import product

from common import Figures, make_parser, print_figures
from gpumix.planner.common.strategy import PlanRequest, Strategy, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from published import GIB, NotHereError
from published.sailor import Group, Setup, layers, profile
from published.sailor_links import network

BATCH = 1024
CLUSTERS = ((32, 96), (80, 240))
HOST = (4, 4)  # GPUs of each type that are one device
PUBLISHED = {
    (32, 96): "Sailor 5.88, AMP 7.60, DTFM 7.60, Metis 8.05, FlashFlex 8.51",
    (80, 240): "Sailor 2.77",
}
SETUP = Setup(framework_bytes=GIB)
ROUNDS = 3  # of a search; the median counts
DEGREES = (1, 2, 4)  # of tensor parallelism inside a host


@dataclass(frozen=True)
class Entry:
    """Our plan for one cluster, and how long it took to find."""

    plan: Plan
    search_s: float

    @property
    def step_s(self) -> float:
        return get_prediction(self.plan).step_s


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    figures: Figures = {}
    try:
        for a100, v100 in CLUSTERS:
            figures |= _figures(a100, v100, in_words=not arguments.json)
    except NotHereError as error:
        print(error)
        return
    print_figures(figures, as_json=arguments.json)


def _figures(a100: int, v100: int, *, in_words: bool) -> Figures:
    """Of one cluster."""
    found = {"": weighed(a100, v100), "one_stage_": contest(a100, v100)}
    for name, degrees in (("staged_", (1, 1)), ("staged_in_hosts_", HOST)):
        if (entry := in_stages(a100, v100, degrees)) is not None:
            found[name] = entry
    figures: Figures = {}
    for name, entry in found.items():
        figures[f"{name}step_s_{a100}_{v100}"] = entry.step_s
        figures[f"{name}search_s_{a100}_{v100}"] = entry.search_s
    figures[f"stages_{a100}_{v100}"] = len(found[""].plan.stages)
    if "staged_" in found and (bound := get_prediction(found["staged_"].plan).bound_s) is not None:
        figures[f"staged_bound_s_{a100}_{v100}"] = bound
    if in_words:
        _print_entry(a100, v100, found["one_stage_"])
        for name, entry in found.items():
            what = name.rstrip("_").replace("_", " ") or "weighed"
            print(f"  {what}: {_stages(entry)}")
    return figures


def contest(a100: int, v100: int) -> Entry:
    """The best plan of one stage for so many GPUs of each type."""
    setting = cluster(a100, v100)
    entries = [_timed(plan_one_stage, setting) for _ in range(ROUNDS)]
    return sorted(entries, key=lambda entry: entry.search_s)[ROUNDS // 2]


def weighed(a100: int, v100: int) -> Entry:
    """The best plan of one stage or several, of all tensor degrees."""
    every = [_timed(plan_fastest, cluster(a100, v100, degrees=(n, n))) for n in DEGREES]
    best = min(every, key=lambda entry: entry.step_s)
    return Entry(best.plan, sum(entry.search_s for entry in every))


def in_stages(a100: int, v100: int, degrees: tuple[int, int]) -> Entry | None:
    """The best that is found of several stages, so many GPUs of each type being one device; None if
    none fits of those that the search looks at."""
    try:
        return _timed(plan_staged, cluster(a100, v100, degrees=degrees))
    except NoFeasiblePlanError:
        return None


def _timed(strategy: Strategy, of: Profile) -> Entry:
    begun = time.perf_counter()
    plan = strategy(of, PlanRequest(global_batch=BATCH, space=EVERYTHING))
    return Entry(plan, time.perf_counter() - begun)


def cluster(
    a100: int,
    v100: int,
    *,
    degrees: tuple[int, int] = (1, 1),
    setup: Setup = SETUP,
    blocks_a_unit: int = 1,
) -> Profile:
    """The contest's cluster; so many GPUs of each type, by `degrees`, are one device."""
    groups = [
        Group(gpu, degree, count // degree)
        for gpu, degree, count in zip(("A100-40", "V100-16"), degrees, (a100, v100))
    ]
    return profile(groups, setup, network(groups), blocks_a_unit=blocks_a_unit)


def without_links(of: Profile) -> Profile:
    """The same cluster, whose collectives take no time."""
    return of.model_copy(update={"cluster": of.cluster.model_copy(update={"network": None})})


def with_more_memory(of: Profile, factor: int = 4) -> Profile:
    """The same cluster with so many times the memory on every device."""
    classes = tuple(
        c.model_copy(update={"memory_bytes": factor * c.memory_bytes}) for c in of.cluster.classes
    )
    return of.model_copy(update={"cluster": of.cluster.model_copy(update={"classes": classes})})


def compute_bound_s(a100: int, v100: int) -> float:
    """Every GPU at its best measured rate, whatever memory and links say."""
    rates = {
        gpu: max(
            size / degree / sum(f + g for f, g, _ in at.values())
            for degree in DEGREES
            for size, at in layers(gpu, degree).items()
        )
        for gpu in ("A100-40", "V100-16")
    }
    return BATCH / (a100 * rates["A100-40"] + v100 * rates["V100-16"])


def _print_entry(a100: int, v100: int, entry: Entry) -> None:
    plan, expected = entry.plan, get_prediction(entry.plan)
    print(f"{a100} A100-40 + {v100} V100-16 in one stage: {entry.step_s:.3f} s")
    print(f"  no plan of one stage takes less than {expected.bound_s:.3f} s by this cost model")
    print(f"  published: {PUBLISHED[a100, v100]}")
    print(f"  ZeRO {plan.zero_stage}, state divided by {plan.sharding}, {plan.collectives.gather}")
    for row, count in _rows(plan).items():
        print(f"  {count:4} x {row}")
    ours = cluster(a100, v100)
    print(f"  waits for links {expected.exposed_communication_s:.3f} s; what binds:")
    for words, other in (
        ("links of no time", without_links(ours)),
        ("four times the memory", with_more_memory(ours)),
        ("both", with_more_memory(without_links(ours))),
    ):
        print(f"    with {words}: {_step_s(other):.3f} s")
    bound = compute_bound_s(a100, v100)
    print(f"    and samples that split, every GPU at its best rate: {bound:.3f} s")
    for words, other in (
        ("nothing hides collectives", cluster(a100, v100, setup=Setup(GIB, contention=1.0))),
        ("four blocks are one unit", cluster(a100, v100, blocks_a_unit=4)),
    ):
        print(f"  if {words}: {_step_s(other):.3f} s")
    step, one, two = min(
        (_step_s(cluster(a100, v100, degrees=(one, two))), one, two)
        for one, two in product(DEGREES, DEGREES)
    )
    print(f"  if {one} A100 and {two} V100 are one device: {step:.3f} s, the best of all degrees")


def _stages(entry: Entry) -> str:
    """What stands in which stage."""
    groups = (
        " + ".join(f"{n} {name}" for name, n in Counter(w.device_class for w in s.workers).items())
        for s in entry.plan.stages
    )
    return f"{entry.step_s:.3f} s, found in {entry.search_s:.2f} s: {' | '.join(groups)}"


def _step_s(of: Profile) -> float:
    return get_prediction(
        plan_one_stage(of, PlanRequest(global_batch=BATCH, space=EVERYTHING))
    ).step_s


def _rows(plan: Plan) -> Counter[str]:
    return Counter(
        f"{worker.device_class}: {worker.samples} samples by {worker.micro_batch}, "
        f"{worker.mode.describe()}; busy {expected.busy_s:.3f} s, memory "
        f"{expected.peak_bytes / 1e9:.1f} of {expected.memory_limit_bytes / 1e9:.1f} GB"
        for worker, expected in zip(plan.workers, get_prediction(plan).workers)
    )


if __name__ == "__main__":
    main()
