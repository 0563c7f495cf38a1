"""How close do steps with parameters in system RAM come to what compute and links allow?

A GPT-2 on emulated devices, whose links to the host carry a stated rate each way; all parameters
and their gradients are in memory that the devices of the host share, from which each copies a block
twice a step. Six mixtures: devices alike, 2 : 1, 4 : 2 : 1, one alone, links of unlike rates, and
links so slow that they set the time.

    python benchmarks/pool.py [--json] [--steps 3] [--only 'four two one']

A step is compared with the longest of three that nothing can beat: the batch over the sum of the
devices' measured speeds in the plan's micro-batches; each device's bytes over its link's rate, the
busier direction; and the update of its share by the host. In `four two one` an equal split, with
parameters on the host too, runs in turns with the plan.

Figures: `worst_vs_bound` (the least bound over step), `fetches_per_block` (the most of any plan),
`vs_equal_split` (speed over that of the equal split), `worst_prediction_error`, `mixtures`;
`overruns`: with any, times mean nothing, and the exit code is 1, as where a figure misses its bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from statistics import median

import numpy as np

import gpumix
from common import Figures, make_parser, print_figures
from emulated.contestants import ByPlan
from emulated.results import aligned
from emulated.rounds import Outcome, Study, joined, profiled, work
from emulated.setting import Setting
from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.predict import predict
from gpumix.cost.step_time import compute_work_seconds
from gpumix.cost.traffic import count_traffic
from gpumix.hardware.device import open_device
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.processes.local_launcher import RankAddress, launch

WIDTH, LAYERS, HEADS, SEQUENCE = 128, 12, 4, 64
MEMORY = "256 MiB"
SPACE = Space(parameters_on=("host",), leave_out=False)
POOL, EQUAL = "parameters on the host", "equal split"
LEAST_VS_BOUND, LEAST_VS_EQUAL, MOST_ERROR = 0.9, 1.5, 0.1
UNEQUAL = "four two one"
# By mixture: (FLOP/s, bytes/s of the link) of each device, and the global batch.
MIXTURES: dict[str, tuple[list[tuple[float, float]], int]] = {
    "alike": ([(4e9, 20e6)] * 2, 24),
    "two one": ([(6e9, 20e6), (3e9, 20e6)], 24),
    UNEQUAL: ([(6e9, 20e6), (3e9, 20e6), (1.5e9, 20e6)], 28),
    "alone": ([(6e9, 20e6)], 16),
    "unlike links": ([(6e9, 40e6), (3e9, 10e6)], 24),
    "slow links": ([(6e9, 6e6), (3e9, 6e6)], 12),
}


@dataclass(frozen=True)
class Measured:
    """What was found in a mixture; seconds of a step."""

    name: str
    step_s: float
    bounds_s: dict[str, float]
    predicted_s: float
    fetches: int
    equal_s: float | None
    overruns: int

    @property
    def vs_bound(self) -> float:
        return max(self.bounds_s.values()) / self.step_s

    @property
    def error(self) -> float:
        return self.step_s / self.predicted_s - 1


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    found = list(_measure_all(arguments.only or list(MIXTURES), arguments.steps))
    _show(found)
    equal = [one.equal_s / one.step_s for one in found if one.equal_s is not None]
    figures: Figures = {
        "mixtures": len(found),
        "worst_vs_bound": round(min(one.vs_bound for one in found), 4),
        "fetches_per_block": max(one.fetches for one in found),
        "vs_equal_split": round(min(equal), 3) if equal else None,
        "worst_prediction_error": round(max(abs(one.error) for one in found), 4),
        "overruns": sum(one.overruns for one in found),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print_figures(figures, as_json=arguments.json)
    missed = (
        min(one.vs_bound for one in found) < LEAST_VS_BOUND
        or max(abs(one.error) for one in found) > MOST_ERROR
        or any(speedup < LEAST_VS_EQUAL for speedup in equal)
        or any(one.overruns for one in found)
    )
    return int(missed)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured of each plan")
    parser.add_argument("--only", nargs="+", choices=MIXTURES, help="these mixtures")
    return parser.parse_args()


def _measure_all(names: list[str], steps: int) -> Iterator[Measured]:
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        yield _measure(name, steps)


def _measure(name: str, steps: int) -> Measured:
    setting = _setting(name)
    profile: Profile = launch(profiled, setting.devices, setting)[0]
    plan = gpumix.plan(profile, setting.global_batch, space=SPACE)
    plan = plan.for_devices([device.id for device in setting.devices])
    plan = plan.model_copy(update={"prediction": predict(profile, plan)})
    contestants = [ByPlan(POOL, plan)]
    if name == UNEQUAL:
        contestants.append(ByPlan(EQUAL, _split_equally(plan, setting)))
    study = Study(setting, tuple(contestants), rounds=1, steps=steps)
    outcomes: list[Outcome] = launch(work, setting.devices, study)
    runs = {run.system: run for run in outcomes[0].runs}
    assert plan.prediction is not None
    equal = runs.get(EQUAL)
    return Measured(
        name,
        median(runs[POOL].step_s),
        dict(_bounds(profile, plan, setting)),
        plan.prediction.step_s,
        max(launch(_count_fetches, setting.devices, setting, plan)),
        median(equal.step_s) if equal is not None else None,
        sum(run.overruns for run in runs.values()),
    )


def _setting(name: str) -> Setting:
    rates, batch = MIXTURES[name]
    kinds = list(dict.fromkeys(rates))
    classes = tuple(
        DeviceClass(
            name=f"c{number}",
            accelerator="cpu",
            memory_bytes=MEMORY,
            emulate_flops_per_s=flops,
            emulate_link_bytes_per_s=link,
        )
        for number, (flops, link) in enumerate(kinds)
    )
    devices = tuple(
        Device(id=f"d{number}", device_class=f"c{kinds.index(one)}", ordinal=number)
        for number, one in enumerate(rates)
    )
    cluster = Cluster(classes=classes, devices=devices)
    return Setting(cluster, WIDTH, LAYERS, HEADS, batch, SEQUENCE)


def _split_equally(plan: Plan, setting: Setting) -> Plan:
    """The same plan with as many samples on each device, in micro-batches as large as they are."""
    stage = plan.stages[0]
    workers = tuple(
        worker.model_copy(
            update={
                "samples": samples,
                "micro_batch": min(samples, worker.micro_batch),
                "kept_graphs": 0,
            }
        )
        for worker, samples in zip(stage.workers, setting.even())
    )
    stage = stage.model_copy(update={"workers": workers})
    return plan.model_copy(update={"stages": (stage,), "prediction": None, "reasons": None})


def _bounds(profile: Profile, plan: Plan, setting: Setting) -> Iterator[tuple[str, float]]:
    """Seconds that no step of these devices beats, by what takes them."""
    speeds, links, updates = [], [], []
    for worker, traffic in zip(plan.workers, count_traffic(profile, plan)):
        micro = MicroBatches.of([worker.samples], [worker.micro_batch])
        computed = compute_work_seconds(profile, worker.device_class, micro, worker.mode)
        speeds.append(worker.samples / float(np.sum(computed)))
        one = setting.cluster.class_named(worker.device_class)
        assert one.emulate_link_bytes_per_s is not None
        busier = max(traffic.bytes["fetch"], traffic.bytes["put"])
        links.append(busier / one.emulate_link_bytes_per_s)
        per_element = profile.of_class(worker.device_class).host_optimizer_s_per_element or 0.0
        updates.append(per_element * worker.state_share * profile.model.parameters)
    yield "compute", plan.global_batch / sum(speeds)
    yield "links", max(links)
    yield "updates", max(updates)


def _count_fetches(seat: RankAddress, setting: Setting, plan: Plan) -> int:
    """How often a block came in one step, on this rank."""
    with joined(seat), open_device(setting.class_of(seat.rank), 0):
        engine = gpumix.prepare(gpumix.build(setting.build, 0), plan)
        contestant = ByPlan(POOL, plan)
        engine.step(contestant.batch(setting, 0, seat.rank))
        before = engine.comm.counts["fetch"]
        engine.step(contestant.batch(setting, 1, seat.rank))
        of_root = sum(1 for group in engine.groups() if "(root)" in group.label)
        blocks = sum(1 for group in engine.groups()) - of_root
        fetched = engine.comm.counts["fetch"] - before - of_root
        del engine
    return ceil(fetched / blocks)


def _show(found: list[Measured]) -> None:
    rows = [("mixture", "step", "compute", "links", "updates", "bound/step", "predicted")]
    for one in found:
        bounds = (f"{seconds:.3f} s" for seconds in one.bounds_s.values())
        rows.append(
            (
                one.name,
                f"{one.step_s:.3f} s",
                *bounds,
                f"{one.vs_bound:.3f}",
                f"{one.error:+.1%}",
            )
        )
    print(aligned(rows))


if __name__ == "__main__":
    sys.exit(main())
