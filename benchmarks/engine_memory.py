"""How much memory a plan takes beside the least that it could, and the largest model that fits.

First, plans on 2 and 3 ranks: each rank's peak, counted to the byte, over an analytic minimum of
the same plan (`compared/least_memory.py` derives it); next to it FSDP2 in its thriftiest form (all
sharded, no gathers ahead) with the same samples and micro-batches, over the same minimum. Second, a
fixed mixture of four devices of unequal memory: the deepest model that trains under an even plan,
under FSDP2 in that form with recompute and micro-batches of one sample, and under the planner's
plan with one technique more at a time. FSDP2 can keep its state on the host too, but not where the
device is a CPU: compare it with `recompute`. Even plan and FSDP2 are tried for real until one more
layer fails; ours is searched by predicted memory, and the result trained.

    python benchmarks/engine_memory.py [--json] [--layers 6] [--part minimum largest]

Figures: `worst_vs_analytic_minimum` (peak over minimum, over plans and ranks; `fsdp2_...` of
FSDP2), and in parameters `largest_model_even`, `_fsdp2`, `_ours` (all that the engine has) and
`_ours_...` for each technique.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import gpumix
from common import Figures, cluster_of, make_parser, print_figures
from compared.attempts import Attempt, engine_attempt, fits, fsdp_attempt
from compared.least_memory import Sizes, least_bytes
from compared.setting import Model, Setting
from compared.where import where_time_goes
from emulated.results import aligned, plan_line
from emulated.rounds import joined
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.planner.baselines.even import plan_even
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_bytes
from gpumix.train.processes.local_launcher import RankAddress, launch

STAGES: tuple[ZeroStage, ...] = (3, 2, 1, 0)
ROOMY = "2 GiB"
WIDTH, VOCABULARY = 192, 2048
MIXTURE = cluster_of(
    ("large", 1, None, "256 MiB"), ("medium", 1, None, "128 MiB"), ("small", 2, None, "40 MiB")
)
BATCH = 8
PROFILED_LAYERS = 4
PROFILE_BUDGET_S = 30.0
MOST_LAYERS = 256
# One technique more at a time: its value of a field of the space that plans are searched in.
TECHNIQUES: tuple[tuple[str, str, Any], ...] = (
    ("graphs kept", "gradient_checkpointing", False),
    ("recompute", "gradient_checkpointing", True),
    ("host offload", "checkpoints_on", "host"),
    ("state on the host", "state_on", "host"),
    ("chunked loss", "cross_entropy", "chunked"),
)


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    figures: Figures = {}
    if "minimum" in arguments.part:
        figures |= against_minimum(arguments.layers)
    if "largest" in arguments.part:
        figures |= largest_models()
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    parts = ("minimum", "largest")
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of the model of the first part")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


# -- against the least -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A plan, the setting in which FSDP2 does the same if it can, and a name."""

    name: str
    plan: Plan
    like: Setting | None = None


def against_minimum(layers: int) -> Figures:
    """Peaks over the minimum, ours and FSDP2's."""
    model = Model(width=256, layers=layers, vocabulary=1024, sequence=64)
    sizes = Sizes.of(model)
    ours: list[float] = []
    theirs: list[float] = []
    recorded: dict[str, list[RecordedStep]] = {}
    rows: list[Sequence[str]] = [("plan", "rank", "least", "ours", "", "FSDP2", "")]
    for compared in _plans(model):
        plan = compared.plan
        cluster = cluster_of(("roomy", len(plan.workers), None, ROOMY))
        least = [least_bytes(sizes, plan, rank) for rank in range(len(plan.workers))]
        attempts = _succeeded(engine_attempt(cluster, model, plan))
        recorded[compared.name] = [a.recording for a in attempts if a.recording is not None]
        others = _succeeded(fsdp_attempt(cluster, compared.like)) if compared.like else []
        ours += _over(attempts, least)
        theirs += _over(others, least)
        for rank, at_least in enumerate(least):
            rows.append(
                (
                    compared.name,
                    str(rank),
                    show_bytes(at_least),
                    *_shown(attempts, rank, at_least),
                    *_shown(others, rank, at_least),
                )
            )
    print("peak of each rank, and over the least that the plan could take")
    print(aligned(rows))
    print(f"\nwhere the time of one step goes\n{where_time_goes(recorded)}\n", flush=True)
    return {
        "worst_vs_analytic_minimum": round(max(ours), 4),
        "fsdp2_worst_vs_analytic_minimum": round(max(theirs), 4),
    }


