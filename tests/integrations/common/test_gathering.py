"""What ranks have of a batch comes together on all of them, whoever has how much of it."""

from __future__ import annotations

import pytest
import torch

from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.model.equal_weights import broadcast_weights, check_equal_models
from gpumix.engine.model.frozen_base import checksum
from gpumix.integrations.common.gather import gather_rows, gather_texts
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks

PLACES = [[range(4, 6), range(6, 7)], [], [range(4)]]  # by rank


def whole(width: int = 5) -> dict:
    rows = torch.arange(7 * width, dtype=torch.float32).view(7, width)
    return {"logits": (rows, rows[:, :2].to(torch.bfloat16)), "labels": rows.long() % 3 == 0}


def test_rows_come_in_the_order_of_their_places():
    for found in run_ranks(_rows, 3):
        logits, halves, labels = found
        assert torch.equal(torch.tensor(logits), whole()["logits"][0])
        assert torch.equal(torch.tensor(halves), whole()["logits"][1].float())
        assert torch.equal(torch.tensor(labels), whole()["labels"])


def _rows() -> tuple[list, list, list]:
    comm = make_communicator(torch.device("cpu"))
    parts = {
        of: torch.utils._pytree.tree_map(lambda t, of=of: t[of.start : of.stop], whole())
        for of in PLACES[comm.rank]
    }
    found = gather_rows(parts, comm, "rows")
    first, second = found["logits"]
    assert second.dtype == torch.bfloat16
    return first.tolist(), second.float().tolist(), found["labels"].tolist()


def test_shorter_rows_are_padded_as_transformers_does():
    assert run_ranks(_unlike_widths, 2) == [[[0, 1, -100], [2, 3, 4]]] * 2


def _unlike_widths() -> list:
    comm = make_communicator(torch.device("cpu"))
    own = [torch.tensor([[0, 1]]), torch.tensor([[2, 3, 4]])][comm.rank]
    return gather_rows({range(comm.rank, comm.rank + 1): own}, comm, "rows").tolist()


def test_nothing_at_all_is_none():
    assert run_ranks(_nothing, 2) == [True, True]


def _nothing() -> bool:
    return gather_rows({}, make_communicator(torch.device("cpu")), "rows") is None


@pytest.mark.parametrize("text", ["", "a", "é" * 40, "\x00\n\u2028\U0001f600 "])
def test_texts_alone(text):
    assert gather_texts(text, make_communicator(torch.device("cpu")), "words") == [text]


def test_texts_of_ranks():
    assert run_ranks(_texts, 3) == [["", "one ü", "22"]] * 3


def _texts() -> list[str]:
    comm = make_communicator(torch.device("cpu"))
    return gather_texts(["", "one ü", "22"][comm.rank], comm, "words")


def test_what_has_no_row_for_each_sample_is_told():
    comm = make_communicator(torch.device("cpu"))
    with raises(InputError, code="gathered-rows-wrong", what=3):
        gather_rows({range(3): torch.zeros(())}, comm, "rows")


def test_ranks_begin_with_the_first_ones_weights():
    for names, weight, buffer in run_ranks(_alike, 2):
        assert names == ["1.weight", "0.running_mean"]
        assert weight == 0.0
        assert buffer == 0.0


def _alike() -> tuple[list[str], float, float]:
    layers = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(*layers)
    for parameter in model[2].parameters():  # less than eight bytes each
        torch.nn.init.ones_(parameter)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        model[1].weight.fill_(rank)
        model[0].running_mean.fill_(rank)
    names = broadcast_weights(model, make_communicator(torch.device("cpu")))
    return names, model[1].weight.max().item(), model[0].running_mean.max().item()


@pytest.mark.parametrize(
    ("values", "other", "dtype"),
    [
        ([1.0, 2.0], [2.0, 1.0], torch.float16),
        ([1.0, -1.0], [-1.0, 1.0], torch.float64),
        ([1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], torch.float32),
        ([0.0], [1.0], torch.bfloat16),
    ],
)
def test_unlike_values_have_unlike_digests(values, other, dtype):
    digests = [checksum(torch.tensor(each, dtype=dtype)) for each in (values, values, other)]
    assert digests[0] == digests[1] != digests[2]


def test_ranks_with_other_models_are_told():
    with raises(InputError, code="models-differ-by-rank", what=(1, 0)):
        run_ranks(_unlike, 2)


def _unlike() -> None:
    model = torch.nn.Linear(3, 3 + torch.distributed.get_rank())
    check_equal_models(model, make_communicator(torch.device("cpu")))
