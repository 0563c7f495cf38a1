"""Dtypes of a plan, and the loss scaler that fp16 needs."""

from __future__ import annotations

import torch

from gpumix.spec.stage import ComputeDtype

TORCH_DTYPE: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class LossScaler:
    """Keeps fp16 gradients inside fp16's range, as `torch.amp.GradScaler` does, for sharded ones.

    The loss is multiplied with `scale`; a step whose gradients overflow is skipped and the scale
    halved; after `growth_interval` good steps it is doubled. bf16 and fp32 have no use for it; but
    gradients of all ranks are summed, so all scale alike if one of them computes in fp16.
    """

    def __init__(self, *, active: bool, growth_interval: int = 2000) -> None:
        self.active = active
        self.scale = 2.0**16 if self.active else 1.0
        self._growth_interval = growth_interval
        self._good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Take note of a step's outcome."""
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