def _plans(model: Model) -> Iterator[Compared]:
    """Equal parts as FSDP2 has them, and unequal ones, at each ZeRO stage that the engine runs."""
    whole = model.build()
    for stage, recompute in product(STAGES, (True, False)):
        settings = [Setting(model, 2, 4, micro_batches, recompute) for micro_batches in (1, 4)]
        even_plans = [setting.plan(whole, stage, "layered") for setting in settings]
        for plan, setting in zip(even_plans, settings):
            yield Compared(f"ZeRO {stage}, {setting}", plan, setting if stage == 3 else None)
        uneven = _uneven(even_plans[0], Mode(recompute=recompute))
        kept = "recompute" if recompute else "graphs kept"
        yield Compared(f"ZeRO {stage}, 3 uneven ranks, {kept}", uneven)


def _uneven(plan: Plan, mode: Mode) -> Plan:
    """Three ranks: one that does most, one that stores most, one that only computes."""
    parts = ((5, 2, 0.2), (2, 1, 0.8), (1, 1, 0.0))
    workers = tuple(
        Worker(
            device=f"d{rank}", device_class="roomy", samples=samples, micro_batch=micro_batch,
            state_share=share, mode=mode,
        )
        for rank, (samples, micro_batch, share) in enumerate(parts)
    )  # fmt: skip
    stage = Stage(units=plan.stages[0].units, workers=workers)
    total = sum(worker.samples for worker in workers)
    return plan.model_copy(update={"stages": (stage,), "global_batch": total})


def _succeeded(attempts: list[Attempt]) -> list[Attempt]:
    if not fits(attempts):
        raise SystemExit(f"no step was done: {', '.join(a.error for a in attempts if a.error)}")
    if any(a.peak_bytes is None for a in attempts):
        raise SystemExit("this machine cannot count memory: install a C++ compiler (g++)")
    return attempts


def _over(attempts: list[Attempt], least: list[int]) -> list[float]:
    return [(a.peak_bytes or 0) / at_least for a, at_least in zip(attempts, least)]


def _shown(attempts: list[Attempt], rank: int, at_least: int) -> tuple[str, str]:
    if not attempts:
        return "", ""
    peak = attempts[rank].peak_bytes or 0
    return show_bytes(peak), f"{peak / at_least:.3f}"


# -- the largest model -----------------------------------------------------------------------------


def largest_models() -> Figures:
    """The deepest model that trains on the mixture, in parameters, by each way."""
    profile: Profile = launch(_profiled, MIXTURE.in_rank_order())[0]
    rows: list[Sequence[str]] = [("way", "layers", "M parameters")]
    figures: Figures = {}

    def note(name: str, layers: int) -> None:
        elements = Sizes.of(_deep(layers)).elements if layers else 0
        rows.append((name, str(layers), f"{elements / 1e6:.1f}"))
        figures[f"largest_model_{name.replace(' ', '_').replace(',', '')}"] = elements
        print(f"{name}: {layers} layers", file=sys.stderr, flush=True)

    request = PlanRequest(global_batch=BATCH)
    planned_even = partial(_planned, partial(plan_even, request=request), profile)
    guess = largest(lambda layers: planned_even(layers) is not None, PROFILED_LAYERS)
    note("even", largest(partial(_even_trains, profile), max(1, guess)))
    note("fsdp2", largest(_fsdp_trains, max(1, guess)))
    for number, (name, *_) in enumerate(TECHNIQUES):
        space = _without(TECHNIQUES[number + 1 :])
        asked = PlanRequest(global_batch=BATCH, space=space)
        deepest = partial(_planned, partial(plan_one_stage, request=asked), profile)
        planned = largest(lambda layers, of=deepest: of(layers) is not None, max(1, guess))
        found = largest(partial(_trains, deepest), planned, most=planned)
        note(f"ours, {name}", found)
        figures["largest_model_ours"] = figures[f"largest_model_ours_{name.replace(' ', '_')}"]
        if plan := deepest(found):
            print(f"{name}: {plan_line(plan)}")
    print(f"\nthe deepest of width {WIDTH} that trains on {_told(MIXTURE)}\n{aligned(rows)}\n")
    return figures


