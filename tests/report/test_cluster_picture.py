"""The cluster on the page: who stands where, what links them, what each has of the plan."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from gpumix.planner.plan import plan as make_plan
from gpumix.report.cluster import Box, build_cluster_box
from gpumix.report.run import Run, read_run
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.link_islands import Links, PairTimes
from gpumix.schema.cluster.network import Network
from gpumix.schema.curve import Curve
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import CollectiveTimes, Profile
from helpers.plans.profiles import fleet
from helpers.runs.folders import planned, read, write_run
from helpers.runs.verbs import measured

Named = Callable[[Device], str]
FEW = Space(
    max_pipeline_stages=1, tensor_parallel_size=(1,), zero_stages=(3,), state_on=("device",)
)


def nowhere(device: Device) -> str:
    return ""


def standing(profile: Profile, *, hosts: Named, islands: Named = nowhere, racks: Named = nowhere):
    """The same devices on these hosts."""
    devices = tuple(
        d.model_copy(update={"host": hosts(d), "island": islands(d), "rack": racks(d)})
        for d in profile.cluster.devices
    )
    cluster = profile.cluster.model_copy(update={"devices": devices})
    return profile.model_copy(update={"cluster": cluster})


def timed(profile: Profile, rate: Callable[[Device, Device], float]) -> Profile:
    """Where a message of 100 MB goes from each to each at this rate."""
    devices = profile.cluster.in_rank_order()
    pairs = [
        PairTimes(
            one=one,
            other=other,
            times=Curve(sizes=(1e3, 1e8), values=(1e-5, 1e8 / rate(devices[one], devices[other]))),
        )
        for one, other in combinations(range(len(devices)), 2)
    ]
    return profile.model_copy(update={"links": Links.of(devices, pairs)})


def stated(profile: Profile, **links: str) -> Profile:
    network = Network.model_validate(links)
    cluster = profile.cluster.model_copy(update={"network": network})
    return profile.model_copy(update={"network": (), "cluster": cluster})


def a_rack(count: int = 12) -> Profile:
    """Four classes on three hosts, two of them in one rack, one of them with islands."""
    standing_so = standing(
        fleet(count),
        hosts=lambda d: {"a100": "dgx", "a6000": "lab", "l4": "old", "t4": "old"}[d.device_class],
        islands=lambda d: str(d.ordinal % 2) if d.device_class == "a100" else "",
        racks=lambda d: "near" if d.device_class in ("a100", "a6000") else "far",
    )

    def rate(one: Device, other: Device) -> float:
        if one.host != other.host:
            return 3e9 if one.rack == other.rack else 4e8
        if one.island and one.island == other.island:
            return 2.4e11
        return 2.4e10 if one.device_class == other.device_class else 8e9

    return timed(standing_so, rate)


def run_of(folder, profile: Profile, plan: Plan | None = None, batch: int = 64) -> Run:
    plan = plan or make_plan(profile, batch, space=FEW)
    write_run(folder, plan=plan)
    profile.save(folder / "profile.json")
    return read_run(folder)


def inner(box: Box) -> dict[str, Box]:
    return {one.name: one for one in box.boxes}


def test_boxes_are_racks_hosts_and_islands_with_their_links(tmp_path):
    profile = a_rack()
    whole = build_cluster_box(make_plan(profile, 64, space=FEW), profile)
    assert (whole.level, whole.hosts, whole.devices) == ("cluster", 3, 12)
    racks = inner(whole)
    assert racks.keys() == {"near", "far"}
    assert inner(racks["near"]).keys() == {"dgx", "lab"}
    dgx, old = inner(racks["near"])["dgx"], inner(racks["far"])["old"]
    assert {name: len(box.members) for name, box in inner(dgx).items()} == {"0": 2, "1": 1}
    rates = {
        name: (box.link.bytes_per_s.least, box.link.bytes_per_s.most)
        for name, box in {
            "racks": whole,
            "near": racks["near"],
            "dgx": dgx,
            "island": inner(dgx)["0"],
            "old": old,
        }.items()
        if box.link is not None
    }
    assert {name: tuple(map(round, ends)) for name, ends in rates.items()} == {
        "racks": (4e8, 4e8),
        "near": (3e9, 3e9),
        "dgx": (2.4e10, 2.4e10),
        "island": (2.4e11, 2.4e11),
        "old": (8e9, 2.4e10),
    }
    assert racks["far"].link is None  # one host alone
    text = read(run_of(tmp_path, profile)).text
    for told in (
        "400 MB/s  between racks, measured",
        "3 GB/s  between hosts, measured",
        "24 GB/s  between islands, measured",
        "240 GB/s  inside, measured",
        "8 GB/s to 24 GB/s  inside, measured",
    ):
        assert told in text


@pytest.mark.parametrize("count", [4, 8, 24])
def test_what_devices_have_is_the_plans(tmp_path, count):
    profile = a_rack(count)
    plan = make_plan(profile, 64, space=FEW)
    members = build_cluster_box(plan, profile).all_members
    assert sorted(m.device for m in members) == sorted(d.id for d in profile.cluster.devices)
    workers = {worker.device: worker for worker in plan.workers}
    for member in members:
        if member.device in workers:
            assert member.part is not None
            assert member.part.computed == workers[member.device].samples / 64
            assert member.part.stored == pytest.approx(workers[member.device].state_share)
        else:
            assert member.part is None
    known = [member.part for member in members if member.part is not None]
    assert sum(part.computed for part in known) == pytest.approx(1)
    assert sum(part.stored or 0.0 for part in known) == pytest.approx(1)
    found = read(run_of(tmp_path, profile, plan))
    drawn = [a for a in found.named("div") if a.get("class") in ("member", "member out")]
    assert len(drawn) == count
    for worker in plan.workers:
        assert f"computes {worker.samples / 64:.1%}, {worker.samples:,} samples" in found.text


def test_many_alike_are_one(tmp_path):
    profile = stated(
        standing(fleet(128), hosts=lambda d: f"{d.device_class}-{d.ordinal // 4}"),
        inside="pcie4",
        between="25GbE",
    )
    workers = make_plan(fleet(128), 512, space=FEW)
    whole = build_cluster_box(workers, profile)
    assert (whole.devices, whole.hosts) == (128, 32)
    assert len(whole.boxes) == 4  # one for the hosts of each class
    assert sum(
        member.count * (1 + len(box.alike)) * member.part.computed
        for box in whole.boxes
        for member in box.members
        if member.part is not None
    ) == pytest.approx(1)
    text = read(run_of(tmp_path, profile, workers)).text
    assert "4 × a100" in text
    assert "and 7 equal hosts, 32 GPUs in total" in text
    assert "between hosts, stated 25GbE" in text and "inside, stated pcie4" in text


def test_rates_are_those_that_the_cost_model_goes_by(tmp_path):
    """What was timed counts before what is stated; of two devices alone only messages are timed."""
    profile = stated(measured(), inside="10 GB/s")
    assert "10 GB/s  inside, stated " in read(run_of(tmp_path / "stated", profile)).text
    message = CollectiveTimes(
        operation="send",
        form="native",
        group="inside",
        times=Curve(sizes=(1e3, 1e6), values=(1e-5, 4e-3)),
    )
    profile = profile.model_copy(update={"network": (message,)})
    assert "250 MB/s  inside, measured" in read(run_of(tmp_path / "timed", profile)).text
    assert "The speed of its links is unknown" in read(run_of(tmp_path / "not", measured())).text


def test_without_a_profile_the_plan_tells_who_is_there(tmp_path):
    plan = planned()
    plan.save(tmp_path / "plan.json")
    found = read(read_run(tmp_path))
    assert len([a for a in found.named("div") if a.get("class") == "member"]) == 3
    assert "The speed of its links is unknown" in found.text


def test_devices_without_a_part_are_told(tmp_path):
    profile = measured()
    plan = make_plan(
        profile.model_copy(update={"cluster": profile.cluster.only(["quick-0"])}), 8, space=FEW
    )
    found = read(run_of(tmp_path, profile, plan))
    assert len([a for a in found.named("div") if a.get("class") == "member out"]) == 2
    assert "not used" in found.text


@pytest.mark.parametrize("name", ["</p><script>alert(1)</script>", '"><img src=x onerror=a()>'])
def test_names_of_places_are_text(tmp_path, name):
    profile = standing(
        measured(),
        hosts=lambda d: "host",
        islands=lambda d: f"{name} {d.id}",
        racks=lambda d: name,
    )
    found = read(run_of(tmp_path, profile, planned()))
    assert found.text.count(name) >= 2
    assert not {"script", "img"} & {tag for tag, _ in found.tags}
