"""What a function makes of a sharded model and of samples: logits for a metric, say."""

from __future__ import annotations

import pytest
import torch

from gpumix.schema.plan.batch_shares import get_batch_share
from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, gpt2
from helpers.training.reference import batches, engine_alone, initialised
from helpers.training.staging import rows, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
LAYOUTS = {
    "1 + 2": rows([6], [2, 4]),
    "2 + 2, crossing": rows([4, 2], [2, 4]),
    "a TP group, then two": rows([6], [4, 2], tensor=[2, 1]),
}


def logits(model, batch):
    return model(**batch).logits


def expected_logits(samples: int) -> torch.Tensor:
    with torch.no_grad():
        return logits(initialised(GPT2.factory).eval(), next(batches(GPT2, samples, 1)))


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_they_are_those_of_the_model(head):
    engine = engine_alone(gpt2(0.3), 4, 2, head=head)
    found = engine.outputs(logits, next(batches(GPT2, 7, 1)))
    assert [len(of) for of in found] == [2, 2, 2, 1]
    torch.testing.assert_close(torch.cat(list(found.values())), expected_logits(7))


def test_a_head_stays_in_chunks_for_the_steps_after_them():
    engine = engine_alone(GPT2.factory, 4, 2, head="chunked")
    batch = next(batches(GPT2, 4, 1))
    engine.outputs(logits, batch)
    engine.step(batch)
    (head,) = engine._heads
    assert head.supported


def test_the_loss_may_be_among_them():
    engine = engine_alone(GPT2.factory, 4, 4)
    batch = next(batches(GPT2, 4, 1))
    (loss,) = engine.outputs(lambda model, part: model(**part).loss, batch).values()
    assert loss.item() == pytest.approx(engine.evaluate(batch).item(), rel=1e-6)


@pytest.mark.extended
def test_training_is_the_same_with_outputs_between():
    batch = next(batches(GPT2, 4, 1))
    losses = []
    for asks in (False, True):
        engine = engine_alone(gpt2(0.2), 4, 2)
        losses.append([])
        for _ in range(2):
            losses[-1].append(engine.step(batch).item())
            if asks:
                engine.outputs(logits, batch)
    assert losses[0] == losses[1]


def test_no_samples_give_nothing():
    assert engine_alone(GPT2.factory, 2, 2).outputs(logits, next(batches(GPT2, 1, 1)))
    empty = {key: value[:0] for key, value in next(batches(GPT2, 1, 1)).items()}
    assert engine_alone(GPT2.factory, 2, 2).outputs(logits, empty) == {}


BY_STAGES = [(layout, stage) for stage in (0, 3) for layout in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "zero_stage"), left_out(BY_STAGES, BY_STAGES[1:]))
def test_the_last_stage_has_them(layout, zero_stage):
    plan = staged_plan("gpt2", LAYOUTS[layout], zero_stage=zero_stage)
    found = run_ranks(_outputs, len(plan.workers), plan.model_dump_json())
    last = plan.ranks_of(len(plan.stages) - 1)
    parts: dict[tuple[int, int], list] = {}
    for rank, of_rank in enumerate(found):
        assert bool(of_rank) == (rank in last)
        parts.update(of_rank)
    together = torch.cat([torch.tensor(parts[of]) for of in sorted(parts)])
    torch.testing.assert_close(together, expected_logits(plan.global_batch), rtol=1e-4, atol=1e-5)


def _outputs(plan_json: str) -> dict[tuple[int, int], list]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    (whole,) = batches(GPT2, plan.global_batch, 1)
    own = [n for of in get_batch_share(plan, engine.comm.rank).rows(None) for n in of]
    found = engine.outputs(logits, {key: value[own] for key, value in whole.items()})
    return {(of.start, of.stop): value.tolist() for of, value in found.items()}


def summed(model, batch):
    """With a function of its own no engine cuts padding off, which would change what is drawn."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * count, count


def test_as_they_are_trained_they_have_the_dropout_of_the_next_step():
    """Two micro-batches, so that each one's place counts."""
    batch = next(batches(GPT2, 4, 1))
    engine = engine_alone(gpt2(0.3), 4, 2, loss=summed)
    engine.step(batch)
    found = engine.outputs(summed, batch, as_trained=True)
    assert list(found) == [range(2), range(2, 4)]
    mean = sum(loss for loss, _ in found.values()) / sum(count for _, count in found.values())
    assert engine.step(batch).item() == pytest.approx(mean.item(), rel=1e-6)
    assert engine.evaluate(batch).item() != pytest.approx(mean.item(), rel=1e-3)
