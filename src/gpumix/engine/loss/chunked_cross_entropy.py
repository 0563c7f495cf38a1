"""Chunked cross-entropy: the full logits of a large vocabulary never exist.

The model's output layer returns lazy logits (`lazy_logits`), and the model's loss on them runs
chunk by chunk (`linear_cross_entropy`). A model that uses its logits in any other way gets full
logits, from then on immediately.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.cross_entropy.lazy_logits import LazyLogits, LogitsFamily
from gpumix.engine.cross_entropy.linear_cross_entropy import (
    ChunkedLoss,
    GradientSum,
)
from gpumix.engine.loss.reduction import expected_gradient
from gpumix.engine.model.backward_hooks import ParameterGradient
from gpumix.engine.sharding.flat_group import FlatGroup


class ChunkedCrossEntropy:
    """Chunked cross-entropy of a model's output layer, inside `step`.

    `full_logits_reason` says which use of the logits needs them in full; empty if none so far.

    Args:
        units: the model's blocks, which are not searched for the output layer.
        whole_because: a reason to always compute full logits, if any.
        fused: whether losses are computed by the fused kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[nn.Module] = (),
        *,
        full_logits_reason: str = "",
        fused: bool = False,
    ) -> None:
        self.fused = fused
        self.full_logits_reason = full_logits_reason
        self.chunked_losses = 0
        self._scale: Tensor | None = None
        self._families: list[LogitsFamily] | None = None
        self._wanted_whole = False
        self._gradients: dict[int, ParameterGradient] = {}  # by the parameter's id
        layer = None if full_logits_reason else find_output_layer(model, units)
        # The layer references its forward, and so this object: weak, to avoid a cycle.
        self._layer = None if layer is None else weakref.ref(layer)
        if layer is None:
            self.full_logits_reason = full_logits_reason or "the model has no linear output layer"
        else:
            layer.forward = self._forward  # type: ignore[assignment, method-assign]

    def add_to_gradients_of(self, groups: Iterable[FlatGroup]) -> None:
        """Add in place to the gradients of the layer's parameters in these groups."""
        if self.layer is not None:
            found = [own for group in groups for own in group.gradients_of(self.layer)]
            self._gradients |= {id(own.view): own for own in found}

    @property
    def supported(self) -> bool:
        """True if all losses so far ran in chunks, without full logits."""
        return self.chunked_losses > 0 and not self.full_logits_reason

    @property
    def layer(self) -> nn.Linear | None:
        """The layer that computes the logits."""
        return None if self._layer is None else self._layer()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The current parameters of the output layer."""
        return [] if self.layer is None else list(self.layer.parameters(recurse=False))

    @contextmanager
    def step(self, scale: Tensor | None) -> Iterator[None]:
        """Use chunked cross-entropy in the body. Logits not computed in it are lost.

        Args:
            scale: factor of summed losses before backward. Gradients of weight and bias are added
                to `grad`, or written to it first for parameters from `add_to_gradients_of`. None:
                gradients, if any, are left to autograd.
        """
        self._scale, self._families = scale, []
        try:
            yield
        finally:
            for family in self._families:
                family.open = False
            self._scale, self._families = None, None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Compute full logits in the body; the previous mode returns afterwards."""
        self._wanted_whole = True
        try:
            yield
        finally:
            self._wanted_whole = False

    def _forward(self, hidden: Tensor) -> Tensor:
        layer = self.layer
        assert layer is not None, "only then it is called"
        weight, bias = layer.weight, layer.bias
        plain = (
            not isinstance(hidden, LazyLogits) and hidden.dtype == weight.dtype and hidden.ndim > 1
        )
        autocast = torch.is_autocast_enabled(hidden.device.type)
        followed = plain and not autocast and not hidden.is_inference()
        if self._families is None or self.full_logits_reason or self._wanted_whole or not followed:
            return nn.functional.linear(hidden, weight, bias)
        family = LogitsFamily(hidden, weight, bias, self._loss, self._fell_back)
        self._families.append(family)
        return LazyLogits(hidden, family, make=lambda: nn.functional.linear(hidden, weight, bias))

    def _fell_back(self, wanted: str) -> None:
        self.full_logits_reason = (
            self.full_logits_reason or f"the model asks its logits for '{wanted}'"
        )

    def _loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Any) -> Tensor:
        self.chunked_losses += 1
        expected = expected_gradient.get()
        trained = [p for p in (weight, bias) if p is not None and p.requires_grad]
        in_place = self._scale is not None and all(map(self._adds_to_grad, trained))
        upstream = None
        if in_place and self._scale is not None and expected and torch.is_grad_enabled():
            upstream = expected.upstream * self._scale
        rows = hidden.reshape(-1, hidden.shape[-1])
        problem = partial(problem, fused=self.fused)
        loss: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, problem, upstream, self._sum_of if in_place else None
        )
        payment = getattr(loss.grad_fn, "payment", None)
        if expected is not None and payment is not None:
            expected.payments.append(payment)
        return loss

    def _adds_to_grad(self, parameter: Tensor) -> bool:
        """Return whether autograd would do nothing with a gradient except adding it to `grad`."""
        own = self._gradients.get(id(parameter))
        if parameter._backward_hooks or not parameter.is_leaf:
            return False
        if own is not None:
            return not own.has_other_hooks
        return parameter.grad is not None and not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]

    def _sum_of(self, parameter: Tensor) -> GradientSum:
        """Return the sum of a parameter's gradient, if `_adds_to_grad`."""
        if parameter.grad is not None:
            return GradientSum(parameter.grad)
        parameter.grad = self._gradients[id(parameter)].place
        return GradientSum(parameter.grad, empty=True)


def find_output_layer(model: nn.Module, units: Iterable[nn.Module] = ()) -> nn.Linear | None:
    """Return the layer that computes the logits, as named by `transformers` models. In other
    models: the linear layer outside of units with most outputs, if more than inputs."""
    named = getattr(model, "get_output_embeddings", None)
    if named is not None:
        layer = named()
        return layer if type(layer) is nn.Linear else None
    inside = {id(module) for unit in units for module in unit.modules()}
    linear = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
    widening = [layer for layer in linear if layer.out_features > layer.in_features]
    return max(widening, key=lambda layer: layer.out_features, default=None)
