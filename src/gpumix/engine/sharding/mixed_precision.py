"""Dtypes of a plan, and the loss scaler that fp16 needs."""

from __future__ import annotations

import torch

from gpumix.schema.plan.stage import ComputeDtype

TORCH_DTYPE: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class LossScaler:
    """Loss scaler for sharded fp16 gradients, like `torch.amp.GradScaler`.

    The loss is multiplied by `scale`. A step with overflowing gradients is skipped and the scale
    halved; after `growth_interval` good steps the scale is doubled. bf16 and fp32 need no scale.
    But gradients are summed over ranks, so all ranks scale alike if one computes in fp16.
    """

    def __init__(self, *, active: bool, growth_interval: int = 2000) -> None:
        self.active = active
        self.scale = 2.0**16 if self.active else 1.0
        self._growth_interval = growth_interval
        self._good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step."""
        if overflow:
            self.scale = max(1.0, self.scale / 2)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.scale *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self._good_steps = int(state["good_steps"])
