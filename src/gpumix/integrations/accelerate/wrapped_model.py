"""A model called by a program's own loop, run by a plan underneath.

A loss computed by the model, from `labels`, runs micro-batch by micro-batch, forward and backward
at once, when the loop calls the model; the loop's backward only scales the gradients. A loss
computed by the loop needs the outputs first: the batch then runs forward a second time, with the
gradients of the loop's loss by the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gpumix.engine.batch.batch_split import count_samples
from gpumix.engine.engine import Engine
from gpumix.engine.loss.loss_graph import kind_of
from gpumix.engine.loss.reduction import SUM_AND_COUNT, ReducedLoss, ReductionRule, integer_labels
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.rehearsal.loss_watch import REHEARSAL_STEPS
from gpumix.engine.rehearsal.refusals import NOT_OF_PARTS
from gpumix.engine.rehearsal.samples import is_true_on_any_rank
from gpumix.integrations.accelerate.call_signature import ARGS, KWARGS
from gpumix.integrations.accelerate.loader import get_current_part
from gpumix.integrations.accelerate.loop_recorder import LoopRecorder
from gpumix.integrations.accelerate.loss_coupling import check_row_coupling
from gpumix.integrations.accelerate.loss_weights import LossFactors, LossWeigher, LossWeight
from gpumix.integrations.accelerate.outputs import (
    LoopOutputs,
    SumOfOutputs,
    call_model,
    detach_to_leaves,
    find_float_tensors,
    has_loss,
    join_outputs,
    loss_of,
    sum_outputs,
    take_zero_rows,
    with_loss,
)
from gpumix.integrations.accelerate.row_independence import check_row_independence
from gpumix.integrations.common.forward import clone_inference_tensor, detach_leaf
from gpumix.integrations.dataloader.sharded_loader import RankPart
from gpumix.schema.errors import InputError

MOST_KINDS = 16  # of losses, to check
HOW_TO_COUNT = (
    "call the model without labels, compute the loss from its outputs, and say what it is a mean "
    "over: accelerator.backward(loss, count=N)"
)
GRADIENTS, WEIGHTS = "gradients", "weights"
LABELS = "labels"


class LoopLoss(ReducedLoss):
    """Loss of a micro-batch: the model's own, or a product of outputs with the gradients from the
    loop's backward.

    Attributes:
        by_loop: the loop computes its losses itself, from outputs.

    Args:
        stands_in: make a loss of the outputs of a model that computes none from labels.
    """

    def __init__(self, *, stands_in: bool = False) -> None:
        def computed(
            model: nn.Module, batch: Any, labels: Mapping[str, Tensor], count: Tensor | None
        ) -> Tensor:
            outputs = model(*batch[ARGS], **{**batch[KWARGS], **labels})
            return sum_outputs(outputs) if stands_in and not has_loss(outputs) else loss_of(outputs)

        super().__init__(
            computed, lambda batch: integer_labels(batch[KWARGS]), how_to_count=HOW_TO_COUNT
        )

    @property
    def by_loop(self) -> bool:
        return not self.is_watched

    @by_loop.setter
    def by_loop(self, by_loop: bool) -> None:
        self.is_watched = not by_loop

    @property
    def rule(self) -> ReductionRule | None:
        return SUM_AND_COUNT if self.by_loop else self._rule

    @rule.setter
    def rule(self, rule: ReductionRule | None) -> None:
        self._rule = rule

    def __call__(
        self, model: nn.Module, batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if GRADIENTS not in batch:
            return super().__call__(model, batch, *args, **kwargs)
        outputs = model(*batch[ARGS], **batch[KWARGS])
        pairs = zip(find_float_tensors(outputs), batch[GRADIENTS], strict=True)
        sums = [(made.float() * wanted).sum() for made, wanted in pairs]
        return torch.stack(sums).sum(), batch[WEIGHTS].sum()

    def evaluated(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        """Return a model's outputs for a micro-batch, and the denominator of the loss."""
        if not self.reads_graph:
            return call_model(model, batch), self.count(batch)
        with torch.enable_grad():
            outputs = call_model(model, batch)
        return tree_map(detach_leaf, outputs), self.read_denominator(loss_of(outputs), batch)


