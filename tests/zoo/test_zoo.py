"""A small part of the walk through model classes: none deviates without a word, none crashes."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from zoo_of.judging import LIMIT, distance, excuse, of_errors, refusal, status
from zoo_of.training import Trained

EXACT = ("torch/TransformerEncoder",)
FURTHER = (
    "transformers/T5ForConditionalGeneration",
    "transformers/MobileBertForMaskedLM",  # looks at its neighbours, padding too
    "transformers/BertForTokenClassification",
    "transformers/LlamaForCausalLM",
)
REFUSED = ("torch/Embedding-max-norm",)


def walk(names, plans):
    from zoo import figures_of
    from zoo_of.classes import entries
    from zoo_of.running import try_class

    every = {entry.name: (number, entry) for number, entry in enumerate(entries())}
    results = [try_class(*every[name], plans) for name in names]
    return figures_of(results), results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "plans"),
    left_out([(EXACT, "AC"), (EXACT + FURTHER, "ABC")], [(EXACT + FURTHER, "ABC")]),
    ids=["some", "further"],
)
def test_a_part_is_exact_or_refused(exact, plans):
    ((figures, results),) = run_ranks(walk, 1, [*exact, *REFUSED], plans, timeout_s=240)
    assert figures["deviates_silently"] == 0, results
    assert figures["crashed"] == 0, results
    assert figures["exact"] == figures["exact_staged"] == len(exact), results
    assert figures["refused_before_training"] == len(REFUSED), results
    assert figures["refused_without_reason"] == figures["not_built"] == 0, results


def trained(*, loss: float = 1.0, gradient: float = 1.0, weight: float = 1.0) -> Trained:
    def piece(value: float) -> list:
        return [("w", (4,), (0,), np.full(4, value, np.float32))]

    return Trained([loss] * 3, piece(gradient), piece(weight))


@pytest.mark.parametrize("what", ["loss", "gradient", "weight"])
def test_each_difference_is_seen(what):
    error, where = distance(trained(**{what: 1.001}), trained())
    assert error > LIMIT
    assert where.startswith(what)
    assert distance(trained(**{what: 1.000001}), trained())[0] < LIMIT


def test_what_is_missing_differs():
    short = trained()
    short.losses.pop()
    lost = trained()
    lost.weights.clear()
    assert distance(short, trained())[0] > LIMIT
    assert distance(lost, trained())[0] > LIMIT
    assert distance(trained(loss=np.nan), trained())[0] > LIMIT


@pytest.mark.parametrize(
    ("error", "rounding", "verdict"),
    [
        (2e-4, 1e-4, "exact"),
        (4e-4, 1e-4, "deviates"),
        (2e-2, 1e-2, "not deterministic"),
        (0.5, 1e-2, "deviates"),
    ],
)
def test_rounding_excuses_as_much_as_it_moves(error, rounding, verdict):
    plan = {"verdict": "deviates", "error": error}
    excuse([plan], rounding)
    assert plan["verdict"] == verdict


def test_a_refusal_has_a_way_out_and_comes_before_training():
    from gpumix.engine.comm.communicator import CommunicationError
    from gpumix.schema.errors import InputError

    told = InputError("blocks of this model share a cache", fix="train it with one block")
    assert refusal(told) == "refused"
    assert refusal(InputError("blocks of this model share a cache")) == "refused without reason"
    lost = 0, CommunicationError("rank 1 is gone"), ""
    assert of_errors([lost, (0, told, "")])["verdict"] == "refused"
    assert of_errors([lost, (1, told, "")])["verdict"] == "crashed"
    assert of_errors([(0, KeyError("x"), "")])["verdict"] == "crashed"


def test_the_worst_plan_counts_but_for_stages_that_there_are_not():
    def of(a: str, c: str) -> str:
        return status({"A": {"verdict": a}, "C": {"verdict": c}})

    assert of("exact", "exact") == of("exact", "no plan") == of("exact", "refused") == "exact"
    assert of("refused", "exact") == "refused"
    assert of("exact", "crashed") == "crashed"
    assert of("deviates", "crashed") == "deviates"
