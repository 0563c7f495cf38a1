"""The search for the fastest way that fits, and the ways of DDP and FSDP2 that it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from common import cluster_of
from compared.search import Tried, fastest
from compared.systems import Ddp, Fsdp
from emulated.contest import Contest, refuse_impossible
from emulated.contestants import ByPlan
from emulated.setting import Setting
from emulated.ways import Way, thriftiest, ways_of
from helpers.extended import every_second
from helpers.processes.harness import run_ranks

STEPS = 2
UNEQUAL = (4, 2)


@dataclass(frozen=True)
class Number:
    """Covers all that are larger and as even."""

    value: int

    @property
    def name(self):
        return str(self.value)

    def covers(self, other):
        return self.value <= other.value and self.value % 2 == other.value % 2


def searched(values, *, room, **options):
    tried = []

    def try_out(way):
        tried.append(way.value)
        if way.value not in room:
            return Tried(way, error="OutOfMemoryError")
        return Tried(way, step_s=float(room[way.value]))

    found = fastest([Number(value) for value in values], try_out, **options)
    return found, tried


def test_the_fastest_that_fits_is_found_and_covered_ways_are_left_out():
    found, tried = searched(range(1, 9), room={3: 30.0, 4: 20.0, 5: 1.0, 6: 1.0})
    assert tried == [1, 2, 3, 4]  # 5 to 8 are covered by 3 and 4, which fit
    assert (found.best.way.value, found.best.step_s, found.covered) == (4, 20.0, 4)
    assert "no room for 1; 2" in str(found)


def test_every_way_is_tried_on_demand():
    found, tried = searched(range(1, 9), room={3: 30.0, 5: 1.0}, every=True)
    assert tried == list(range(1, 9))
    assert found.best.way.value == 5


def test_nothing_else_is_tried_if_the_thriftiest_does_not_fit():
    found, tried = searched(range(1, 9), room={1: 1.0}, thriftiest=Number(8))
    assert tried == [8]
    assert (found.best, found.error) == (None, "OutOfMemoryError")


def test_all_others_are_tried_if_the_thriftiest_fits():
    found, tried = searched(range(1, 5), room={2: 1.0, 4: 3.0}, thriftiest=Number(4))
    assert tried == [4, 1, 2, 3]
    assert found.best.way.value == 2


def test_a_way_is_tried_before_those_that_it_covers():
    ways = ways_of((8, 4))
    assert len(set(ways)) == len(ways)
    assert {way.micro_batches for way in ways} == {1, 2, 4, 8}
    assert {way.form for way in ways if way.micro_batches == 8} == {
        Ddp(),
        Fsdp(reshard=False, whole_gradients=True),
    }
    for before, after in combinations(ways, 2):
        assert not after.covers(before) or before.covers(after)


def test_ways_that_do_more_are_covered_and_others_are_not():
    whole = Way(Fsdp(reshard=False, whole_gradients=True), 2)
    assert whole.covers(Way(Fsdp(reshard=True), 2))
    assert whole.covers(Way(Fsdp(reshard=False, whole_gradients=True), 4, recompute=True))
    assert not whole.covers(Way(Fsdp(reshard=True), 1))  # fewer micro-batches: it may be faster
    assert not whole.covers(Way(Ddp(), 4, recompute=True))
    assert not Way(Ddp(), 1, recompute=True).covers(Way(Ddp(), 4))
    assert thriftiest((8, 5)) == Way(Fsdp(reshard=True, ahead=False), 4, recompute=True)


def test_splits_follow_the_devices():
    cluster = cluster_of(("fast", 1, "8 GFLOP/s", "1 GiB"), ("slow", 2, "1 GFLOP/s", "1 GiB"))
    setting = Setting(cluster, 32, 2, 2, global_batch=11)
    assert setting.even() == (4, 4, 3)
    assert setting.proportional() == (9, 1, 1)
    left = setting.of_devices(["slow-0", "fast-0"])
    assert ([d.id for d in left.devices], left.proportional()) == (["fast-0", "slow-0"], (10, 1))


def test_samples_of_a_rank_are_those_that_its_plan_says():
    """With tensor parallelism or stages ranks have the same samples, and not those of a range."""
    setting = Setting(cluster_of(("d", 2, "1 GFLOP/s", "1 GiB")), 32, 2, 2, 6, sequence=16)
    plan = SimpleNamespace(rows_of=lambda rank: (range(2), range(4, 5)) if rank == 0 else ())
    contestant = ByPlan("ours", plan)
    whole = setting.rows(6, 6)["input_ids"]
    assert contestant.batch(setting, 1, 0)["input_ids"].tolist() == whole[[0, 1, 4]].tolist()
    assert contestant.batch(setting, 1, 1)["input_ids"].shape == (0, 16)


@pytest.mark.parametrize(("efficiency", "code"), [(1.019, 0), (1.021, 1)])
def test_a_fleet_that_is_faster_than_its_devices_ends_the_script(efficiency, code, capsys):
    contest = SimpleNamespace(efficiency=efficiency)
    assert refuse_impossible([contest]) == code
    assert ("error of measurement" in capsys.readouterr().err) == bool(code)


def test_a_speedup_against_a_split_that_does_not_fit_is_not_known():
    found, _ = searched([1], room={})
    contest = SimpleNamespace(found={"best even": found})
    assert Contest.speedup(contest, "best even") is None


@pytest.mark.parametrize("every", every_second([False, True]))
def test_unequal_batches_train_as_one_process_does_in_every_form(every):
    """The ways that gather early in two micro-batches, and the thriftiest one; or all ways."""
    setting = Setting(
        cluster_of(("device", 2, "1 GFLOP/s", "1 GiB")), 32, 2, 2, sum(UNEQUAL), sequence=16
    )
    wanted = _losses(setting, Way(), (sum(UNEQUAL),), 0)
    told = run_ranks(_losses_by_way, 2, setting, every)
    assert len(told[0]) > (15 if every else 5)
    for name, losses in told[0].items():
        parts = [losses, told[1][name]]
        assert [sum(step) for step in zip(*parts)] == pytest.approx(wanted, rel=1e-5), name


def _losses_by_way(setting, every):
    """The losses of this rank's part."""
    ways = [way for way in ways_of(UNEQUAL) if way.micro_batches > 1]
    if not every:
        early = [way for way in ways if way.micro_batches == 2 and getattr(way.form, "ahead", True)]
        ways = [*(way for way in early if not way.recompute), thriftiest(UNEQUAL)]
    return {way.name: _losses(setting, way, UNEQUAL, dist.get_rank()) for way in ways}


def _losses(setting, way, samples, rank):
    runtime = SimpleNamespace(idle=lambda: None)
    system = way.system(way.model(setting), setting, runtime)
    return [system.step(setting.batch(step, samples, rank)).item() for step in range(STEPS)]