def largest(is_possible: Callable[[int], bool], guess: int, most: int = MOST_LAYERS) -> int:
    """The largest number up to `most` for which it is, if it is for all below; 0 if for none."""
    low, high, step = 0, most + 1, 1  # possible, impossible
    at = min(guess, most)
    while high - low > 1:
        if is_possible(at):
            low, following = at, at + step
        else:
            high, following = at, at - step
        step *= 2
        at = following if low < following < high else (low + high) // 2
    return low


def _profiled(seat: RankAddress) -> Profile:
    model = _deep(PROFILED_LAYERS)
    with joined(seat):
        return gpumix.profile(
            model.build,
            lambda samples: model.rows(0, samples),
            sequence_length=model.sequence,
            global_batch_size=BATCH,
            cluster=MIXTURE,
            budget_s=PROFILE_BUDGET_S,
            progress=lambda line: None,
        )


def _deep(layers: int) -> Model:
    return Model(width=WIDTH, layers=layers, vocabulary=VOCABULARY)


def _planned(planner: Callable[[Profile], Plan], profile: Profile, layers: int) -> Plan | None:
    """A plan for so many layers; their profile is that of a few, for all are alike."""
    anatomy = split_into_units(gpumix.build(_deep(layers).build, 0))
    model = profile.model.model_copy(
        update={
            "fingerprint": anatomy.fingerprint(),
            "calls": tuple(unit.name for unit in anatomy.units),
            "kind_of_call": profile.model.kind_of_call[:1] * layers,
        }
    )
    try:
        return planner(profile.model_copy(update={"model": model}))
    except NoFeasiblePlanError:
        return None


def _trains(planned: Callable[[int], Plan | None], layers: int) -> bool:
    plan = planned(layers)
    if plan is None:
        return False
    taking_part = {worker.device for worker in plan.workers}
    devices = tuple(d for d in MIXTURE.devices if d.id in taking_part)
    cluster = MIXTURE.model_copy(update={"devices": devices})
    return fits(engine_attempt(cluster, _deep(layers), plan))


def _even_trains(profile: Profile, layers: int) -> bool:
    """Micro-batches of one sample, whatever the planner thinks of it."""
    setting = _even_setting(layers)
    plan = setting.plan(gpumix.build(setting.model.build, 0), 3, "layered")
    return fits(engine_attempt(MIXTURE, setting.model, plan))


def _fsdp_trains(layers: int) -> bool:
    return fits(fsdp_attempt(MIXTURE, _even_setting(layers)))


def _even_setting(layers: int) -> Setting:
    ranks = len(MIXTURE.devices)
    each = BATCH // ranks
    return Setting(_deep(layers), ranks, each, micro_batches=each, recompute=True)


def _without(later: Sequence[tuple[str, str, Any]]) -> Space:
    """Layers at ZeRO stage 3, without some techniques."""
    settings: dict[str, tuple[Any, ...]] = {"zero_stages": (3,), "orders": ("layered",)}
    for _, field, value in later:
        has = settings.get(field, getattr(EVERYTHING, field))
        settings[field] = tuple(other for other in has if other != value)
    return Space(**settings)


def _told(cluster: Cluster) -> str:
    sizes = [cluster.class_named(d.device_class).memory_bytes for d in cluster.in_rank_order()]
    return ", ".join(show_bytes(size) for size in sizes)


if __name__ == "__main__":
    main()
