"""The head's loss in chunks, so that the logits of a large vocabulary never exist whole.

The model's output layer returns logits that are not made (`lazy_logits`); the loss that the model
takes of them runs chunk by chunk (`chunked_loss`). A model that looks at its logits otherwise gets
them whole, and from then on at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.chunked_loss import ChunkedLoss, Payment, Sum
from gpumix.engine.lazy_logits import Family, LazyLogits
from gpumix.engine.shards import FlatGroup, OwnGradient


class Expected:
    """What the gradient of a model's loss will be, before there is one.

    Whoever asks the model for its loss knows what happens to it: a mean is multiplied with its
    count. With it the gradients of the head are made along with the loss.
    """

    def __init__(self, upstream: Tensor) -> None:
        self.upstream = upstream
        self.payments: list[Payment] = []

    def settle(self, loss: Tensor) -> None:
        """The model's loss is here: see whether the head's losses get the gradient of it."""
        unchanged = set(_unchanged(loss)) if self.payments else set()
        for payment in self.payments:
            if payment in unchanged:
                payment.confirm()
            else:
                payment.undo()
        self.payments.clear()

    def give_up(self) -> None:
        """The gradient will be another one: it is made in backward."""
        for payment in self.payments:
            payment.undo()
        self.payments.clear()


_expected: ContextVar[Expected | None] = ContextVar("gpumix_expected_gradient", default=None)


@contextmanager
def expected_gradient(upstream: Tensor) -> Iterator[Expected]:
    """The gradient of the loss that the model computes inside will be `upstream`, times the scale
    of the step. Call `settle` with that loss."""
    expected = Expected(upstream)
    token = _expected.set(expected)
    try:
        yield expected
    finally:
        _expected.reset(token)


class HeadInChunks:
    """Makes a model's head run in chunks, inside `step`.

    `whole_because` says what the model asked of its logits that needs them whole; empty if nothing
    so far.

    Args:
        units: the model's blocks, inside of which no output layer is looked for.
        whole_because: why its logits are always made whole, if they are.
        fused: whether losses are made by the fused kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[nn.Module] = (),
        *,
        whole_because: str = "",
        fused: bool = False,
    ) -> None:
        self.fused = fused
        self.whole_because = whole_because
        self.chunked_losses = 0
        self._scale: Tensor | None = None
        self._families: list[Family] | None = None
        self._wanted_whole = False
        self._gradients: dict[int, OwnGradient] = {}  # by the parameter's id
        layer = None if whole_because else output_layer(model, units)
        # The layer holds its forward, and so this: not the other way round too.
        self._layer = None if layer is None else weakref.ref(layer)
        if layer is None:
            self.whole_because = whole_because or "the model has no linear output layer"
        else:
            layer.forward = self._forward  # type: ignore[assignment, method-assign]

    def add_to_gradients_of(self, groups: Iterable[FlatGroup]) -> None:
        """Where the layer's parameters are: it adds to their gradients by itself."""
        if self.layer is not None:
            found = [own for group in groups for own in group.gradients_of(self.layer)]
            self._gradients |= {id(own.view): own for own in found}

    @property
    def supported(self) -> bool:
        """Whether the losses that ran so far ran in chunks, and no logits were made."""
        return self.chunked_losses > 0 and not self.whole_because

    @property
    def layer(self) -> nn.Linear | None:
        """What makes the logits."""
        return None if self._layer is None else self._layer()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the output layer, as it is now."""
        return [] if self.layer is None else list(self.layer.parameters(recurse=False))

    @contextmanager
    def step(self, scale: Tensor | None) -> Iterator[None]:
        """Chunks inside. Afterwards there is nothing that was not made, and cannot be any more.

        Args:
            scale: what summed losses are multiplied with before backward; the weight's and bias's
                gradients are then added to their `grad`, or are the first in there where the
                parameter is one of `add_to_gradients_of`. None: gradients are autograd's matter, if
                there are any.
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
        """Logits are made inside, for whoever wants to have them; afterwards all is as before."""
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
        if self._families is None or self.whole_because or self._wanted_whole or not followed:
            return nn.functional.linear(hidden, weight, bias)
        family = Family(hidden, weight, bias, self._loss, self._fell_back)
        self._families.append(family)
        return LazyLogits(hidden, family, make=lambda: nn.functional.linear(hidden, weight, bias))

    def _fell_back(self, wanted: str) -> None:
        self.whole_because = self.whole_because or f"the model asks its logits for '{wanted}'"

    def _loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Any) -> Tensor:
        self.chunked_losses += 1
        expected = _expected.get()
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
        """Whether adding to `grad` is all that autograd would do with a gradient."""
        own = self._gradients.get(id(parameter))
        if parameter._backward_hooks or not parameter.is_leaf:
            return False
        if own is not None:
            return not own.has_other_hooks
        return parameter.grad is not None and not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]

    def _sum_of(self, parameter: Tensor) -> Sum:
        """What the gradient of a parameter for which `_adds_to_grad` is true is added to."""
        if parameter.grad is not None:
            return Sum(parameter.grad)
        parameter.grad = self._gradients[id(parameter)].place
        return Sum(parameter.grad, empty=True)


def output_layer(model: nn.Module, units: Iterable[nn.Module] = ()) -> nn.Linear | None:
    """The layer that makes the logits: as `transformers` models name it; in other models the linear
    layer outside of the units with most outputs, if it has more outputs than inputs."""
    named = getattr(model, "get_output_embeddings", None)
    if named is not None:
        layer = named()
        return layer if type(layer) is nn.Linear else None
    inside = {id(module) for unit in units for module in unit.modules()}
    linear = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
    widening = [layer for layer in linear if layer.out_features > layer.in_features]
    return max(widening, key=lambda layer: layer.out_features, default=None)


def _unchanged(loss: Tensor) -> list[Payment]:
    """The head's losses that get exactly the gradient of `loss`."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    passes, others, found = [loss.grad_fn], [], []
    while passes:
        node = passes.pop()
        if (payment := getattr(node, "payment", None)) is not None:
            found.append(payment)
        elif _passes_on(node):
            passes += [n for n, _ in node.next_functions if n is not None]
        else:
            others.append(node)
    seen = set()
    while others:
        node = others.pop()
        if node not in seen:
            seen.add(node)
            others += [n for n, _ in node.next_functions if n is not None]
    changed = [getattr(node, "payment", None) for node in seen]
    return [p for p in found if found.count(p) == 1 and p not in changed]


def _passes_on(node: Any) -> bool:
    """Whether a node of the graph hands its gradient to all that it was made from as it is."""
    name = type(node).__name__
    return name == "ToCopyBackward0" or (name == "AddBackward0" and node._saved_alpha == 1)
