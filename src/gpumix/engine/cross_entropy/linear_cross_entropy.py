"""Chunked cross-entropy of a linear layer's outputs.

The logits of a chunk of rows are computed, turned into their gradient in place, and used before the
next chunk's, so the full logits never exist. If the gradient of the loss is known in advance,
gradients are computed in forward, which saves a recompute of the logits; otherwise in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpumix.cost.memory_layout.chunk_rows import compute_chunk_rows, get_bytes_per_logit
from gpumix.engine.cross_entropy.fused_cross_entropy import compute_fused_losses
from gpumix.hardware.runtime import is_gpu

# An element-wise operation on the logits of some rows.
Operation = Callable[[Tensor], Tensor]


@dataclass
class GradientSum:
    """A gradient summed over chunks and micro-batches.

    Attributes:
        empty: `tensor` is uninitialized; the first value is written instead of added, because
            zeroing and adding would cost two passes over the memory.
    """

    tensor: Tensor
    empty: bool = False

    def add(self, value: Tensor) -> None:
        if self.empty:
            self.tensor.copy_(value)
        else:
            self.tensor += value
        self.empty = False

    def add_product(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add `gradient`.T @ `hidden`, a weight's gradient, without a temporary of full size."""
        into, beta = self.tensor, 0 if self.empty else 1
        if into.dtype == gradient.dtype:
            torch.addmm(into, gradient.t(), hidden, beta=beta, out=into)
        elif _multiplies_into(into.dtype, gradient.dtype, gradient.device):
            torch.addmm(into, gradient.t(), hidden, into.dtype, beta=beta, out=into)  # type: ignore[call-overload]
        else:
            # A product in the compute dtype is no larger than the chunk's logits.
            tile = max(1, gradient.numel() // hidden.shape[1])
            for part, columns in zip(into.split(tile), gradient.split(tile, dim=1)):
                GradientSum(part, self.empty).add(columns.t() @ hidden)
        self.empty = False

    def finish(self) -> None:
        """Zero the tensor if nothing was added."""
        if self.empty:
            self.tensor.zero_()
        self.empty = False


# Returns the sum of a parameter's gradient.
SumOf = Callable[[Tensor], GradientSum]


@functools.cache
def _multiplies_into(wanted: torch.dtype, factors: torch.dtype, device: torch.device) -> bool:
    """Return whether a product of matrices in `factors` can be added to a `wanted` matrix without a
    temporary. cuBLAS can for fp16 and bf16 to fp32; libraries of other devices cannot."""
    if device.type != "cuda":
        return False
    into, one = (torch.zeros(8, 8, dtype=dtype, device=device) for dtype in (wanted, factors))
    try:
        torch.addmm(into, one, one, wanted, out=into)  # type: ignore[call-overload]
    except RuntimeError:  # a ROCm build, an older library
        return False
    return True


@dataclass
class Gradients:
    """Destinations of gradients; None where no gradient is wanted. `hidden` is written, `weight`
    and `bias` are added to."""

    hidden: Tensor | None = None
    weight: GradientSum | None = None
    bias: GradientSum | None = None

    def finish(self) -> None:
        """Finish the sums after the last chunk."""
        for one in (self.weight, self.bias):
            if one is not None:
                one.finish()


@dataclass(frozen=True)
class LinearCrossEntropy:
    """`cross_entropy(operations(linear(hidden, weight, bias)), target)`, not yet computed.

    Args:
        hidden: (rows, width).
        target: (rows,), a class for each row.
        operations: applied between the linear layer and the loss.
        dtype: of the operations' results, and so of the loss.
        mean: whether the loss is the mean over rows that are not ignored, or the sum.
        fused: whether one kernel computes the losses of a chunk and their gradient, if there are no
            operations.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    operations: tuple[Operation, ...]
    dtype: torch.dtype
    ignore_index: int
    label_smoothing: float
    mean: bool
    fused: bool = False

    def value(self) -> Tensor:
        """Return the loss."""
        return self.run(None, Gradients())

    def run(self, upstream: Tensor | None, into: Gradients) -> Tensor:
        """Compute the loss, and the gradients of loss * `upstream`."""
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        valid = self.target != self.ignore_index
        part = valid.sum().to(exact).reciprocal() if self.mean else valid.new_ones((), dtype=exact)
        losses = part.new_empty(self.target.shape)
        factors = None
        if upstream is not None:
            factors = torch.where(valid, upstream.to(exact) * part, 0.0).unsqueeze(1)
        targets = torch.where(valid, self.target, 0).unsqueeze(1)
        fused = self.fused and not self.operations and exact == torch.float32
        for rows, logits, logarithms in self._chunks(exact, fused=fused):
            self._linear(rows, logits)
            if fused:
                own = None if factors is None else factors[rows].squeeze(1)
                losses[rows] = compute_fused_losses(
                    logits, targets[rows], own, self.label_smoothing
                )
                if factors is not None:
                    self._pass_on(rows, logits, self.hidden[rows], into)
                continue
            made = _ChunkLogits(logits, self.operations, graph=factors is not None)
            torch.log_softmax(made.outputs.detach(), -1, dtype=exact, out=logarithms)
            losses[rows] = self._losses(logarithms, targets[rows])
            if factors is not None:
                self._to_gradient(logarithms, targets[rows])
                self._give(rows, made, logarithms, factors[rows], into)
        if factors is not None:
            into.finish()
        total = torch.where(valid, losses, 0.0).sum()
        # Without a label a mean is 0 / 0, as in PyTorch.
        return (total * part if self.mean else total).to(self.dtype)

    def _chunks(self, exact: torch.dtype, *, fused: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows and two buffers, reused, for each chunk. Fused kernels need no second."""
        rows, width = self.hidden.shape
        vocabulary = self.weight.shape[0]
        size = compute_chunk_rows(
            rows,
            vocabulary=vocabulary,
            width=width,
            on_gpu=is_gpu(self.hidden.device),
            logit_bytes=get_bytes_per_logit(self.hidden.element_size(), fused=fused),
        )
        logits = self.hidden.new_empty(size, vocabulary)
        logarithms = self.hidden.new_empty(size, 0 if fused else vocabulary, dtype=exact)
        for start in range(0, rows, size):
            end = min(start + size, rows)
            yield slice(start, end), logits[: end - start], logarithms[: end - start]

    def _linear(self, rows: slice, logits: Tensor) -> None:
        if self.bias is None:
            torch.mm(self.hidden[rows], self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=logits)

    def _losses(self, logarithms: Tensor, targets: Tensor) -> Tensor:
        losses = -logarithms.gather(1, targets).squeeze(1)
        if self.label_smoothing:
            losses *= 1 - self.label_smoothing
            losses -= logarithms.mean(1) * self.label_smoothing
        return losses

    def _to_gradient(self, logarithms: Tensor, targets: Tensor) -> None:
        """Turn log-probabilities into the gradient of each row's loss, in place."""
        gradient = logarithms.exp_()
        hits = gradient.new_full((), self.label_smoothing - 1).expand(targets.shape)
        gradient.scatter_add_(1, targets, hits)
        if self.label_smoothing:
            gradient -= self.label_smoothing / gradient.shape[1]

    def _give(
        self, rows: slice, made: _ChunkLogits, gradient: Tensor, factors: Tensor, into: Gradients
    ) -> None:
        """Scale a chunk's gradient by factors of rows and propagate the product."""
        hidden = self.hidden[rows]
        # If nothing else passes over the logits' gradient, it is cheaper to scale the operands and
        # results of the matrix products.
        after = made.is_gradient_unchanged(gradient)
        if not after:
            self._pass_on(rows, made.backward(gradient, factors), hidden, into)
            return
        if into.hidden is not None:
            torch.mm(gradient, self.weight, out=into.hidden[rows])
            into.hidden[rows] *= factors
        if into.bias is not None:
            into.bias.add((gradient * factors).sum(0))
        if into.weight is not None:
            into.weight.add_product(gradient, hidden * factors)

    def _pass_on(self, rows: slice, gradient: Tensor, hidden: Tensor, into: Gradients) -> None:
        """Propagate the gradient of a chunk's logits to its destinations."""
        if into.hidden is not None:
            torch.mm(gradient, self.weight, out=into.hidden[rows])
        if into.bias is not None:
            into.bias.add(gradient.sum(0))
        if into.weight is not None:
            into.weight.add_product(gradient, hidden)


class _ChunkLogits:
    """Logits of a chunk after the operations.

    Args:
        graph: whether to record a graph back to the logits.
    """

    def __init__(self, logits: Tensor, operations: Sequence[Operation], *, graph: bool) -> None:
        self._logits = logits
        self._source = self.outputs = logits
        if operations:
            with torch.set_grad_enabled(graph):
                self._source = self.outputs = logits.detach().requires_grad_(graph)
                for operation in operations:
                    self.outputs = operation(self.outputs)

    def is_gradient_unchanged(self, gradient: Tensor) -> bool:
        """Return whether the gradient of the outputs equals the gradient of the logits."""
        return self.outputs is self._logits and self._logits.dtype == gradient.dtype

    def backward(self, gradient: Tensor, factors: Tensor) -> Tensor:
        """Return the gradient of the logits, given the outputs' gradient, which is overwritten."""
        if self.outputs is self._logits:  # no longer needed
            return torch.mul(gradient, factors, out=self._logits)
        gradient = gradient.mul_(factors).to(self.outputs.dtype)
        return torch.autograd.grad(self.outputs, self._source, gradient)[0]


def _denominator(target: Tensor, ignore_index: int, *, mean: bool) -> Tensor:
    """Return the denominator of the sum of the rows' losses."""
    valid = (target != ignore_index).sum()
    return valid if mean else torch.ones_like(valid)


class EarlyGradients:
    """A loss whose gradients of `weight` and `bias` were added in forward, for an assumed loss
    gradient `upstream`.

    The actual loss gradient is known later. `confirm` keeps the added gradients; `undo` subtracts
    them and leaves all gradients to backward.
    """

    def __init__(self, problem: LinearCrossEntropy, upstream: Tensor, gradients: Gradients) -> None:
        self.gradients = gradients
        self.confirmed = False
        self._undo: tuple[LinearCrossEntropy, Tensor] | None = (problem, upstream)

    def confirm(self) -> None:
        self.confirmed = True
        self._undo = None

    def undo(self) -> None:
        assert self._undo is not None, "settled once"
        problem, upstream = self._undo
        added = Gradients(None, self.gradients.weight, self.gradients.bias)
        problem.run(-upstream, added)
        self.gradients = Gradients()
        self._undo = None


class ChunkedLoss(torch.autograd.Function):
    """Chunked loss in the autograd graph. The node is `ctx`, whose `payment` and `denominator` are
    used elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: Callable[[Tensor, Tensor, Tensor | None], LinearCrossEntropy],
        upstream: Tensor | None,
        sum_of: SumOf | None,
    ) -> Tensor:
        """Compute the loss, and with a known `upstream` all gradients.

        Args:
            problem: makes the loss from the three tensors.
            upstream: the gradient of the loss, if known in advance; gradients are then computed
                now.
            sum_of: returns the sum that a parameter's gradient is added to; None: gradients are
                returned to autograd.
        """
        stated = problem(hidden.detach(), weight.detach(), None if bias is None else bias.detach())
        ctx.problem, ctx.sum_of, ctx.payment = problem, sum_of, None
        ctx.ignore_index = stated.ignore_index
        ctx.denominator = functools.partial(
            _denominator, stated.target, stated.ignore_index, mean=stated.mean
        )
        ctx.save_for_backward(hidden, weight, bias)
        if upstream is None:
            return stated.value()
        assert sum_of is not None, "gradients made beforehand go into buffers"
        gradients = _make_gradients(ctx.needs_input_grad, hidden, weight, bias, sum_of)
        loss = stated.run(upstream, gradients)
        ctx.payment = EarlyGradients(stated, upstream, gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        payment, ctx.payment = ctx.payment, None  # a second backward pass computes again
        if payment is not None and payment.confirmed:
            return payment.gradients.hidden, None, None, None, None, None
        hidden, weight, bias = ctx.saved_tensors
        into = _make_gradients(
            ctx.needs_input_grad, hidden, weight, bias, ctx.sum_of or _allocate_sum
        )
        ctx.problem(hidden, weight, bias).run(upstream, into)
        if ctx.sum_of is not None:
            return into.hidden, None, None, None, None, None
        of_weight = None if into.weight is None else into.weight.tensor.to(weight.dtype)
        of_bias = None if into.bias is None else into.bias.tensor.to(bias.dtype)
        return into.hidden, of_weight, of_bias, None, None, None


def _allocate_sum(parameter: Tensor) -> GradientSum:
    """Allocate separate memory for a parameter's gradient, at least fp32."""
    dtype = torch.promote_types(parameter.dtype, torch.float)
    return GradientSum(torch.empty_like(parameter, dtype=dtype), empty=True)


def _make_gradients(
    wanted: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, sum_of: SumOf
) -> Gradients:
    def of(parameter: Tensor | None, is_wanted: bool) -> GradientSum | None:
        return sum_of(parameter) if parameter is not None and is_wanted else None

    into = torch.empty_like(hidden) if wanted[0] else None
    return Gradients(into, of(weight, wanted[1]), of(bias, wanted[2]))
