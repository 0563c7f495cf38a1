"""Losses reduced by a model or a program, as a sum and a count.

The sum over a batch is the sum of the means over its parts, each times its denominator. A
`ReductionRule` says which number is the denominator (labels, samples, class weights); a rehearsal
finds the rule that holds (`engine.rehearsal.additivity`), before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gpumix.engine.batch.batch_split import IGNORED_LABEL, LABELS, Objective, count_samples
from gpumix.engine.cross_entropy.linear_cross_entropy import EarlyGradients
from gpumix.engine.loss.loss_graph import (
    drop_gradients,
    find_denominators,
    find_ignored_label,
    find_unscaled_losses,
    selects_by_values,
)
from gpumix.engine.model.document_mask import POSITIONS, make_document_mask
from gpumix.engine.model.forward_coroutine import ModelError

Compute = Callable[[nn.Module, Any, Mapping[str, Tensor], Tensor | None], Tensor]
"""Returns the loss of a micro-batch, given (model, batch, labels replacing the batch's own, the
denominator as far as known)."""
SHIFTED_LABELS = "shift_labels"
HOW_TO_COUNT = "return (summed loss, count) from a loss function of your own"
MOST_LABELS = 4  # names of labels in a batch for which rules are tried


@dataclass(frozen=True)
class ReductionRule:
    """Denominator of a reduced loss.

    Attributes:
        name: name in messages and records, such as "a mean over samples".
        labels: name of labels in the batch: for a mean over labels other than -100; for "graph",
            labels without which a micro-batch counts nothing.
        shifted: True if the first label of each row is left out.
        kind: "labels", "samples", "sum", "told" by the loss function, or "graph": read from the
            loss's autograd graph.
    """

    name: str
    kind: str
    labels: str = ""
    shifted: bool = False

    def count(self, labels: Mapping[str, Tensor], samples: Tensor, whole: int) -> Tensor:
        """Return the denominator of a micro-batch's loss.

        Args:
            labels: labels of the micro-batch, by name.
            samples: number of samples of the micro-batch, a tensor without dimensions.
            whole: number of samples of the global batch.
        """
        if self.kind == "labels":
            return count_row_labels(labels[self.labels], shifted=self.shifted).sum()
        return samples / whole if self.kind == "sum" else samples


@dataclass(frozen=True)
class AlternativeRule:
    """Alternative rule with the same result for all samples tried.

    Attributes:
        times: ratio of its denominator to that of the valid rule. While the ratio is the same for
            each sample, both rules give the same result.
    """

    rule: ReductionRule
    times: float


SAMPLES = ReductionRule("a mean over samples", "samples")
SUM = ReductionRule("a sum over samples", "sum")
SUM_AND_COUNT = ReductionRule("a sum and a count, as the loss function returns them", "told")
GRAPH = ReductionRule("a mean over what the loss itself divides by", "graph")


def list_candidate_rules(labels: Mapping[str, Tensor]) -> tuple[ReductionRule, ...]:
    """Return the candidate rules for a batch with the given labels, likeliest first."""
    found = []
    for name, own in labels.items():
        if own.dim() > 1 and own.shape[-1] > 1 and name != SHIFTED_LABELS:
            found.append(
                ReductionRule(f"a mean over shifted '{name}'", "labels", name, shifted=True)
            )
        found.append(ReductionRule(f"a mean over '{name}'", "labels", name))
    return (*found, SAMPLES, SUM)


@dataclass(frozen=True)
class LossProbe:
    """Loss of a micro-batch, with the candidate denominators.

    Attributes:
        loss: with its graph.
        counts: the denominator by each rule.
        denominators: denominators in the loss's own graph; empty if the graph is not understood.
        values: `denominators` without numbers of elements, except numbers determined by values.
        ignored: the label left out, if any.
    """

    loss: Tensor
    counts: tuple[Tensor, ...]
    denominators: tuple[Tensor, ...]
    ignored: int | None = None
    values: tuple[Tensor, ...] = ()


class ObjectiveWithRule(Protocol):
    """Objective whose rule is found by a rehearsal.

    Attributes:
        rule: the valid rule; None while unknown.
        alternatives: alternative rules, as far as samples were tried.
        trims: True if padding columns may be cut off a micro-batch.
        may_trim: True if trimming is possible at all.
        whole: number of samples of the step's global batch.
        is_watched: True if losses of later steps are checked.
        how_to_count: the edit that says what the loss is a mean over, for errors.
    """

    is_watched: bool
    how_to_count: str
    rule: ReductionRule | None
    alternatives: tuple[AlternativeRule, ...]
    trims: bool
    may_trim: bool
    whole: int

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (summed loss, count) of a micro-batch."""

    def labels_of(self, batch: Any) -> Mapping[str, Tensor]:
        """Return the integer labels of a batch, by name."""

    def rules(self, batch: Any) -> tuple[ReductionRule, ...]:
        """Return the candidate rules."""

    def counts_by_row(self, batch: Any) -> Tensor | None:
        """Count each sample's labels by the candidate rules, [rules, samples] on the host; None
        without labels."""

    def take_evaluated_ones(self) -> list[Any]:
        """Return the micro-batches evaluated since the last call whose loss was divided by 1, and
        forget these."""

    def probe(self, model: nn.Module, batch: Any) -> LossProbe:
        """Return a micro-batch's loss with the candidate denominators."""


