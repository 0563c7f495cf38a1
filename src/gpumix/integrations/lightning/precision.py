"""Lightning's precision plugin with the engine computing: little is left to do.

The plugin receives every batch before its step, and does the work around an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.engine import Engine
from gpumix.integrations.dataloader.sharded_loader import RankPart
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import Precision as Dtype

DTYPES: dict[str, Dtype] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "bf16-true": "bf16",
    "16-true": "fp16",
}


class PlannedPrecision(Precision):
    """Plugin replacing the trainer's own.

    Attributes:
        samples: of the global batch given last.
        norm: of the last step's gradients before clipping; 0 without clipping.
    """

    def __init__(self) -> None:
        self.precision: Any = "32-true"
        self.samples = 0
        self.norm: torch.Tensor | float = 0.0
        self.engine: Engine | None = None
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    def told(self, plugin: Precision) -> None:
        """Take over the precision of the trainer's plugin.

        Raises:
            InputError: the engine has no such precision.
        """
        known = type(plugin) in (Precision, MixedPrecision, HalfPrecision)
        if not known or plugin.precision not in DTYPES:
            raise InputError(
                f"precision {plugin.precision!r} has no meaning with gpumix",
                code="precision-unsupported",
                where=f"Trainer, {type(plugin).__name__}",
                fix=f"take one of {', '.join(DTYPES)}",
            )
        self.precision = plugin.precision

    @property
    def dtype(self) -> Dtype:
        """The compute dtype."""
        return DTYPES[self.precision]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the weights for `-true` precisions; otherwise keep the given dtypes."""
        halves = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
        return module.to(halves[self.precision]) if self.precision in halves else module

    def convert_input(self, data: Any) -> Any:
        if not isinstance(data, RankPart):
            raise InputError(
                "the trainer's batches come from several loaders at once",
                code="several-loaders",
                why="each batch is cut by the plan, and must be that of one loader",
                fix="give one DataLoader; for evaluation a list of them is taken one by one",
            )
        self.samples = data.samples
        return data.values

    # -- a step of the optimizer -------------------------------------------------------------------

    def stash_gradients(self) -> None:
        """Put gradients aside: forward and backward ran at once, and Lightning clears gradients in
        between."""
        assert self.engine is not None
        self._gradients = [(p, p.grad) for p in self.engine.parameters()]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure before the optimizer, which may look at the gradients first."""
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(closure=lambda: result, **kwargs)  # some optimizers require a closure
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the norm over all gradients of the model, or by value."""
        assert self.engine is not None
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            nn.utils.clip_grad_value_(list(self.engine.parameters()), clip_val)
        else:
            self.norm = self.engine.clip_grad_norm_(clip_val)
