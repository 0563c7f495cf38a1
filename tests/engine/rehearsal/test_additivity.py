"""The rehearsal before the first step: by which rule losses of micro-batches add up to the loss of
the whole batch, and that a loss for which there is none is refused."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gpumix.engine.engine import Engine
from gpumix.engine.loss.reduction import ReducedLoss, integer_labels
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, WIDTH, mean_loss
from helpers.training.reference import (
    SEED,
    Share,
    batches,
    build,
    engine_alone,
    initialised,
    plan_for,
)
from helpers.training.staging import own_samples

CLASSES = 7
WEIGHTS = torch.linspace(0.1, 3.0, CLASSES)


class Blocks(nn.Module):
    """Two blocks and a head, which gives logits (samples, length, classes)."""

    def __init__(self, kind: type[nn.Module] = nn.Identity, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), kind()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.other(self.linear(x))))


class Normed(nn.BatchNorm1d):
    """Of each channel, over samples and positions."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class Mixed(nn.Module):
    """In training alone it looks at other samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(0, keepdim=True) if self.training else x


def a_batch(samples: int = 6, length: int = 5) -> dict[str, torch.Tensor]:
    """Samples of unlike numbers of labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, length, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (samples, length), generator=generator)
    labels[torch.arange(length)[None] > torch.arange(samples)[:, None] % length] = -100
    return {"x": x, "labels": labels}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **how)


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def of_samples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = (labels != -100).sum(1).clamp(min=1)
    return (each(logits, labels).sum(1) / counted).mean()


ADDITIVE = {
    "labels": (cross_entropy, "a mean over 'labels'"),
    "shifted labels": (
        lambda z, y: cross_entropy(z[:, :-1], y[:, 1:]),
        "a mean over shifted 'labels'",
    ),
    "samples": (of_samples, "a mean over samples"),
    "a sum": (lambda z, y: each(z, y).sum() / 100, "a sum over samples"),
    "class weights": (
        lambda z, y: cross_entropy(z, y, weight=WEIGHTS),
        "a mean over what the loss itself divides by",
    ),
    "smoothed labels": (
        lambda z, y: cross_entropy(z, y, label_smoothing=0.1),
        "a mean over what the loss itself divides by",
    ),
    "half of a mean": (lambda z, y: 0.5 * cross_entropy(z, y) + 1, "a mean over 'labels'"),
    "a focal loss": (
        lambda z, y: ((1 - (-each(z, y)).exp()) ** 2 * each(z, y)).sum() / (y != -100).sum(),
        "a mean over what the loss itself divides by",
    ),
    "outputs": (lambda z, y: z.square().mean(), "a mean over samples"),
    "probabilities of classes": (
        lambda z, y: F.cross_entropy(z[:, 0], z[:, 1].detach().softmax(-1)),
        "a mean over what the loss itself divides by",
    ),
    "a minus before a sum over a mask": (
        lambda z, y: -(z.log_softmax(-1)[..., 0] * (y != -100)).sum() / (y != -100).sum(),
        "a mean over what the loss itself divides by",
    ),
    "a root of a mean of each sample": (
        lambda z, y: z.square().mean((1, 2)).sqrt().mean(),
        "a mean over samples",
    ),
}
COUPLED = {
    "negatives in the batch": lambda z, y: F.cross_entropy(
        z.mean(1) @ z.mean(1).T, torch.arange(len(z))
    ),
    "two means": lambda z, y: cross_entropy(z, y) + z.square().mean(),
    "a balancing term": lambda z, y: (
        cross_entropy(z, y) + z.softmax(-1).mean((0, 1)).square().sum()
    ),
    "a root of a mean": lambda z, y: z.square().mean().sqrt(),
}  # fmt: skip


def reduced(loss: Any) -> ReducedLoss:
    def compute(model: nn.Module, batch: Any, labels: Any, count: Any) -> torch.Tensor:
        return loss(model(batch["x"]), {**batch, **labels}["labels"])

    return ReducedLoss(compute, integer_labels)