class SummedLoss:
    """Loss in the form of a sum.

    Args:
        function: returns (summed loss, count) of a micro-batch.
        rule: `SUM_AND_COUNT` to skip the rehearsal.
        how_to_count: see `ObjectiveWithRule`.
    """

    is_watched = True
    may_trim = trims = False
    alternatives: tuple[AlternativeRule, ...] = ()
    whole = 1

    def __init__(
        self,
        function: Objective,
        rule: ReductionRule | None = None,
        *,
        how_to_count: str = HOW_TO_COUNT,
    ) -> None:
        self._function = function
        self.rule = rule
        self.how_to_count = how_to_count

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self._function(model, batch)

    def labels_of(self, batch: Any) -> Mapping[str, Tensor]:
        return integer_labels(batch)

    def rules(self, batch: Any) -> tuple[ReductionRule, ...]:
        return (SUM_AND_COUNT,)

    def counts_by_row(self, batch: Any) -> Tensor | None:
        return counts_by_row((), self.labels_of(batch))

    def take_evaluated_ones(self) -> list[Any]:
        return []

    def probe(self, model: nn.Module, batch: Any) -> LossProbe:
        return probe_of_sum(*self._function(model, batch))


def probe_of_sum(loss: Tensor, count: Any) -> LossProbe:
    """Return the probe of (summed loss, count), as a mean."""
    count = torch.as_tensor(count)
    divisor = torch.where(count > 0, count, 1).to(loss.device)  # a sum of weights may be below one
    return LossProbe(loss / divisor, (count,), ())


def wrap_objective(objective: Objective | ObjectiveWithRule) -> ObjectiveWithRule:
    """Return an objective with rules as is; wrap a user's function as a sum and a count."""
    return objective if hasattr(objective, "rule") else SummedLoss(objective)  # type: ignore[return-value]


class ExpectedGradient:
    """Expected gradient of a model's loss, before the loss exists.

    The caller that computes the loss knows its use: a mean is multiplied by its count. With the
    expected gradient, the head's gradients are computed together with the loss.
    """

    def __init__(self, upstream: Tensor) -> None:
        self.upstream = upstream
        self.payments: list[EarlyGradients] = []

    def settle(self, loss: Tensor) -> None:
        """Check whether the head's losses get the expected gradient, given the model's loss."""
        unchanged = set(find_unscaled_losses(loss)) if self.payments else set()
        for payment in self.payments:
            if payment in unchanged:
                payment.confirm()
            else:
                payment.undo()
        self.payments.clear()

    def undo_all(self) -> None:
        """Leave the gradients to backward, because the loss's gradient will differ."""
        for payment in self.payments:
            payment.undo()
        self.payments.clear()


expected_gradient: ContextVar[ExpectedGradient | None] = ContextVar(
    "gpumix_expected_gradient", default=None
)


@contextmanager
def expect_gradient(upstream: Tensor) -> Iterator[ExpectedGradient]:
    """Announce that the gradient of the loss computed in the body is `upstream` times the step's
    scale. Call `settle` with the loss."""
    expected = ExpectedGradient(upstream)
    token = expected_gradient.set(expected)
    try:
        yield expected
    finally:
        expected_gradient.reset(token)


