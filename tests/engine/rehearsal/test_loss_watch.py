"""Losses of later steps that are made in another way than those of the first one."""

from __future__ import annotations

import pytest
import torch
from test_additivity import WIDTH, Blocks, a_batch, an_engine, cross_entropy, reduced

from gpumix.engine.comm.step_exchange import LossComposition, StepTable
from gpumix.engine.engine import Engine
from gpumix.engine.loss.loss_graph import kind_and_weight_of, kind_of
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.engine.rehearsal.loss_watch import REHEARSAL_STEPS, LossWatch
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.reference import SEED, Share, build, initialised, plan_for

STEPS = 3


def contrast(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(z.mean(1) @ z.mean(1).T, torch.arange(len(z)))


def changing(losses, engine: Engine, seen: list[int]) -> None:
    """Steps by one loss after the other."""
    for loss in losses:
        now.function = loss
        seen.append(engine.steps)
        engine.step(a_batch())


class Now:
    """The loss of the step that is computed."""

    function = staticmethod(cross_entropy)

    def __call__(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(z, y)


now = Now()


def a_watched(**how) -> Engine:
    now.function = cross_entropy
    return an_engine(now, **how)


LATER = {
    "a term that couples samples": lambda z, y: cross_entropy(z, y) + contrast(z, y),
    "a sum": lambda z, y: cross_entropy(z, y, reduction="sum"),
    "a batch's own class weights": lambda z, y: cross_entropy(
        z, y, weight=1 + torch.bincount(y[y >= 0], minlength=7).float()
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_does_not_add_up_any_more_is_refused_at_the_next_step(name):
    engine, seen = a_watched(), []
    with pytest.raises(ModelError) as caught:
        changing([cross_entropy, cross_entropy, LATER[name], LATER[name]], engine, seen)
    assert seen == [0, 1, 2, 3]
    assert caught.value.where == "Blocks, step 3"
    assert engine.steps == 3


@pytest.mark.parametrize("look", ["look_back", "evaluate", "unshard"])
def test_the_last_step_is_looked_at_too(look):
    from gpumix import unshard

    engine = a_watched()
    changing([cross_entropy, LATER["a sum"]], engine, [])
    with raises(ModelError, code="loss-changed-since-start"):
        if look == "unshard":
            unshard(engine.model)
        elif look == "evaluate":
            engine.evaluate(a_batch())
        else:
            engine.look_back()
    engine.look_back()  # told once


def test_a_term_that_is_multiplied_by_zero_at_first_is_seen_when_it_is_not():
    def weighed(weight: float):
        return lambda z, y: cross_entropy(z, y) + weight * contrast(z, y)

    engine = an_engine(now)
    with raises(ModelError, code="loss-not-additive") as caught:
        changing([weighed(0.0), weighed(0.0), weighed(0.1), weighed(0.1)], engine, [])
    assert caught.value.where == "Blocks, step 3"


def test_a_loss_that_is_made_in_another_way_and_adds_up_is_rehearsed_once(monkeypatch):
    from gpumix.engine.rehearsal import additivity

    times: list[int] = []
    again = additivity.rehearse_again

    def counted(*given):
        times.append(1)
        return again(*given)

    monkeypatch.setattr(additivity, "rehearse_again", counted)

    def focal(z, y):
        each = torch.nn.functional.cross_entropy(z.transpose(1, 2), y, reduction="none")
        return ((1 - (-each).exp()) * each).sum() / (y != -100).sum()

    # By the numbers of labels, as cross entropy, so the rule that was found holds.
    engine = a_watched()
    changing([cross_entropy, focal, focal, cross_entropy, focal], engine, [])
    engine.look_back()
    assert len(times) == 1
    model, batch = initialised(Blocks), a_batch()
    expected = focal(model(batch["x"]), batch["labels"]).item()
    fresh = a_watched()
    fresh.settle(batch, in_step=True)
    now.function = focal
    assert fresh.step(batch).item() == pytest.approx(expected, rel=1e-5)


def test_terms_over_one_number_of_which_some_batches_have_more_add_up():
    """As of heads, or experts, that few samples use."""

    def by_group(z, y):
        each = torch.nn.functional.cross_entropy(z.transpose(1, 2), y, reduction="none").sum(1)
        groups = [(y[:, 0] % 3 == number) for number in range(3)]
        return sum(each[own].sum() / len(z) for own in groups if own.any())

    engine = a_watched()
    now.function = by_group
    batch = a_batch()
    batch["labels"][:, 0] = 0
    for few in (0, 0, 1, 2, 0, 2):
        batch["labels"][3:, 0] = few
        batch["labels"][4:, 0] = 0 if few == 1 else few // 2
        expected = by_group(initialised(Blocks)(batch["x"]), batch["labels"]).item()
        assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    engine.look_back()


def test_a_micro_batch_that_leaves_out_all_blocks_has_a_loss_like_others():
    """LayerDrop by chance: a rehearsal leaves out none."""

    class LeavesOut(Blocks):
        def __init__(self):
            super().__init__()
            self.layerdrop = 0.5

        def forward(self, x):
            for block in self.blocks:
                if not (self.layerdrop and self.training and left_out):
                    x = block(x)
            return self.head(torch.tanh(x))

    left_out = False
    engine = an_engine(cross_entropy, LeavesOut)
    engine.model.train()
    for _ in range(4):
        engine.step(a_batch())
        left_out = not left_out
    engine.look_back()
    assert len(engine._state.watch._known) == 2


def test_what_a_rehearsal_does_not_repeat_is_refused():
    calls = []

    def now_and_then(z, y):
        calls.append(len(z))
        more = z.square().mean() if len(calls) == once else 0.0
        return cross_entropy(z, y) + more

    once = -1
    engine = an_engine(now_and_then)
    engine.step(a_batch())
    once = len(calls) + 1
    engine.step(a_batch())
    with raises(ModelError, code="loss-changed-since-rehearsal") as caught:
        engine.step(a_batch())
    assert caught.value.where == "Blocks, step 2"


def test_a_number_that_differs_between_micro_batches_is_seen():
    """Of all samples of the first batch it is 1."""

    def of_few(z, y):
        few = (y == 100).sum().clamp(min=1)
        return z.square().mean((1, 2)).sum() / few

    engine = an_engine(of_few)
    batch = a_batch()
    engine.step(batch)
    batch["labels"][0, 0] = 100
    batch["labels"][5] = 100
    engine.step(batch)
    with raises(ModelError, code="loss-weights-unequal"):
        engine.step(batch)


def of_hidden(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over positions that odd numbers mark."""
    hidden = (y % 2 == 1) & (y > 0)
    return (z.square().mean(-1) * hidden).sum() / hidden.sum().clamp(min=1)


def some_hidden() -> dict[str, torch.Tensor]:
    """A batch of which each sample has some; they are no labels of classes."""
    marks = torch.arange(30).view(6, 5) % 4
    marks[1, 1:4] = 1
    return a_batch() | {"labels": marks.double()}


def test_a_micro_batch_in_which_a_mean_over_values_counts_nothing_is_refused():
    """It was divided by one at least."""
    engine, batch = an_engine(of_hidden), some_hidden()
    engine.step(batch)
    batch["labels"][:3] = 2
    engine.step(batch)
    with raises(ModelError, code="loss-count-clamped", why=1):
        engine.step(batch)


def test_a_micro_batch_with_one_value_to_count_is_no_empty_one():
    engine, batch = an_engine(of_hidden), some_hidden()
    engine.step(batch)
    batch["labels"][:3] = 2
    batch["labels"][1, 1] = 1
    engine.step(batch)
    assert engine.step(batch).item() > 0


class OwnMean(torch.autograd.Function):
    """A mean over rows whose mark is positive, as a kernel may compute it: its graph shows none."""

    @staticmethod
    def forward(ctx, z, marks):
        counted = marks > 0
        ctx.save_for_backward(z, counted)
        return (z.square().mean(-1) * counted).sum() / counted.sum()

    @staticmethod
    def backward(ctx, gradient):
        z, counted = ctx.saved_tensors
        return gradient * 2 * z * counted[..., None] / z.shape[-1] / counted.sum(), None


MARKS = {
    "as many in each sample": (slice(None), slice(2), "nothing"),
    "fewer in one sample": (0, slice(2), "the loss of a batch is not made of"),
    "none in a micro-batch": (slice(3), slice(None), "losses are no numbers since"),
}


@pytest.mark.parametrize("name", MARKS)
def test_rows_that_a_program_s_own_reduction_no_longer_counts_are_seen(name):
    samples, rows, refusal = MARKS[name]
    engine, batch = an_engine(OwnMean.apply), a_batch()
    batch["labels"] = torch.ones(6, 5)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine.step(batch)
    assert engine.reduction == "a mean over samples"
    batch["labels"][samples, rows] = 0
    engine.step(batch)
    optimizer.step()
    if refusal == "nothing":
        assert engine.step(batch).item() > 0
        return
    with pytest.raises(ModelError) as caught:
        engine.step(batch)
    assert refusal in str(caught.value)


def test_an_evaluated_micro_batch_that_counts_nothing_is_refused():
    engine, batch = an_engine(of_hidden), some_hidden()
    engine.step(batch)
    batch["labels"][:3] = 2
    with raises(ModelError, code="loss-count-clamped", why=1):
        engine.evaluate(batch)


def test_an_evaluated_micro_batch_with_one_value_to_count_is_no_empty_one():
    engine, batch = an_engine(of_hidden), some_hidden()
    engine.step(batch)
    batch["labels"][:3] = 2
    batch["labels"][1, 1] = 1
    found = [engine.evaluate(batch).item() for _ in range(2)]
    expected = of_hidden(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert found == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("nothing", [[0], [1, 2], [0, 1, 4]])
def test_a_sample_that_has_nothing_to_count_is_no_item(nothing):
    """Its loss alone is divided by one at least."""
    engine, batch = an_engine(of_hidden), some_hidden()
    batch["labels"][nothing] = 2
    expected = of_hidden(initialised(Blocks)(batch["x"]), batch["labels"]).item()
    assert engine.step(batch).item() == pytest.approx(expected, rel=1e-5)
    for _ in range(2):
        engine.step(batch)


def test_what_couples_many_samples_alone_is_found_before_the_second_step():
    """As experts do that take so many samples and no more."""

    def crowded(z, y):
        return cross_entropy(z, y) * (1 + 0.1 * (len(z) > 4))

    engine = an_engine(crowded, micro_batch=5)
    with raises(ModelError, code="loss-weights-unequal") as caught:
        for _ in range(3):
            engine.step(a_batch())
    assert caught.value.where == "Blocks, step 1"


def test_a_term_that_grows_from_next_to_nothing_is_found_by_a_later_rehearsal():
    weight = 1e-9

    def growing(z, y):
        return cross_entropy(z, y) + weight * z.std()

    engine = an_engine(growing)
    with raises(ModelError, code="loss-not-additive") as caught:
        for _ in range(REHEARSAL_STEPS[0] + 2):
            weight = min(1.0, weight * 10)
            engine.step(a_batch())
    assert caught.value.where == f"Blocks, step {REHEARSAL_STEPS[0]}"


def test_counters_of_a_model_are_what_steps_alone_make_of_them():
    class Counting(Blocks):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    engine = an_engine(cross_entropy, Counting)
    engine.step(a_batch())
    once = engine.model.calls
    engine.step(a_batch())
    assert engine.model.calls == 2 * once


def test_a_model_that_keeps_something_between_calls_is_refused():
    class Keeping(Blocks):
        last: torch.Tensor | None = None

        def forward(self, x):
            z = super().forward(x)
            if self.last is not None and len(self.last) == len(z):
                z = z + self.last
            self.last = z.detach()
            return z

    with raises(ModelError, code="forward-not-repeatable"):
        an_engine(cross_entropy, Keeping).step(a_batch())


def test_a_model_that_counts_in_training_alone_is_refused():
    class Counting(Blocks):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + self.training
            return super().forward(x) * (1 + self.calls)

    with raises(ModelError, code="forward-not-repeatable"):
        an_engine(cross_entropy, Counting).step(a_batch())


def test_a_loss_changes_while_rules_are_not_told_apart():
    """The first label of each sample is left out, so it may count or not."""
    batch = a_batch()
    batch["labels"][:, 0] = -100
    batch["labels"][:, 1] = 1
    engine = a_watched()
    engine.step(batch)
    assert engine._reduces.alternatives
    now.function = LATER["a term that couples samples"]
    engine.step(batch)
    with raises(ModelError, code="loss-not-additive"):
        engine.step(batch)


def test_what_is_learned_settles_no_other_doubt():
    cpu = torch.device("cpu")
    watch = LossWatch(cpu, [5], late=0, by_values=False)
    told = [
        LossComposition(7, 7, 1.0, 1.0, 0.0),
        LossComposition(5, 0, 1.0, 2.0, 0.0),
        LossComposition(7, 7, 1.0, 1.0, 0.0),
    ]
    for step, makeup in enumerate(told, 1):
        watch.take()
        watch.note(step, StepTable.row(cpu, 0.0, 0.0, 0.0, makeup)[None])
    watch.read()
    assert [(one.step, one.kinds, one.unlike) for one in watch.doubts] == [
        (1, [7], None),
        (2, [], (1.0, 2.0)),
        (3, [7], None),
    ]
    watch.doubts.popleft()
    watch.accept_kinds([7])
    assert [one.step for one in watch.doubts] == [2]


def _later() -> str:
    """Of three ranks, one has no samples."""
    shares = [Share(4, 2, 1), Share(2, 1, 2), Share(0, 0, 1)]
    model = build(Blocks, SEED)
    engine = prepare(model, plan_for(model, shares, zero_stage=3), loss=reduced(now))
    import torch.distributed as dist

    rows = [range(4), range(4, 6), range(0)][dist.get_rank()]
    batch = {key: value[rows.start : rows.stop] for key, value in a_batch().items()}
    engine.step(batch)
    if dist.get_rank() == 1:
        now.function = LATER["a term that couples samples"]
    engine.step(batch)
    try:
        engine.step(batch)
    except ModelError as error:
        return f"{error.where}: {error.what}"
    return ""


def test_all_ranks_refuse_what_one_of_them_has_seen_in_a_later_step():
    found = run_ranks(_later, 3)
    assert set(found) == {
        "Blocks, step 2: the loss of a batch is not made of the losses of its parts"
    }


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_the_order_of_computing_does_not_change_a_loss(head):
    """Ranks of unlike orders would rehearse again before the second step."""
    known = set()
    for order, recompute in (("layered", True), ("layered", False), ("sequential", False)):
        mode = Mode(order=order, recompute=recompute, head=head)
        model = build(Blocks, SEED)
        plan = plan_for(model, [Share(6, 3, 1, mode=mode)], zero_stage=1)
        engine = prepare(model, plan, loss=reduced(cross_entropy))
        engine.step(a_batch())
        known |= set(engine.settled_reduction.kinds)
        engine._state.watch.read(all_of_them=True)
        assert not engine._state.watch.doubts
    assert len(known) == 1


def test_kinds_tell_operations_apart_and_not_numbers():
    x = torch.randn(6, WIDTH, requires_grad=True)
    y = torch.arange(6)
    entropy = torch.nn.functional.cross_entropy
    fewer = x[:3].detach().requires_grad_()
    same = [entropy(x, y), entropy(fewer, y[:3]), entropy(x, y) * 3, entropy(x, y).double() / 2]
    assert len({kind_of(loss) for loss in same}) == 1
    other = [
        entropy(x, y, reduction="sum"),
        entropy(x, y) + x.mean(),
        entropy(x, y) + 0 * x.mean(),
        entropy(x, y) + x.exp().mean(),
    ]
    assert len({kind_of(loss) for loss in (same[0], *other)}) == 5


def test_weights_are_what_terms_are_multiplied_with():
    x = torch.randn(6, WIDTH, requires_grad=True)

    def weight_of(loss):
        return kind_and_weight_of(loss)[1]

    assert weight_of(x.sum()).item() == 1
    assert weight_of(3 * x.sum() / torch.tensor(4)).item() == 0.75
    assert weight_of(x.mean()).item() == 1 / x.numel()
    assert weight_of(x.sum() - 5 * x.sum()).item() == 1 + 2 * (-5 - 1)
    assert weight_of(2 * x.sum() + 2 * x.sum() + 2 * x.sum()).item() == 2
    assert weight_of(x.sum() * torch.tensor(0.1, dtype=torch.bfloat16)) is None
    assert weight_of(x.std()) is None
    several = torch.stack([x.mean(), x.square().mean()])
    for loss in (several.sum(), several.mean(), (several * torch.tensor([0.5, 2.0])).sum()):
        assert weight_of(loss) is None
    assert weight_of(torch.stack([x, x]).sum()).item() == 1


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_loss_that_is_nothing_of_few_samples_is_rehearsed_with_more(micro_batch):
    """As one of hard negatives, of which few samples have none."""

    def of_many(z, y):
        return contrast(z, y) * (len(z) > 3)

    with raises(ModelError, code="loss-not-additive") as caught:
        an_engine(of_many, micro_batch=micro_batch).step(a_batch())
    assert caught.value.why.startswith("of 4 samples")


def test_a_loss_that_is_nothing_teaches_nothing():
    weight = 0.0

    def later(z, y):
        return weight * contrast(z, y)

    engine = an_engine(later)
    for _ in range(3):
        engine.step(a_batch())
    assert not engine._state.watch._known
    weight = 1.0
    with raises(ModelError, code="loss-not-additive"):
        engine.step(a_batch())