def an_engine(loss: Any, factory: Any = Blocks, micro_batch: int = 3, **more: Any) -> Engine:
    """Of one rank, by a plan that cuts the batch."""
    model = build(factory, SEED)
    plan = plan_for(model, [Share(6, micro_batch, 1)])
    return prepare(model, plan, loss=reduced(loss), **more)


def plainly(loss: Any, factory: Any = Blocks) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of the whole batch in plain PyTorch."""
    model = initialised(factory)
    found = loss(model(a_batch()["x"]), a_batch()["labels"])
    found.backward()
    return found.item(), {name: p.grad.flatten() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ADDITIVE)
def test_the_rule_is_found_and_gives_the_loss_and_gradients_of_the_whole(name):
    loss, rule = ADDITIVE[name]
    engine, (expected, gradients) = an_engine(loss), plainly(loss)
    assert engine.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == rule
    found = {piece.name: piece.local.grad for piece in engine.pieces()}
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-7)
    assert engine.evaluate(a_batch()).item() == pytest.approx(expected, rel=1e-5)


class Returning(Blocks):
    """Its forward takes targets too, of which -1 is left out, and returns (logits, mean loss)."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits, cross_entropy(logits, targets, ignore_index=-1)


@pytest.mark.parametrize("shares", [[Share(6, 6, 1)], [Share(6, 2, 1)]])
def test_a_model_may_return_logits_and_a_mean_loss(shares):
    batch = a_batch()
    batch = {"x": batch["x"], "targets": batch["labels"].clamp(min=-1)}
    expected = initialised(Returning)(**batch)[1]
    model = build(Returning, SEED)
    engine = prepare(model, plan_for(model, shares))
    assert engine.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert engine.evaluate(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    told = "" if shares[0].micro_batch == 6 else "a mean over what the loss itself divides by"
    assert engine.reduction == told


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_refused_where_the_batch_is_cut(name):
    engine = an_engine(COUPLED[name])
    with raises(ModelError, code="loss-not-additive"):
        engine.step(a_batch())
    whole, (expected, _) = an_engine(COUPLED[name], micro_batch=6), plainly(COUPLED[name])
    assert whole.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)


class Handing(Blocks):
    """Hands something on beside arguments and results."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept: torch.Tensor = torch.zeros(())
        if way == "a hook":
            self.blocks[0].register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.kept = output.detach().mean((1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.mean((1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.kept[:, None, None]


@pytest.mark.parametrize("way", ["an attribute", "a hook"])
def test_what_is_handed_on_beside_arguments_and_results_is_refused(way):
    engine = an_engine(lambda z, y: z.square().mean(), lambda: Handing(way), micro_batch=2)
    with raises(ModelError, code="micro-batches-coupled"):
        engine.step(a_batch())


def test_a_loss_of_its_own_for_each_micro_batch_is_accepted_and_told():
    engine = an_engine(COUPLED["two means"], couples="micro-batch")
    assert engine.step(a_batch()).isfinite()
    assert engine.reduction.startswith("each micro-batch has a loss of its own")


def test_what_couples_in_training_alone_is_seen():
    with raises(ModelError, code="loss-not-additive"):
        an_engine(cross_entropy, lambda: Blocks(Mixed)).step(a_batch())


def test_state_that_forward_keeps_is_refused_by_name_unless_it_is_accepted():
    with raises(ModelError, code="forward-changes-buffer", what="blocks.0.other"):
        an_engine(cross_entropy, lambda: Blocks(Normed)).step(a_batch())
    engine = an_engine(cross_entropy, lambda: Blocks(Normed), couples="micro-batch")
    assert engine.step(a_batch()).isfinite()


class Scaled(nn.Linear):
    """It limits its weight when it runs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


def test_a_forward_that_changes_weights_is_refused():
    with raises(ModelError, code="forward-changes-parameter", what="blocks.0.other.weight"):
        an_engine(cross_entropy, lambda: Blocks(Scaled)).step(a_batch())


