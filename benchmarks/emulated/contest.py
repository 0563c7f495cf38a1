"""gpumix on unequal devices, against what a user of torch reaches there and what the devices reach
alone.

Two splits of the batch can be made by hand: an even one, and one in proportion to the devices'
speed; DDP and FSDP2 hold the state evenly in both. For each split all ways to run it are tried, and
the fastest that fits the devices' memory takes part, in alternating rounds with gpumix by its own
plan. Devices that the plan leaves out are left out of both; their speed alone still counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import gpumix
from common import Figures
from compared.search import Found
from emulated.alone import Alone, each_alone
from emulated.attempts import fastest_way
from emulated.contestants import ByPlan, Contestant, OnTorch
from emulated.results import Results, plan_line
from emulated.rounds import Study, profiled
from emulated.setting import Setting
from emulated.ways import Way
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.processes.local_launcher import launch

GPUMIX, EVEN, PROPORTIONAL = "gpumix", "best even", "best proportional"
# Steps vary by less than 1 % where no device falls behind its speed.
EFFICIENCY_TOLERANCE = 0.02


@dataclass(frozen=True)
class Size:
    """How much is measured. `every`: try ways too that others cover."""

    rounds: int
    steps: int
    every: bool = False


@dataclass(frozen=True)
class Contest:
    """What was found. `fleet`: the setting without the devices that the plan leaves out; `found`:
    the ways that were tried, by split; `alone`: by device id, also of those left out."""

    setting: Setting
    fleet: Setting
    profile: Profile
    plan: Plan
    found: dict[str, Found[Way]]
    alone: dict[str, Alone]
    results: Results

    @property
    def tokens_per_s(self) -> float:
        return self.results.tokens_per_s(GPUMIX)

    def speedup(self, split: str) -> float | None:
        """Against the fastest way of a split; None if none fits."""
        if self.found[split].best is None:
            return None
        return self.tokens_per_s / self.results.tokens_per_s(split)

    @property
    def ideal_speedup(self) -> float:
        """Of speeds in proportion to an even split of the same devices, by their FLOP/s alone."""
        classes = [self.fleet.class_of(rank) for rank in range(len(self.fleet.devices))]
        rates = [device_class.emulate_flops_per_s or 0.0 for device_class in classes]
        slowest = max(n / rate for n, rate in zip(self.fleet.even(), rates))
        return slowest * sum(rates) / self.fleet.global_batch

    @property
    def efficiency(self) -> float:
        """The fleet's speed over the sum of its devices, each alone in its best setting."""
        return self.tokens_per_s / sum(alone.best for alone in self.alone.values())

    @property
    def efficiency_same_mode(self) -> float:
        """The same, where devices alone recompute if they do so in the plan."""
        keeps = {w.device for w in self.plan.workers if not w.mode.recompute}
        left_out = self.alone.keys() - {w.device for w in self.plan.workers}
        same = (
            alone.best if device in keeps | left_out else alone.recomputing
            for device, alone in self.alone.items()
        )
        return self.tokens_per_s / sum(same)

    @property
    def vs_prediction(self) -> float:
        assert self.plan.prediction is not None
        return self.tokens_per_s / self.plan.prediction.tokens_per_s

    @property
    def overruns(self) -> int:
        """In runs that count, and in those of devices alone."""
        return self.results.overruns + sum(alone.overruns for alone in self.alone.values())

    def __str__(self) -> str:
        speeds = [alone.best for alone in self.alone.values()]
        lines = [self.results.table(GPUMIX), plan_line(self.plan)]
        lines += [f"{split}, as tried:\n{found}" for split, found in self.found.items()]
        added = " + ".join(f"{speed:.1f}" for speed in speeds)
        lines.append(f"each device alone: {added} = {sum(speeds):.1f} tokens/s")
        return "\n".join(lines)


def hold(
    setting: Setting,
    size: Size,
    *,
    splits: Sequence[str] = (EVEN, PROPORTIONAL),
    recomputing_alone: bool = False,
    recorded: bool = False,
    doubtful: bool = False,
) -> Contest:
    """Profile, plan, find the best of each split, and measure all in turns.

    Args:
        recomputing_alone: measure devices alone with recompute too, for `efficiency_same_mode`.
        recorded: one step of gpumix in detail.
        doubtful: it may be that no way of a split fits, nor the whole model on one device.
    """
    profile: Profile = launch(profiled, setting.devices, setting)[0]
    plan = gpumix.plan(profile, setting.global_batch)
    fleet = setting.of_devices(worker.device for worker in plan.workers)
    plan = plan.for_devices([device.id for device in fleet.devices])
    alone = each_alone(setting, recomputing=recomputing_alone)
    samples = {EVEN: fleet.even(), PROPORTIONAL: fleet.proportional()}
    found = {
        split: fastest_way(fleet, samples[split], every=size.every, doubtful=doubtful)
        for split in splits
    }
    contestants: list[Contestant] = [ByPlan(GPUMIX, plan, deferred=doubtful)]
    for split, ways in found.items():
        if ways.best is not None:
            contestants.append(OnTorch(split, samples[split], ways.best.way))
    study = Study(fleet, tuple(contestants), size.rounds, size.steps, recorded)
    return Contest(setting, fleet, profile, plan, found, alone, Results.of(study))


def figures_of(contests: Sequence[Contest]) -> Figures:
    """The worst of all contests. A split that fits in none of them has no figure: null."""
    figures: Figures = {
        f"speedup_vs_{split.replace(' ', '_')}": min(
            (found for c in contests if split in c.found and (found := c.speedup(split))),
            default=None,
        )
        for split in (EVEN, PROPORTIONAL)
    }
    return figures | {"fleet_efficiency": min(contest.efficiency for contest in contests)}


def refuse_impossible(contests: Sequence[Contest]) -> int:
    """Tell of each fleet that was faster than its devices alone; the exit code that says so."""
    beyond = [c.efficiency for c in contests if c.efficiency > 1 + EFFICIENCY_TOLERANCE]
    for efficiency in beyond:
        print(
            f"fleet efficiency {efficiency:.3f}: no fleet is faster than its devices alone, so "
            "this is an error of measurement, and none of these figures count; "
            f"{EFFICIENCY_TOLERANCE:.0%} are tolerated: run it again on an idle host",
            file=sys.stderr,
        )
    return int(bool(beyond))
