"""The launcher of ranks that other tests stand on."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes import rank_server
from helpers.processes.harness import RankDied, RankTraceback, run_ranks


def _sum_of_ranks(factor):
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), factor * value.item(), torch.get_num_threads()


def test_ranks_meet_and_answer_in_order():
    assert run_ranks(_sum_of_ranks, 3, 2) == [(0, 6.0, 1), (1, 6.0, 1), (2, 6.0, 1)]


def test_the_environment_outlives_many_that_start_the_server():
    """Tests start commands in several threads: each wants the server, and a variable for it."""
    before = dict(os.environ)

    def start(_: int) -> None:
        for _ in range(200):
            rank_server.warm_up()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    assert dict(os.environ) == before


def _has_group():
    return dist.is_initialized()


def test_a_single_rank_has_no_group():
    assert run_ranks(_has_group, 1) == [False]


def _one_fails(error):
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def test_an_error_comes_with_its_traceback():
    with raises(InputError, code="key-unknown", what="wrong key") as caught:
        run_ranks(_one_fails, 3, InputError("wrong key", code="key-unknown", fix="mend it"))
    assert caught.value.fix == "mend it"
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "in _one_fails" in str(caught.value.__cause__)


class Unpicklable(Exception):
    def __init__(self, one, other):
        super().__init__(one)


def _fails_strangely():
    raise Unpicklable("strange", 2)


def test_an_error_that_cannot_cross_is_told_in_words():
    with pytest.raises(RuntimeError, match="Unpicklable: strange"):
        run_ranks(_fails_strangely, 1)


def _pid_and_hang(path):
    (path / str(dist.get_rank())).write_text(str(os.getpid()))
    time.sleep(60)


def test_ranks_that_do_not_end_are_killed(tmp_path):
    with pytest.raises(RankDied, match=r"\[0, 1\] did not end in time"):
        run_ranks(_pid_and_hang, 2, tmp_path, timeout_s=2)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def _dies():
    if dist.get_rank() == 0:
        os._exit(7)
    return "alive"


def test_a_rank_that_dies_is_an_error():
    with pytest.raises(RankDied, match="rank 0 died with exit code 7"):
        run_ranks(_dies, 2)


def test_a_mortal_rank_may_die():
    assert run_ranks(_dies, 2, mortal=[0]) == [None, "alive"]


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ({"code": "key-unknown", "what": ("rank", 7), "where": "job.yaml"}, ""),
        ({"code": "key-missing"}, "key-missing"),
        ({"code": "key-unknown", "what": 17}, "17"),
        ({"code": "key-unknown", "what": "7.5"}, "7.5"),
        ({"code": "key-unknown", "where": "job"}, ""),
        ({"code": "key-unknown", "where": "jo"}, "jo"),
    ],
)
def test_an_error_is_expected_by_its_code_and_by_whole_values(expected, told):
    error = InputError("rank 7 of 175", code="key-unknown", where="job.yaml")
    with pytest.raises(pytest.fail.Exception, match=told) if told else nullcontext():
        with raises(InputError, **expected) as caught:
            raise error
        assert caught.value is error