class ReducedLoss:
    """Loss reduced to a mean or a sum.

    Args:
        compute: returns the loss of a micro-batch.
        labels_of: returns the integer labels of a batch, by name.
        rule: the valid rule, if known.
        may_trim: True if padding columns could be cut off.
        how_to_count: see `ObjectiveWithRule`.
    """

    is_watched = True

    def __init__(
        self,
        compute: Compute,
        labels_of: Callable[[Any], Mapping[str, Tensor]],
        *,
        rule: ReductionRule | None = None,
        may_trim: bool = False,
        how_to_count: str = HOW_TO_COUNT,
    ) -> None:
        self._compute = compute
        self.labels_of = labels_of
        self.rule = rule
        self.alternatives: tuple[AlternativeRule, ...] = ()
        self.may_trim = may_trim
        self.how_to_count = how_to_count
        self.trims = False
        self.whole = 1
        self._evaluated: list[tuple[Tensor, Any]] = []  # whether divided by 1, and the micro-batch

    def __call__(
        self, model: nn.Module, batch: Any, compute: Compute | None = None, *, times: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (summed loss, count) of a micro-batch.

        Args:
            compute: replaces the common function for this micro-batch.
            times: factor of the batch's loss.
        """
        compute = compute or self._compute
        labels = self.labels_of(batch)
        rule = self.rule or list_candidate_rules(labels)[0]
        if self.reads_graph:
            with torch.enable_grad():  # in evaluations too
                loss = compute(model, batch, {}, None)
            divided_by = self.read_denominator(loss, batch)
            if torch.is_grad_enabled():
                drop_gradients(loss, divided_by == 0)
            # Without counted labels, 0 / 0 times 0.
            summed = loss.float() * _multiply(divided_by, times)
            return torch.where(divided_by > 0, summed, torch.zeros_like(summed)), divided_by
        count = self.count(batch)
        # Without labels a mean is 0 / 0; with a filled-in label it is finite, and counts 0.
        filled = {
            name: torch.where(count > 0, own, torch.zeros_like(own))
            for name, own in (labels.items() if rule.kind == "labels" else ())
        }
        factor = _multiply(torch.ones_like(count) if rule.kind == "sum" else count, times)
        with expect_gradient(factor) as expected:
            loss = compute(model, batch, filled, count)
            expected.settle(loss)
        # In fp32: a sum over many labels exceeds fp16's range.
        return loss.float() * factor, count

    @property
    def reads_graph(self) -> bool:
        """True if the denominator is read from each loss's own graph."""
        return self.rule is not None and self.rule.kind == "graph"

    def read_denominator(self, loss: Tensor, batch: Any) -> Tensor:
        """Return the denominator in the graph of a micro-batch's loss.

        Raises:
            ModelError: the graph shows no denominator.
        """
        found = find_denominators(loss)
        if not found:
            raise ModelError(
                "the loss is computed in another way than when training began",
                code="loss-changed-since-start",
                why="what it is a mean over was read from its graph, which is another one now",
                fix=self.how_to_count,
            )
        # A factor of 0 stands for a mean over nothing: `loss.sum() * 0` where no sample counts.
        divisor = torch.where(found[0].isinf(), 0.0, found[0])
        if not torch.is_grad_enabled():
            self._evaluated.append((divisor == 1, batch))
        if self.rule is None or not self.rule.labels:
            return divisor
        # Without counted labels, a loss may divide by 1 instead of 0.
        labels = self.labels_of(batch)[self.rule.labels]
        own = count_row_labels(labels, shifted=self.rule.shifted).sum() > 0
        return torch.where(own.to(divisor.device), divisor, 0.0)

    def take_evaluated_ones(self) -> list[Any]:
        evaluated, self._evaluated = self._evaluated, []
        return [batch for is_one, batch in evaluated if is_one]

    def count(self, batch: Any, rule: ReductionRule | None = None) -> Tensor:
        """Return the denominator of a micro-batch's loss, by the given or the valid rule."""
        labels = self.labels_of(batch)
        rule = rule or self.rule or list_candidate_rules(labels)[0]
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        device = next((tensor.device for tensor in tensors), None)
        samples = torch.full((), count_samples(batch), device=device)
        return rule.count(labels, samples, self.whole)

    def rules(self, batch: Any) -> tuple[ReductionRule, ...]:
        return (*list_candidate_rules(self.labels_of(batch)), GRAPH)

    def counts_by_row(self, batch: Any) -> Tensor | None:
        rules = (
            (self.rule, *(alternative.rule for alternative in self.alternatives))
            if self.alternatives
            else ()
        )
        return counts_by_row([rule for rule in rules if rule is not None], self.labels_of(batch))

    def can_distinguish_rivals(self, batch: Any) -> bool:
        """Return True if an alternative rule weights some sample of a batch differently."""
        counted = self.counts_by_row(batch)
        if counted is None or not self.alternatives:
            return False
        own, *others = counted.double()
        return any(
            not torch.allclose(other, alternative.times * own, rtol=1e-6, atol=0.0)
            for alternative, other in zip(self.alternatives, others)
        )

    def probe(self, model: nn.Module, batch: Any) -> LossProbe:
        rules = self.rules(batch)
        counts = [self.count(batch, rule) for rule in rules if rule is not GRAPH]
        return self.probe_of(self._compute(model, batch, {}, counts[0]), counts)

    def probe_of(self, loss: Tensor, counts: Sequence[Tensor]) -> LossProbe:
        """Return the probe of a loss.

        Args:
            counts: the denominators by all rules except the graph's.
        """
        denominators = find_denominators(loss)
        of_graph = denominators[0] if denominators else torch.full((), torch.nan)
        values = find_denominators(loss, shapes=selects_by_values(loss))
        return LossProbe(loss, (*counts, of_graph), denominators, find_ignored_label(loss), values)


def compute_model_loss(
    model: nn.Module, batch: Any, labels: Mapping[str, Tensor], count: Tensor | None
) -> Tensor:
    """Compute the loss of a `transformers` model from the labels in a batch.

    Args:
        labels: replace the batch's own.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ModelError(
            "a transformers model needs batches with 'labels'",
            code="batch-without-labels",
            where=f"batch with {describe_entries(batch)}",
            fix="put 'labels' into the batch, or give your own `loss` to gpumix.prepare",
        )
    mask = make_document_mask(model, batch) if POSITIONS in batch else {}
    loss: Tensor = model(**{**batch, **mask, **labels}).loss
    return loss


def describe_entries(batch: Any) -> str:
    """Return the names of a batch's entries, or its type."""
    return ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__


def _multiply(count: Tensor, times: float) -> Tensor:
    return count if times == 1.0 else count * times


def counts_by_row(rules: Sequence[ReductionRule], labels: Mapping[str, Tensor]) -> Tensor | None:
    """Count each sample's labels by rules, [rules, samples] on the host; None without labels. A
    rule over samples counts 1. Without rules, counts for all means over labels."""
    first = next(iter(labels.values()), None)
    if first is None:
        return None
    counted = []
    for rule in rules or [rule for rule in list_candidate_rules(labels) if rule.labels]:
        own = labels.get(rule.labels)
        if own is None:
            counted.append(torch.ones(len(first), dtype=torch.int64))
        else:
            counted.append(count_row_labels(own, shifted=rule.shifted).cpu())
    return torch.stack(counted)


def count_row_labels(labels: Tensor, *, shifted: bool = False) -> Tensor:
    """Count each sample's labels other than -100; `shifted`: without each first label."""
    counted = (labels[..., 1:] if shifted else labels) != IGNORED_LABEL
    return counted.unsqueeze(1).flatten(1).sum(1)


def integer_labels(batch: Any, names: tuple[str, ...] = (LABELS,)) -> dict[str, Tensor]:
    """Return the integer class labels of a batch, by name; only the shifted labels, if present."""
    if not isinstance(batch, Mapping):
        return {}
    if isinstance(batch.get(SHIFTED_LABELS), Tensor):
        return {SHIFTED_LABELS: batch[SHIFTED_LABELS]}
    return {
        name: own
        for name in names[:MOST_LABELS]
        if isinstance(own := batch.get(name), Tensor)
        and own.dim() > 0
        and not own.is_floating_point()
        and not own.is_complex()
    }