@pytest.mark.parametrize(
    "other, what",
    [
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), {"code": "parameters-complex"}),
        (
            lambda: nn.Embedding(4, 2, max_norm=1.0),
            {"code": "embedding-max-norm", "what": ("max_norm", 1)},
        ),
        (lambda: nn.Embedding(4, 2, sparse=True), {"code": "embedding-sparse"}),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused(other, what):
    with raises(InputError, **what):
        split_into_units(Blocks(other))


def test_rules_that_the_first_batch_does_not_tell_apart_are_by_a_later_one():
    loss, rule = ADDITIVE["shifted labels"]
    first = a_batch()
    first["labels"][:, 0] = -100  # so both rules count as many
    first["labels"][:, 1] = 1
    engine = an_engine(lambda z, y: cross_entropy(z[:, :-1], y[:, 1:]))
    engine.step(first)
    plain = an_engine(cross_entropy)
    plain.step(first)
    for one, expected in (engine, rule), (plain, "a mean over 'labels'"):
        for parameter in one.parameters():
            parameter.grad = None
        found = one.step(a_batch()).item()
        assert one.reduction == expected
        wanted = loss if one is engine else cross_entropy
        assert found == pytest.approx(plainly(wanted)[0], rel=1e-5)


def test_a_later_rehearsal_keeps_gradients_that_are_added_to():
    first = a_batch()
    first["labels"][:, 0] = -100  # so both rules count as many
    first["labels"][:, 1] = 1
    engine, model = an_engine(cross_entropy), initialised(Blocks)
    for batch in (first, a_batch()):
        engine.step(batch)
        cross_entropy(model(batch["x"]), batch["labels"]).backward()
    assert engine.reduction == "a mean over 'labels'"
    found = {piece.name: piece.local.grad for piece in engine.pieces()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad.flatten(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("micro_batch", left_out([1, 2, 3], [1, 3]))
@pytest.mark.parametrize("name", ["labels", "shifted labels"])
def test_rules_are_told_apart_by_whatever_sample_of_a_batch_does(name, micro_batch):
    """Here one alone, which has neither most labels nor fewest."""
    loss, rule = ADDITIVE[name]
    batch = a_batch()
    batch["labels"] = torch.full((6, 5), -100)
    for row, count in enumerate((1, 4, 2, 3, 2, 4)):
        batch["labels"][row, 5 - count :] = row
    batch["labels"][4, 0] = 5
    engine = an_engine(loss, micro_batch=micro_batch)
    expected = loss(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == rule


@pytest.mark.parametrize(
    ("name", "rule"), [("labels", "a mean over 'labels'"), ("samples", "a mean over samples")]
)
def test_rules_that_are_proportional_are_told_apart_by_samples_of_unlike_length(name, rule):
    """Whatever a loss is a mean over, all samples of the first batch have the same weight."""
    loss, _ = ADDITIVE[name]

    def hidden(logits, labels):
        return loss(logits, labels).square().sqrt()  # its graph tells no denominator

    equal = a_batch()
    equal["labels"] = equal["labels"].clamp(min=0)
    engine = an_engine(hidden)
    expected = loss(initialised(Blocks)(equal["x"]), equal["labels"]).item()
    assert engine.step(equal).item() == pytest.approx(expected, rel=1e-5)
    assert engine.step(a_batch()).item() == pytest.approx(plainly(loss)[0], rel=1e-5)
    assert engine.reduction == rule


@pytest.mark.parametrize("weight", [1e-3, 1e-4])
def test_a_weak_coupling_is_refused(weight):
    """Its error is within the tolerance for rounding."""

    def loss(logits, labels):
        return cross_entropy(logits, labels) + weight * logits.mean((0, 1)).square().sum()

    with raises(ModelError, code="loss-not-additive"):
        an_engine(loss).step(a_batch())


def test_a_loss_that_leaves_out_another_label_is_by_what_it_divides_by():
    """The samples that are rehearsed, those of the first micro-batch, have none of these."""

    def loss(logits, labels):
        return cross_entropy(logits, labels, ignore_index=3)

    batch = a_batch()
    batch["labels"] = batch["labels"].clamp(min=0)
    batch["labels"][batch["labels"] == 3] = 2
    batch["labels"][3, :4] = 3
    batch["labels"][4:] = 3
    engine = an_engine(loss, micro_batch=2)
    expected = loss(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over what the loss itself divides by"
    assert all(piece.local.grad.isfinite().all() for piece in engine.pieces())


def by_own_weights(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = torch.where(labels == 2, 5.0, 1.0)
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y, weight=torch.tensor([1.0, 1.0, 5.0, 1.0])),
        by_own_weights,
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_weights_that_the_rehearsed_samples_do_not_show(loss, micro_batch):
    """They are of classes with weight 1, whose weights add up to the number of labels."""
    batch = a_batch() | {"labels": torch.tensor([0, 1, 2, 2, 1, 0])}

    def of_first_positions(logits, labels):
        return loss(logits[:, 0, :4], labels)

    engine = an_engine(of_first_positions, micro_batch=micro_batch)
    expected = of_first_positions(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over what the loss itself divides by"


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_elements_that_a_mask_selects_are_counted_though_it_selects_all_of_the_first_batch(
    micro_batch,
):
    def loss(logits, batch):
        mask = ~batch["targets"].isnan()
        return (logits[:, 0, :4][mask] - batch["targets"][mask]).square().mean()

    def compute(model, batch, labels, count):
        return loss(model(batch["x"]), batch)

    model = build(Blocks, SEED)
    plan = plan_for(model, [Share(6, micro_batch, 1)])
    engine = prepare(model, plan, loss=ReducedLoss(compute, integer_labels))
    targets = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    engine.step(a_batch() | {"targets": targets})
    targets[0, :3] = targets[4, :] = torch.nan
    batch = a_batch() | {"targets": targets}
    expected = loss(initialised(Blocks)(batch["x"]), batch).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)


def masked_mean(logits, labels):
    mask = (labels != 0).float()
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


def class_weighted(logits, labels):
    return cross_entropy(logits, labels, weight=torch.tensor([0.0, 1.0, 2.0, 3.0]))


@pytest.mark.parametrize("loss", [masked_mean, class_weighted])
def test_a_micro_batch_with_nothing_to_count_has_gradients_of_nothing(loss):
    def of_first_positions(logits, labels):
        return loss(logits[:, 0, :4], labels[:, 0] % 4)

    engine, batch = an_engine(of_first_positions, micro_batch=1), a_batch()
    batch["labels"][:, 0] = torch.tensor([1, 2, 3, 1, 2, 3])
    engine.step(batch)
    batch["labels"][:, 0] = torch.tensor([1, 0, 3, 0, 0, 2])
    model = initialised(Blocks)
    expected = of_first_positions(model(batch["x"]), batch["labels"])
    expected.backward()
    for parameter in engine.parameters():
        parameter.grad = None
    assert engine.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert engine.gradient_norm().item() == pytest.approx(norm.item(), rel=1e-4)


def test_a_count_of_at_least_one_is_refused_once_a_micro_batch_has_nothing_to_count():
    def compute(model, batch, labels, count):
        logits, mask = model(batch["x"])[:, 0, :4], batch["mask"]
        lost = F.cross_entropy(logits, batch["labels"], reduction="none")
        return (lost * mask).sum() / mask.sum().clamp(min=1)

    model = build(Blocks, SEED)
    plan = plan_for(model, [Share(6, 3, 1)])
    engine = prepare(model, plan, loss=ReducedLoss(compute, integer_labels))
    batch = {"x": a_batch()["x"], "labels": torch.arange(6) % 4, "mask": torch.ones(6)}
    engine.step(batch)
    batch["mask"][:3] = 0
    engine.step(batch)
    with pytest.raises(ModelError):
        engine.step(batch)


def test_a_term_with_another_denominator_is_refused_though_it_is_nothing_in_the_first_batch():
    """As a loss of the samples that a model is sure of, of which there are none at first."""

    def loss(logits, labels):
        sure = (logits.softmax(-1).amax(-1) > 0.99).float()
        term = (logits.logsumexp(-1) * sure).sum() / sure.sum().clamp(min=1)
        return cross_entropy(logits, labels) + term

    with raises(ModelError, code="loss-not-additive"):
        an_engine(loss).step(a_batch())


def test_a_loss_that_divides_by_one_at_least_counts_nothing_without_labels():
    def loss(logits, labels):
        return each(logits, labels).sum() / (labels != -100).sum().clamp(min=1)

    batch = a_batch()
    batch["labels"][3] = -100
    engine = an_engine(loss, micro_batch=1)
    expected = loss(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over what the loss itself divides by"


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_labels_of_another_name_are_counted_as_the_loss_does(micro_batch):
    """The first batch has a label for each sample, a later one has not."""

    class Named(Blocks):
        def forward(self, x, y):
            return F.cross_entropy(super().forward(x)[:, 0], y)

    batch = a_batch()
    first = {"x": batch["x"], "y": torch.arange(6) % CLASSES}
    later = {"x": batch["x"], "y": first["y"].where(torch.arange(6) % 3 > 0, -100)}
    model = build(Named, SEED)
    engine = prepare(model, plan_for(model, [Share(6, micro_batch, 1)]))
    for given in (first, later):
        expected = initialised(Named)(**given).item()
        assert engine.step(given).item() == pytest.approx(expected, rel=1e-5)
    engine.look_back()
    assert engine.reduction == "a mean over what the loss itself divides by"


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_samples_without_labels_do_not_tell_a_mean_from_a_sum(micro_batch):
    def loss(logits, labels):
        return (each(logits, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()

    batch = a_batch()
    batch["labels"][[1, 3, 5]] = -100
    engine = an_engine(loss, micro_batch=micro_batch)
    expected = loss(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over samples"


def test_dropout_is_no_coupling():
    engine = an_engine(cross_entropy, lambda: Blocks(dropout=0.5))
    engine.step(a_batch())
    assert engine.reduction == "a mean over 'labels'"


class TwoClasses(nn.Module):
    """Fewer elements than sums are taken of; over the classes gradients add up to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_gradients_that_add_up_to_nothing_are_compared_by_their_elements():
    def loss(logits, labels):
        return cross_entropy(logits, labels.clamp(max=1))

    engine, (expected, _) = an_engine(loss, TwoClasses), plainly(loss, TwoClasses)
    assert engine.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over 'labels'"


def test_a_count_that_does_not_add_up_is_refused():
    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["labels"]), torch.tensor(1)

    model = build(Blocks, SEED)
    engine = prepare(model, plan_for(model, [Share(6, 3, 1)]), loss=loss)
    with raises(ModelError, code="loss-not-additive"):
        engine.step(a_batch())


def test_of_micro_batches_of_one_sample_nothing_larger_goes_backward():
    loss, _ = ADDITIVE["shifted labels"]
    engine, (expected, _) = an_engine(loss, micro_batch=1), plainly(loss)
    assert engine.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)
    assert engine.reduction == "a mean over shifted 'labels'"


def test_a_rehearsal_leaves_nothing():
    """The step after it is, to the last bit, that of an engine which knew its rule."""
    architecture = ARCHITECTURES["gpt2"]
    batch = next(batches(architecture, 6, 1))
    known = engine_alone(architecture.factory, 6, 2)
    model = build(architecture.factory, SEED)
    rehearsed = prepare(model, plan_for(model, [Share(6, 2, 1)]))
    assert rehearsed.step(batch) == known.step(batch)
    for one, other in zip(rehearsed.parameters(), known.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert rehearsed.steps == 1


# -- on several ranks ------------------------------------------------------------------------------

SHIFTED, PLAINLY = "a mean over shifted 'labels'", "a mean over 'labels'"
MODELS = {"gpt2": SHIFTED, "t5": PLAINLY, "bert": PLAINLY}
SHARES = [Share(3, 2, 1), Share(2, 1, 2), Share(0, 0, 1)]
EACH = list(product(MODELS, (0, 3)))
FEW = [("gpt2", 3), ("bert", 0)]


def _rules(cases: Any) -> list[tuple[str, float]]:
    found = []
    for name, plan_json in cases:
        architecture, plan = ARCHITECTURES[name], Plan.model_validate_json(plan_json)
        engine = prepare(build(architecture.factory, SEED), plan)
        batch = next(batches(architecture, plan.global_batch, 1))
        loss = engine.step(own_samples(plan, dist.get_rank(), batch))
        found.append((engine.reduction, loss.item()))
    return found


@pytest.mark.parametrize("tried", left_out([(FEW,), (EACH,)], [(EACH,)]), ids=["few", "each"])
def test_ranks_with_unlike_shares_and_stages_agree(tried):
    cases = []
    for name, stage in tried:
        plan = plan_for(ARCHITECTURES[name].factory(), SHARES, zero_stage=stage)
        cases.append((name, plan.model_dump_json()))
    for told in run_ranks(_rules, 3, cases):
        for (name, _), (rule, loss) in zip(cases, told, strict=True):
            architecture = ARCHITECTURES[name]
            batch = next(batches(architecture, 5, 1))
            expected = mean_loss(initialised(architecture.factory), batch).item()
            assert (rule, loss) == (MODELS[name], pytest.approx(expected, rel=1e-5)), name


def _refused() -> str:
    """On ranks of which one alone computes."""
    model = build(lambda: Blocks(Normed), SEED)
    plan = plan_for(model, [Share(6, 3, 1), Share(0, 0, 1)])
    engine = prepare(model, plan, loss=reduced(cross_entropy))
    rows = 6 if dist.get_rank() == 0 else 0
    try:
        engine.step({key: value[:rows] for key, value in a_batch().items()})
    except ModelError as error:
        return error.what
    return ""


def test_all_ranks_refuse_what_one_of_them_has_seen():
    first, second = run_ranks(_refused, 2)
    assert "changes buffers of module 'blocks.0.other'" in first
    assert second == first


class NotAlone(Blocks):
    """As norms of pictures of one pixel."""

    def forward(self, x):
        if len(x) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return super().forward(x)


def test_a_model_that_computes_no_single_sample_is_refused():
    with raises(ModelError, code="batch-not-divisible-by-model", what=1):
        an_engine(cross_entropy, NotAlone).step(a_batch())


def of_hidden(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over what inputs, not labels, say; as of pictures whose patches are hidden."""
    hidden = (labels % 2).float()
    return (logits.square().mean(-1) * hidden).sum() / (hidden.sum() + 1e-5) / 3


def test_numbers_that_are_alike_by_chance_in_the_first_samples_mislead_nobody():
    batch = a_batch()
    batch["labels"][:3] = torch.tensor([1, 2, 2, 2, 2])  # in each one is hidden
    batch["labels"][3:] = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2], [1, 1, 1, 1, 1]])
    batch["labels"] = batch["labels"].float()
    model = initialised(Blocks)
    expected = of_hidden(model(batch["x"]), batch["labels"])
    expected.backward()
    engine = an_engine(of_hidden)
    assert abs(engine.step(batch).item() / expected.item() - 1) < 1e-5
    found = {piece.name: piece.local.grad for piece in engine.pieces()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.flatten()
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    assert engine.reduction == "a mean over what the loss itself divides by"


class Centred(Blocks):
    """In evaluation alone it looks at other samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        return z if self.training else z - z.mean(0)


def test_what_couples_in_evaluation_alone_is_seen_when_it_is_evaluated():
    engine, (expected, _) = an_engine(cross_entropy, Centred), plainly(cross_entropy)
    assert engine.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)
    for _ in range(2):
        with raises(ModelError, code="loss-not-additive-in-evaluation"):
            engine.evaluate(a_batch())
    assert engine.step(a_batch()).item() == pytest.approx(expected, rel=1e-5)


class HandsOn(Blocks):
    """In training alone, a block leaves something for the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        return z * self.blocks[0].left.mean((1, 2), keepdim=True) if self.training else z


class Leaves(Block):
    def __init__(self) -> None:
        super().__init__(nn.Identity, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        self.left = z.detach()
        return z


def test_what_is_kept_for_later_in_training_alone_is_seen():
    def factory() -> nn.Module:
        model = HandsOn()
        model.blocks = nn.ModuleList(Leaves() for _ in range(2))
        return model

    with raises(ModelError, code="micro-batches-coupled"):
        an_engine(cross_entropy, factory).step(a_batch())


def test_a_model_whose_plan_cuts_no_batch_is_evaluated_on_larger_ones():
    """Norms over a batch go by what they have kept then."""
    engine = an_engine(cross_entropy, lambda: Blocks(Normed), micro_batch=6, couples="batch")
    batch = a_batch(15)
    plain = initialised(lambda: Blocks(Normed)).eval()
    expected = cross_entropy(plain(batch["x"]), batch["labels"]).item()
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)
    assert engine.step(a_batch()).isfinite()


class ByFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[..., 0] > 0).long())


def test_gradients_scaled_by_frequency_are_refused_where_batches_are_cut():
    make = partial(Blocks, ByFrequency)
    with raises(ModelError, code="grad-by-frequency", what="scale_grad_by_freq"):
        an_engine(cross_entropy, make)
    an_engine(cross_entropy, make, micro_batch=6)
    an_engine(cross_entropy, make, couples="micro-batch")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_class_weights_by_what_training_has_seen_are_refused(dropout):
    seen = torch.ones(CLASSES)
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(Blocks(dropout=dropout))
        return models[-1]

    def weighted(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if models[-1].training:
            seen.add_(torch.bincount(y.clamp(min=0).flatten(), minlength=CLASSES))
        weights = seen.sum() / seen
        losses = nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none")
        return (losses * weights[y.clamp(min=0).flatten()]).mean()

    with raises(ModelError, code="forward-not-repeatable"):
        an_engine(weighted, make).step(a_batch())


def test_a_first_loss_that_is_no_number_leaves_the_rule_to_a_later_batch():
    def loss(logits, labels):
        return cross_entropy(logits, labels) * (torch.nan if labels[0, 0] == 3 else 1.0)

    engine, batch = an_engine(loss, micro_batch=3), a_batch()
    batch["labels"][:, 0] = 3
    assert engine.step(batch).isnan()
    assert engine.reduction.startswith("unknown")
    batch["labels"][:, 0] = 2
    engine.step(batch)
    assert engine.reduction == "a mean over 'labels'"


def test_a_step_inside_of_autocast_is_rehearsed_in_its_precision():
    with torch.autocast("cpu", torch.bfloat16):
        loss = an_engine(cross_entropy).step(a_batch())
        expected, _ = plainly(cross_entropy)
    assert loss.item() == pytest.approx(expected, rel=2e-2)


class Unmasked(nn.Module):
    """A model that attends forward too where no sample is padded, as some that skip a full mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(nn.Identity, 0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids, attention_mask, labels):
        x = self.table(input_ids) * attention_mask[..., None]
        x = x.cumsum(1) if (attention_mask == 0).any() else x.sum(1, keepdim=True).expand_as(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("lengths", [(5, 4, 6, 3, 5, 8), (5, 4, 6, 3, 5, 7)])
def test_a_model_that_skips_a_full_mask_is_refused(lengths):
    """Where one sample is not padded, and where all are."""
    inside = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    ids = torch.arange(48).view(6, 8) % 15 + 1
    batch = {
        "input_ids": ids * inside,
        "attention_mask": inside.long(),
        "labels": torch.where(inside, ids, -100),
    }
    model = build(Unmasked, SEED)
    engine = prepare(model, plan_for(model, [Share(6, 3, 1)]))
    with raises(ModelError, code="loss-not-additive"):
        engine.step(batch)
