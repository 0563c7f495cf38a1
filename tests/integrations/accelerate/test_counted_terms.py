"""One count that a loop gives, for a loss with several terms."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.integrations.accelerate.loss_weights import LossWeigher
from gpumix.schema.errors import InputError
from helpers.processes.harness import run_ranks

LABELS = (torch.tensor([0, 1, -100, 2, 1]), torch.tensor([2, -100]))  # of each rank


def weight(comm: Communicator, count_all: bool) -> float:
    """This rank's share of a loss with a mean over labels and a mean of logits."""
    labels = LABELS[comm.rank]
    logits = torch.randn(len(labels), 3, requires_grad=True)
    of_labels = cross_entropy(logits, labels)
    beside = logits.abs().mean() if count_all else logits[labels != -100].abs().mean()
    count = int((labels != -100).sum())
    weigher = LossWeigher(comm)
    return weigher.of(of_labels + beside, len(labels), len(labels), count).share.item()


def shares() -> float:
    return weight(make_communicator(torch.device("cpu")), False)


def refused() -> str:
    with pytest.raises(InputError) as caught:
        weight(make_communicator(torch.device("cpu")), True)
    return str(caught.value)


def test_terms_over_the_same_items_have_the_shares_of_the_count():
    assert run_ranks(shares, 2) == pytest.approx([4 / 5, 1 / 5])


def test_terms_over_different_items_are_refused_on_all_ranks():
    for told in run_ranks(refused, 2):
        assert "terms of the loop's loss are means over different things" in told
        assert "over 4 and 15; over 1 and 6 on two ranks" in told
