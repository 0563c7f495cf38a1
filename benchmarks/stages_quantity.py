"""Whether `optimal`, which weighs stages, is ever slower than one class alone, or an even split.

1 + 3, 3 + 5 and 7 + 1 devices of two classes, four in a host: layers that Cephalo timed on real
GPUs (`published/cephalo.py`), of models that leave devices much or little room; decoders on cards
of the catalogue, as `gpumix plan --model 3B --cluster "1x rtx3090; 3x rtx3060"` plans them. Each
model meets each mixture; links between hosts, and batches, take turns. Rivals, in the same space of
techniques and by the same cost model:

* the optimal plan on each class alone, of one stage or of several;
* `even`: one stage, equal batches and shares;
* even pipelines: equal groups of devices, as many layers on each, equal shares; for every number of
  stages that divides the devices, schedule (also interleaved and zero-bubble, where their times are
  known), micro-batch size and ZeRO stage 0, 1 or 3.

Then jobs run on emulated devices: each mixture with room for everything, and with so little that
the state must be divided. There `optimal` takes turns with the `NEAREST` rivals that fit, by
prediction.

    python benchmarks/stages_quantity.py [--json] [--steps 3] [--rounds 2] [--every 1]

Figures: `cases`, of which `cases_in_stages` have several stages in the plan of `optimal` and
`cases_alone` are those in which no rival fits; `cases_lost` (a rival is faster, or fits where
`optimal` does not); `worst_ratio` (its step / that of the best rival); the same of those that ran:
`measured`, of which in `measured_in_stages` the plan of `optimal` has several stages,
`measured_lost` (by more than `NOISE`), `worst_measured_ratio`; `overruns` (must be 0 to count). The
exit code is 1 if they do not count, or one is beyond `LIMITS`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product

from common import make_parser, print_counted
from emulated.even_stages import EvenStages
from emulated.turns import Turns, job_file, llama, take_turns
from gpumix.cost.step_time import can_predict_mode
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster as described
from gpumix.hardware.estimates.decoder_shapes import Decoder, make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.baselines.best_subset import iterate_class_requests
from gpumix.planner.common.strategy import PlanRequest, get_prediction, is_within_memory
from gpumix.planner.pipeline_parallel.candidate import get_stages_per_group
from gpumix.planner.pipeline_parallel.stage_modes import NO_TENSOR_PARALLEL, StageModes
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.cluster.network import Network, parse_link
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan, Schedule, ZeroStage
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController
from published import NotHereError, cephalo

MIXTURES = ((1, 3), (3, 5), (7, 1))
A_HOST = 4
TIMED = (
    (cephalo.Setting("bert_large", "fp32"), ("a6000", "l4")),
    (cephalo.Setting("gpt_2.7b", "fp16"), ("a6000", "l4")),
    (cephalo.Setting("llama_3b", "fp16"), ("a6000", "t4")),
    (cephalo.Setting("llama_7b", "fp16"), ("a6000", "p40")),
)
ESTIMATED = ((0.5e9, ("rtx3090", "rtx3060")), (3e9, ("a100-40gb-pcie", "v100-32gb-pcie")))
TOKENS = 1024  # a sample, of estimates
LINKS = ("10GbE", "100GbE")
BATCHES = (24, 96)
SPACE = EVERYTHING.leaving_out()

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")
ALIKE = 1e-9
NOISE, NEAREST = 0.03, 2
LIMITS = {"cases_lost": 0, "measured_lost": 0}

WIDTH, LENGTH = 128, 64


@dataclass(frozen=True)
class Job:
    """What is trained on emulated devices of two classes, `fast` and `slow`.

    Attributes:
        mixture: how many there are of each class; their speeds are so low that two cores suffice.
        memory: of each class.
    """

    name: str
    mixture: tuple[int, int]
    gflops: tuple[float, float]
    memory: tuple[str, str]
    layers: int
    batch: int

    @property
    def cluster(self) -> list[dict[str, str | int]]:
        return [
            {"class": name, "count": n, "emulate": f"{rate} GFLOP/s", "memory": memory}
            for name, n, rate, memory in zip(CLASSES, self.mixture, self.gflops, self.memory)
        ]

    def __str__(self) -> str:
        return f"emulated, {_mixed(CLASSES, self.mixture)}, {self.name}"


CLASSES = ("fast", "slow")
MUCH = ("512 MiB", "512 MiB")
JOBS = (
    Job("much room", (1, 3), (3.0, 1.2), MUCH, 6, 12),
    Job("little room", (1, 3), (3.0, 1.2), ("10 MiB", "5 MiB"), 6, 12),
    Job("much room", (3, 5), (1.0, 0.4), MUCH, 8, 16),
    Job("little room", (3, 5), (1.0, 0.4), ("8 MiB", "4 MiB"), 8, 16),
    Job("much room", (7, 1), (0.8, 0.3), MUCH, 8, 16),
    Job("little room", (7, 1), (0.8, 0.3), ("8 MiB", "4 MiB"), 8, 16),
)


@dataclass(frozen=True)
class Case:
    """Devices, a model, and the batch that they are to train."""

    name: str
    profile: Profile
    batch: int

    def request(self) -> PlanRequest:
        return PlanRequest(global_batch=self.batch, space=SPACE)

    @cached_property
    def optimal(self) -> Plan | None:
        return planned(self.profile, "optimal", self.request())

    @cached_property
    def rivals(self) -> dict[str, Plan]:
        """Those that fit."""
        found = {
            f"only {name}": planned(self.profile, "optimal", alone)
            for name, alone in iterate_class_requests(self.profile, self.request())
        }
        found["even"] = planned(self.profile, "even", self.request())
        found["even pipeline"] = even_pipeline(self.profile, self.batch)
        return {name: plan for name, plan in found.items() if plan is not None}

    @property
    def ratio(self) -> float:
        """The step of `optimal` / that of the best rival; 0 if none fits."""
        if not self.rivals:
            return 0.0
        best = min(get_prediction(plan).step_s for plan in self.rivals.values())
        return get_prediction(self.optimal).step_s / best if self.optimal else float("inf")

    @property
    def stages(self) -> int:
        return len(self.optimal.stages) if self.optimal else 0

    def __str__(self) -> str:
        rivals = ", ".join(f"{n} {get_prediction(p).step_s:.3f} s" for n, p in self.rivals.items())
        own = f"{get_prediction(self.optimal).step_s:.3f} s" if self.optimal else "none"
        return f"{self.name}: {own} in {self.stages} stages; {rivals or 'no rival fits'}"


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    every = []
    for case in list(cases())[:: arguments.every]:
        every.append(case)
        mark = " LOST" if case.ratio > 1 + ALIKE else ""
        print(f"{case}{mark}", flush=True)
    ratios, in_stages, overruns = [], 0, 0
    for job in JOBS:
        case, turns = run(job, arguments.steps, arguments.rounds)
        in_stages += case.stages > 1
        own = turns.pop("optimal")
        ratios.append(own.step_s / min((t.step_s for t in turns.values()), default=float("inf")))
        overruns += own.overruns + sum(t.overruns for t in turns.values())
    return print_counted(
        {
            "cases": len(every),
            "cases_in_stages": sum(case.stages > 1 for case in every),
            "cases_alone": sum(not case.rivals for case in every),
            "cases_lost": sum(case.ratio > 1 + ALIKE for case in every),
            "worst_ratio": max(case.ratio for case in every),
            "measured": len(ratios),
            "measured_in_stages": in_stages,
            "measured_lost": sum(ratio > 1 + NOISE for ratio in ratios),
            "worst_measured_ratio": max(ratios),
            "overruns": overruns,
            "seconds": round(time.perf_counter() - begun, 1),
        },
        as_json=arguments.json,
        limits=LIMITS,
    )


def cases() -> Iterator[Case]:
    """All that are planned."""
    turn = count()
    for (setting, pair), mixture in product(TIMED, MIXTURES):
        number = next(turn)
        between, batch = LINKS[number % 2], BATCHES[number // 2 % 2]
        network = Network(inside=parse_link("pcie4"), between=parse_link(between))
        try:
            counts = dict(zip(pair, mixture))
            profile = cephalo.profile(setting, counts, network=network, host_devices=A_HOST)
        except NotHereError as error:
            print(error)
            break
        yield Case(f"{setting.name}, {_mixed(pair, mixture)}, {between}", profile, batch)
    for (parameters, pair), mixture in product(ESTIMATED, MIXTURES):
        number = next(turn)
        between, batch = LINKS[number % 2], BATCHES[number // 2 % 2]
        hosts = "; ".join(f"{n}x {card}" for card, n in zip(pair, mixture))
        there = described(hosts, "auto", between)
        profile = estimated(make_llama_like(parameters), there)
        yield Case(f"{parameters / 1e9:g}B, {_mixed(pair, mixture)}, {between}", profile, batch)


def estimated(decoder: Decoder, there: Cluster) -> Profile:
    """The profile of a decoder on cards that need not be here."""
    return estimate_profile(
        lambda dtype: decoder.model(TOKENS, dtype, "llama"), there, sequence_length=TOKENS
    )


def planned(profile: Profile, strategy: str, request: PlanRequest) -> Plan | None:
    try:
        return STRATEGIES[strategy](profile, request)
    except (InputError, NoFeasiblePlanError):
        return None


def even_pipeline(profile: Profile, batch: int) -> Plan | None:
    """The fastest that fits; None if none does, or the profile knows nothing of stages."""
    if not profile.model.needs:
        return None
    devices = profile.cluster.in_rank_order()
    plans = (
        way.plan(profile, row)
        for way in _even_ways(profile, batch)
        for row in (devices, devices[::-1])
    )
    fitting = [plan for plan in plans if is_within_memory(get_prediction(plan).workers)]
    return min(fitting, key=lambda plan: get_prediction(plan).step_s, default=None)


def _even_ways(profile: Profile, batch: int) -> Iterator[EvenStages]:
    devices, most = len(profile.cluster.devices), len(profile.model.calls)
    largest = min(of.largest_micro_batch or batch for of in profile.classes)
    names = [of.device_class for of in profile.classes]
    manners = StageModes({NO_TENSOR_PARALLEL: profile}, SPACE)
    schedules = [one for one in SCHEDULES if manners.find_refusal(names, one) is None]
    modes = [
        mode
        for mode in (Mode(), Mode(recompute=False))
        if all(can_predict_mode(profile, name, mode) for name in names)
    ]
    for stages in (n for n in range(2, min(devices, most) + 1) if devices % n == 0):
        part = batch * stages // devices
        sizes = [size for size in range(1, min(largest, part) + 1) if part % size == 0]
        stages_of_zero: tuple[ZeroStage, ...] = (0,) if stages == devices else (0, 1, 3)
        for size, schedule, mode, zero in product(sizes, schedules, modes, stages_of_zero):
            if schedule == "zero-bubble" and mode.recompute:
                continue  # it splits the backward of graphs that are kept
            if stages * get_stages_per_group(schedule) <= most:
                yield EvenStages(stages, batch, size, schedule, mode, zero)


def run(job: Job, steps: int, rounds: int) -> tuple[Case, dict[str, Turns]]:
    """`optimal` and its rivals on emulated devices, measured."""
    with job_file(
        llama(width=WIDTH, layers=job.layers),
        LENGTH,
        cluster=job.cluster,
        global_batch_size=job.batch,
    ) as path:
        pipeline = JobController.of_file(path, [], debug=True)
        case = Case(str(job), pipeline.profile(), job.batch)
        print(case, flush=True)
        assert case.optimal is not None
        turns: dict[str, Turns] = {}
        near = sorted(case.rivals.items(), key=lambda rival: get_prediction(rival[1]).step_s)[
            :NEAREST
        ]
        for _ in range(rounds):
            take_turns(pipeline, {"optimal": case.optimal} | dict(near), turns, steps)
    told = ", ".join(f"{name} {found.step_s:.3f} s" for name, found in turns.items())
    print(f"  measured: {told}", flush=True)
    return case, turns


def _mixed(pair: tuple[str, str], mixture: tuple[int, int]) -> str:
    return " + ".join(f"{n} {name}" for name, n in zip(pair, mixture))


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps of each plan that runs"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="plan every so many-th case only")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
