"""What is learnt from ranks, also from those that come to harm; in processes of their own."""

from __future__ import annotations

import time

import pytest

import gpumix
from gpumix.check import run, survey
from gpumix.check.facts.cluster import Survey
from gpumix.check.finding import Severity
from gpumix.check.judge import evaluate_survey
from gpumix.check.probes.probe import RankProbe
from gpumix.schema.reading.read import read_job
from helpers.devices.healthy import only, rank_of, wrong
from helpers.devices.probes import Apart, Dying, NotShared, Sleepy, Stuck
from helpers.runs.jobs import EMULATED, write_job

ON_TWO_HOSTS = [{**EMULATED[0], "host": "a"}, {**EMULATED[1], "host": "b"}]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def short(monkeypatch):
    """Who hangs is waited for a little only."""
    monkeypatch.setattr(survey, "CONNECT_S", 3.0)


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, cluster=ON_TWO_HOSTS)


def survey_of(job, make=RankProbe) -> Survey:
    given = run._CheckInputs(
        read_job(job), job.parent, time.monotonic() + run.LIMIT_S, make, debug=False
    )
    return run._survey_this_host(given, say=lambda _: None)


def test_an_emulated_mixture_lacks_nothing(job, tmp_path):
    before = sorted(tmp_path.iterdir())
    found = survey_of(job)
    assert wrong(found) == []
    assert [(r.rank, r.host, r.device) for r in found.ranks] == [
        (0, "a", "fast-0"),
        (1, "b", "slow-0"),
        (2, "b", "slow-1"),
    ]
    assert [pair.ranks for pair in found.pairs] == [(0, 1), (1, 2)]  # of hosts, then inside
    assert all(pair.bytes_per_s and pair.latency_s for pair in found.pairs)
    assert found.job is not None and found.job.checkpoints == 3
    assert {host: facts.shared for host, facts in found.job.on_hosts.items()} == {
        "a": None,
        "b": True,
    }
    assert sorted(tmp_path.iterdir()) == before  # nothing is left behind


@pytest.mark.extended
def test_a_rank_that_sleeps_is_named(job, short):
    """It is the only one of its kind that everybody waits for."""
    found = only(survey_of(job, make=Sleepy))
    assert (found.check, found.severity) == ("links", Severity.ERROR)
    assert (found.host, found.device) == ("b", "slow-0")
    assert "no answer within 3 s" in found.what


def test_hosts_that_do_not_reach_each_other_are_named(job, short):
    found = only(survey_of(job, make=Apart))
    assert found.what == (
        "rank 0 on a and rank 1 on b: they do not reach each other "
        "(it waited 2 s for the other in vain)"
    )
    assert "open all ports" in found.fix


@pytest.mark.extended
def test_a_rank_that_dies_is_named_with_its_last_words(job):
    found = only(survey_of(job, make=Dying))
    assert (found.check, found.host, found.device) == ("ranks", "b", "slow-1")
    assert "exit code 9: free(): invalid pointer" in found.what


@pytest.mark.extended
def test_a_folder_that_hosts_do_not_share(job):
    found = only(survey_of(job, make=NotShared))
    assert (found.check, found.host) == ("disk", "b")


def test_it_ends_in_its_time_whatever_hangs(job, monkeypatch):
    monkeypatch.setattr(run, "LIMIT_S", 6.0)
    found = evaluate_survey(survey_of(job, make=Stuck))
    assert [one.device for one in found if one.check == "ranks"] == ["fast-0", "slow-0", "slow-1"]
    assert all("no answer" in one.what for one in found if one.severity is Severity.ERROR)


@pytest.mark.extended
def test_a_model_that_cannot_be_built(tmp_path):
    """The first host tries it for all."""
    model = {"factory": "toys:no_such_model"}
    found = only(survey_of(write_job(tmp_path, cluster=ON_TWO_HOSTS, model=model)))
    assert (found.check, found.host) == ("model", "a")
    assert "has no function 'no_such_model'" in found.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpumix": "9.9"}, "it runs gpumix 9.9, the first rank "),
        ({"from_later": 1}, "it runs another copy of gpumix"),
        ({"gpumix": "9.9", "from_later": 1}, "it runs gpumix 9.9"),
    ],
)
def test_a_rank_with_another_gpumix_is_not_asked_anything(changes, said):
    told = rank_of(1, gpumix=gpumix.__version__).model_dump() | changes
    found = survey._parse_hello(1, told)
    assert found.trouble.startswith(said) and found.host == "host-a" and found.fix


def test_a_gpu_that_is_not_there(tmp_path):
    cluster = [{"class": "big", "accelerator": "cuda", "memory": "24 GiB"}]
    found = only(survey_of(write_job(tmp_path, cluster=cluster)))
    assert (found.check, found.severity, found.device) == ("ranks", Severity.ERROR, "big-0")
    assert "no NVIDIA driver" in found.what


@pytest.mark.extended
def test_what_a_job_lacks_is_told_of_every_host(tmp_path):
    (tmp_path / "file").touch()
    changes = {"output_dir": "file/run", "data": {"text": ["nothing.txt"]}}
    found = wrong(survey_of(write_job(tmp_path, cluster=ON_TWO_HOSTS, **changes)))
    assert [(one.check, one.host) for one in found] == [
        ("disk", "a"),
        ("disk", "b"),
        ("data", "a"),
        ("data", "b"),
    ]
    assert "Not a directory" in found[0].what and "nothing.txt" in found[2].what