class WrappedModel(nn.Module):
    """Wrapper called by a loop instead of the model.

    Args:
        module: the model.
        alone: readies the model for a call before it runs by a plan, or refuses the call.

    Attributes:
        is_planned: the model runs by a plan.
        overflowed: an accumulated fp16 gradient overflowed: this step has no gradients.
    """

    is_planned = False
    overflowed = False
    _engine: Engine
    _loss: LoopLoss
    _record: LoopRecorder
    _weights: LossWeigher
    _factors: LossFactors

    def __init__(
        self,
        module: nn.Module,
        alone: Callable[[WrappedModel], None],
    ) -> None:
        super().__init__()
        self._kinds: set[int] = set()  # of the loop's losses known to couple no samples
        self._of_outputs = SumOfOutputs()
        self._calls = 0  # training calls with a loss of the loop
        self._evaluations = 0
        self._has_loss: bool | None = None  # the model returns a loss for labels
        self.module = module
        self._alone = alone
        self._samples: int | None = None  # of the last call's batch
        self._begun: _PendingCall | None = None
        self._last: tuple[Tensor, LossWeight | None] | None = None  # loss of the last backward
        self._has_stepped = False  # the optimizer, since gradients were added
        self._like: Any = None  # the last outputs, without rows

    def attach_engine(self, engine: Engine, loss: LoopLoss, record: LoopRecorder) -> None:
        """Run the model by a plan from now on.

        Args:
            engine: has sharded the model.
            loss: of its micro-batches.
            record: receives the loop's events.
        """
        self._engine, self._loss, self._record = engine, loss, record
        self._weights, self._factors = LossWeigher(engine.comm), LossFactors(engine.comm)
        self.is_planned = True

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the model: `config`, `generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_planned:
            self._alone(self)
            return self.module(*args, **kwargs)
        batch = {ARGS: args, KWARGS: kwargs}
        if not (self.training and torch.is_grad_enabled()):
            evaluated = self._evaluated(batch)
            self._record.rest()
            return evaluated
        _refuse_gradients(batch)
        self._record.computes()
        if self._begun is not None:
            raise InputError(
                "the model is called again before the backward of its last loss",
                code="model-called-before-backward",
                fix="call accelerator.backward(loss) once for each call of the model",
            )
        given = get_current_part(batch)
        _refuse_other_rows(count_samples(batch), given)
        self._samples = None if given is None else given.samples
        stands_in = given is not None and given.own == 0
        own = take_zero_rows(batch) if stands_in else batch
        if LABELS in kwargs:
            whole, made = self._computed(own)
            loss, self._has_loss = whole.float().requires_grad_(), True
            self._begun = _PendingCall(own, [loss], made)
            return LoopOutputs(loss)
        return self._outside(batch, own)

    def _outside(self, batch: dict[str, Any], own: dict[str, Any]) -> Any:
        """Return the model's outputs as leaves of the loop's graph.

        Args:
            own: `batch`, or zero rows of it if its row only stands in to give the loop a loss.
        """
        if not self._engine.accepts_coupling and self._calls in (0, *REHEARSAL_STEPS):
            self._rehearse_outputs(own)
        self._calls += 1
        found = self._engine.outputs(call_model, batch, samples=self._samples, as_trained=True)
        outputs, leaves, numbers = detach_to_leaves(self._joined(list(found.values())))
        self._begun = _PendingCall(own, leaves, numbers=numbers)
        return outputs

    def _rehearse_outputs(self, batch: dict[str, Any]) -> None:
        """Raise ModelError if outputs for a few samples depend on other samples. Collective."""
        try:
            self._engine.rehearse(self._of_outputs, batch, self._samples)
        except ModelError as error:
            if error.what == NOT_OF_PARTS:
                error.what = "what the model returns for a sample depends on other samples"
                error.code = "outputs-depend-on-others"
                error.why = f"as a sum over what it returns shows, {error.why}"
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this rank's shards."""
        if not self.is_planned:
            self.module.zero_grad(set_to_none)
            return
        self.overflowed = False
        self._without_gradients()

    def needs_backward(self, loss: Tensor) -> bool:
        """Return True if a backward from this loss must reach the model. A backward between calls
        of the model, through parameters of other models only, need not."""
        if self._begun is not None:
            return True
        own = {id(p) for p in (*self._engine.parameters(), *self.module.parameters())}
        leaves = list(_leaves(loss))
        others = [one for one in leaves if isinstance(one, nn.Parameter) and id(one) not in own]
        return not leaves or len(others) < len(leaves)

    def weight_of(self, loss: Tensor, count: Tensor | float | None) -> LossWeight | None:
        """Return the worth of this rank's loss before the loop's backward; None for a loss of all
        ranks' samples. Collective.

        Args:
            count: the number of items in the mean, if the loop gives it.

        Raises:
            InputError: the worth cannot be known, or the loss contains parameters.
        """
        if self._begun is None or self._begun.made is not None:
            return None
        _refuse_terms(loss, self._begun)
        if not (self._engine.plan.is_uncut or self._engine.accepts_coupling):
            kind = kind_of(loss)
            if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
                check_row_coupling(loss, self._begun.leaves)
                self._kinds.add(kind)
        own = _rows(self._begun.batch)
        return self._weights.of(loss, own, max(own, 1), count)

    def backward_done(self, loss: Tensor, worth: LossWeight | None) -> None:
        """Finish the loop's backward from `loss`, arrived at the outputs: add gradients of
        parameters.

        Raises:
            InputError: no call of the model came before, the loss does not depend on the model, or
                processes multiply the model's loss by unlike numbers.
        """
        begun, self._begun = self._begun, None
        if begun is None or any(leaf.grad is None for leaf in begun.leaves[:1]):
            raise InputError(
                "the loss does not come from the last call of the model",
                code="loss-not-of-last-call",
                fix="compute it of what the model returned, and call accelerator.backward once",
            )
        if worth is not None:
            rows = _rows(begun.batch)
            wanted = []
            for leaf in begun.leaves:
                own, weight = leaf.grad, worth.weight.to(leaf)
                own = torch.zeros_like(leaf) if own is None else own
                # Without weight, as of a mean over nothing, the gradient may be no number.
                wanted.append((own * weight).masked_fill(weight == 0, 0))
            wanted = wanted if rows else take_zero_rows(wanted)
            weights = (worth.share / max(rows, 1)).expand(rows)
            batch = {**begun.batch, GRADIENTS: wanted, WEIGHTS: weights}
            _, made = self._computed(batch)
        else:
            assert begun.made is not None, "its gradients were made along with the loss"
            made, own_factor = begun.made, begun.leaves[0].grad
            assert own_factor is not None
            times = self._factors.of(own_factor, _rows(begun.batch))
            for gradient in made.values():
                gradient.mul_(times.to(gradient.device))
        self._record.computed(loss, None if worth is None else worth.weight)
        self._last = loss, worth
        self._add(made)

    def weight_for_mean(self, tensor: Any) -> Any:
        """Weight a tensor for a mean over ranks. The loss of the last backward is scaled for the
        mean to be the loss of the global batch; any other tensor is returned unchanged."""
        if not self.is_last(tensor):
            return tensor
        _, worth = self._last or (None, None)
        assert worth is not None, "it has one"
        weight = self._engine.comm.world * worth.weight.to(tensor)
        return torch.where(weight > 0, tensor * weight, 0.0)

    def is_last(self, tensor: Any) -> bool:
        """Return True for the loss of the last backward, if the loss is of this rank only."""
        loss, worth = self._last or (None, None)
        if worth is None or loss is None or not isinstance(tensor, Tensor) or tensor.numel() != 1:
            return False
        return tensor.untyped_storage().data_ptr() == loss.untyped_storage().data_ptr()

    def check_done(self) -> None:
        """Raise InputError if a loss was computed, and no backward followed."""
        if self._begun is not None:
            raise InputError(
                "the optimizer steps before the backward of the last loss",
                code="step-before-backward",
                fix="call accelerator.backward(loss), not loss.backward()",
            )

    def stepped(self) -> None:
        """Note that the optimizer stepped, or skipped the step."""
        self._has_stepped = True

    def _computed(self, batch: dict[str, Any]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """Return a batch's loss and gradients. Gradients already in parameters stay: the loop may
        use them before or after its backward."""
        before = {p: p.grad.clone() for p in self._with_gradients() if p.grad is not None}
        self._without_gradients()
        self._loss.by_loop = GRADIENTS in batch
        loss = self._engine.step(batch, samples=self._samples)
        made = {p: p.grad for p in self._with_gradients() if p.grad is not None}
        for parameter in self._engine.parameters():
            parameter.grad = before.get(parameter)
        return loss, made

    def _add(self, made: dict[nn.Parameter, Tensor]) -> None:
        self.overflowed &= not self._has_stepped
        self.overflowed |= self._engine.overflowed
        self._has_stepped = False
        if self.overflowed:  # the sum is dropped
            self._without_gradients()
            return
        for parameter, gradient in made.items():
            before = parameter.grad
            parameter.grad = gradient if before is None else gradient.add_(before)

    def _without_gradients(self) -> None:
        for parameter in self._with_gradients():
            parameter.grad = None

    def _with_gradients(self) -> Iterator[nn.Parameter]:
        return (p for p in self._engine.parameters() if p.grad is not None)

    def _evaluated(self, batch: dict[str, Any]) -> Any:
        """Return the model's outputs without gradients; a loss is of the global batch."""

        def made(model: nn.Module, part: Any) -> tuple[Any, Tensor]:
            if labelled:
                return self._loss.evaluated(model, part)
            return call_model(model, part), torch.tensor(_rows(part))

        with torch.inference_mode(False), torch.no_grad():
            batch = tree_map(clone_inference_tensor, batch)
            labelled = LABELS in batch[KWARGS] and self._computes_loss(batch)
            if labelled:
                self._loss.by_loop = False
                self._engine.settle(batch)
                given = get_current_part(batch)
                self._loss.whole = _rows(batch) if given is None else given.samples
            if self._evaluations in (0, *REHEARSAL_STEPS):
                check_row_independence(self._engine, call_model, batch)
            self._evaluations += 1
            found = list(self._engine.outputs(made, batch).values())
        outputs = self._joined([outputs for outputs, _ in found])
        if not has_loss(outputs, labelled=labelled):
            return outputs
        sums = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        given = get_current_part(batch)
        stands_in = given is not None and given.own == 0
        for one, count in [] if stands_in else found:
            sums += torch.stack([loss_of(one).double() * count, count.double()])
        total = self._engine.comm.all_reduce(sums, "loss of an evaluation")
        return with_loss(outputs, (total[0] / total[1]).float())

    def _computes_loss(self, batch: dict[str, Any]) -> bool:
        """Return True if the model computes a loss from given labels. Collective."""
        if self._has_loss is None:
            found = self._engine.outputs(call_model, batch).values()
            self._has_loss = is_true_on_any_rank(self._engine, any(map(has_loss, found)))
        return self._has_loss

    def _joined(self, outputs: Sequence[Any]) -> Any:
        """Return the joined outputs of micro-batches."""
        if not outputs:
            if self._like is None:
                raise InputError(
                    "this rank has no samples, and does not know what the model returns",
                    code="rank-without-samples",
                    fix="use batches of at least as many samples as there are devices",
                )
            return self._like
        whole = join_outputs(outputs)
        self._like = take_zero_rows(whole)
        return whole


@dataclass(frozen=True)
class _PendingCall:
    """Call of the model awaiting its backward.

    Attributes:
        made: gradients of a loss computed by the model.
        numbers: outputs that are numbers of a full micro-batch.
    """

    batch: dict[str, Any]
    leaves: list[Tensor]
    made: dict[nn.Parameter, Tensor] | None = None
    numbers: Sequence[Tensor] = ()


def _refuse_gradients(batch: Any) -> None:
    """Raise InputError if an input of a call requires a gradient."""
    if any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(batch)):
        raise InputError(
            "an input of the model requires a gradient, and gets none",
            code="input-requires-gradient",
            why="the model computes the batch in micro-batches, behind the outputs that the loop "
            "has",
            fix="detach it, or put the module that made it into the model",
        )


def _rows(batch: Any) -> int:
    tensors = (t for t in tree_flatten((batch[ARGS], batch[KWARGS]))[0] if isinstance(t, Tensor))
    return len(next(tensors))


def _refuse_other_rows(rows: int, given: RankPart | None) -> None:
    """Raise InputError if a call has another number of samples than this rank."""
    if given is None or rows == max(1, given.own):
        return
    raise InputError(
        f"the model is given {rows} samples, and the loop has {given.own} of the batch it is at",
        code="samples-not-of-batch",
        why=f"the batch of all ranks has {given.samples}, of which the plan says whose are which",
        fix="call it with the samples of one batch of one prepared loader; samples that belong "
        "together are of one dataset",
    )


def _refuse_terms(loss: Tensor, begun: _PendingCall) -> None:
    """Raise InputError if a loss has a term over parameters, or over a number of a micro-batch."""
    known = {id(leaf) for leaf in begun.leaves}
    numbers = {id(number) for number in begun.numbers}
    leaves = list(_leaves(loss))
    if any(isinstance(one, nn.Parameter) and id(one) not in known for one in leaves):
        raise InputError(
            "the loss has a term over parameters of the model",
            code="loss-term-over-parameters",
            where="accelerator.backward",
            why="each rank has pieces of them, so the term would be another one on each",
            fix="set weight_decay of the optimizer in place of the term",
        )
    if any(id(one) in numbers for one in leaves):
        raise InputError(
            "the loss is made of a number that the model returned",
            code="loss-of-returned-number",
            where="accelerator.backward",
            why="each micro-batch has a number of its own, from which no gradient comes back",
            fix="give the model its labels by that name, model(..., labels=labels), so that it "
            "computes its loss itself; or return one number for each sample",
        )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a loss's graph."""
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [following for following, _ in node.next_functions]
