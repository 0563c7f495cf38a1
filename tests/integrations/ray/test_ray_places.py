"""Who is which rank of a Ray cluster, and what is said of workers that are not there."""

from __future__ import annotations

import json
import os
import sys
import time
from unittest import mock

import pytest

from helpers.errors import raises

pytest.importorskip("ray")

from gpumix.hardware.host.environment import place_settings
from gpumix.integrations.ray.placement import (
    RankPlace,
    WorkerReport,
    Workers,
    assign_ranks,
    choose_error,
    list_wanted_workers,
    make_placement_error,
)
from gpumix.integrations.ray.worker import JobRank, select_numbers
from gpumix.schema.errors import (
    InputError,
    MachineError,
    NoFeasiblePlanError,
    RankLost,
    TrainingError,
)


def on(node: str, *gpus: str) -> WorkerReport:
    return WorkerReport(node, f"host-{node}", f"10.0.0.{ord(node[0])}", gpus)


@pytest.fixture
def own_environment():
    """A rank sets variables of the process that it is, which is that of the tests here."""
    with mock.patch.dict(os.environ):
        yield


def test_workers_are_named_by_their_accelerator_or_have_labels_of_their_own():
    own = Workers(1, {"rack": "a"}, {"CPU": 2, "fast": 1})
    found = list_wanted_workers({"A100": 2, "mine": own})
    assert [one.name for one in found] == ["A100", "A100", "mine"]
    assert found[0].workers.labels == {"ray.io/accelerator-type": "A100"}
    assert found[0].workers.resources == {"CPU": 1, "GPU": 1}
    assert str(found[2]) == "'mine' (2 CPU, 1 fast, rack=a)"


@pytest.mark.parametrize("workers", [{}, {"A100": 0}, {"A100": 1.5}])
def test_there_must_be_some(workers):
    with pytest.raises(InputError):
        list_wanted_workers(workers)


def test_ranks_of_a_node_follow_each_other_by_their_gpus():
    order = assign_ranks([on("a", "10"), on("b", "0"), on("a", "2"), on("b", "1"), on("a", "3")])
    assert [number for number, _ in order] == [2, 4, 0, 1, 3]
    told = [place for _, place in order]
    assert [place.rank for place in told] == list(range(5))
    assert [(p.local_rank, p.local_world) for p in told] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert {place.gpus for place in told[:3]} == {("2", "3", "10")}
    assert {place.address for place in told} == {"10.0.0.97"}


def test_on_one_node_ranks_meet_on_loopback():
    order = assign_ranks([on("a"), on("a")])
    assert [(number, place.rank) for number, place in order] == [(0, 0), (1, 1)]
    assert {place.address for _, place in order} == {"127.0.0.1"}


def test_a_worker_has_one_gpu():
    with raises(InputError, code="ray-worker-gpu-count", what=2):
        assign_ranks([on("a", "0", "1")])


def test_ranks_find_what_torchrun_would_tell_them():
    place = RankPlace(3, 5, 1, 2, "10.0.0.1", 29500, ("4", "7"))
    assert place_settings(**vars(place)) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "4,7",
    }
    assert "CUDA_VISIBLE_DEVICES" not in place_settings(**vars(RankPlace(0, 1, 0, 1, "h", 1)))


def test_what_is_missing_in_the_cluster_is_named():
    nodes = [
        {"Alive": True, "Labels": {"ray.io/accelerator-type": "T4"}, "Resources": {"GPU": 4.0}},
        {"Alive": False, "Labels": {}, "Resources": {"fast": 8.0}},
    ]
    asked = list_wanted_workers({"A100": 2, "mine": Workers(1, {}, {"fast": 1})})
    error = make_placement_error(asked, nodes, 3)
    assert "3 workers within 3 s" in error.what
    assert "'A100'" in error.why and "there are 0 in the cluster, 2 wanted" in error.why
    assert "'mine'" in error.why
    enough = list_wanted_workers({"any": Workers(2, {}, {"GPU": 1})})
    assert make_placement_error(enough, nodes, 3).why == "others use what would be enough"


def test_the_error_that_others_followed_from_is_told():
    lost, own = RankLost("rank 1 is gone"), NoFeasiblePlanError("it does not fit")
    assert choose_error({0: lost, 1: own}) is own
    assert own.where == "rank 1"
    told = choose_error({0: lost, 2: ValueError("of the user's")})
    assert isinstance(told, TrainingError) and told.what.endswith("ValueError: of the user's")
    assert told.where == "rank 2"


def test_numbers_of_a_step():
    event = {"step": 3, "loss": 0.5, "shares": {}, "event": "x", "resumed": True}
    assert select_numbers(event) == {"step": 3, "loss": 0.5}


def test_a_job_rank_runs_gpumix_and_reads_what_it_printed(tmp_path, own_environment):
    rank, found = JobRank(), []
    line = '{"event": "step", "time": 1.0, "step": '
    (tmp_path / "metrics.jsonl").write_text(line + "1}\n")
    place, arguments = RankPlace(0, 1, 0, 1, "127.0.0.1", 1), ["train", "no.yaml", "--json"]
    rank.begin(place, arguments, str(tmp_path), "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(line + "1}\n" + line + '2}\n{"st')
    while (look := rank.look()).code is None:
        time.sleep(0.05)
        found += look.metrics
    found += look.metrics
    assert look.code == InputError.exit_code
    assert "no.yaml" in look.said
    assert look.told["error"] == "InputError" and "no.yaml" in json.dumps(look.told)
    assert found == [json.loads(line + "2}")]
    rank.end()


def test_a_folder_that_a_host_does_not_have(tmp_path, own_environment):
    with raises(InputError, code="folder-not-on-worker", what=tmp_path / "none"):
        JobRank().begin(RankPlace(0, 1, 0, 1, "h", 1), [], str(tmp_path / "none"), None)


def test_without_ray_the_line_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "gpumix.integrations.ray", raising=False)
    monkeypatch.setattr(
        "gpumix.integrations.common.optional_dependency.find_spec", lambda name: None
    )
    with pytest.raises(MachineError) as found:
        import gpumix.integrations.ray  # noqa: F401
    assert found.value.fix.startswith('pip install ".[ray]"')
