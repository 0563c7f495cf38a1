"""Numbers of a device on their way to the host, which nothing waits for until somebody asks.

`tensor.item()` holds up the host until the device has come there, and so leaves the device without
work. A reading is copied into pinned memory behind what computes it; asked for a step later, it has
been there for long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpumix.hardware import runtime


class Reading:
    """The values of some tensors, as they are when the reading is made.

    Args:
        tensors: of one device, of any shapes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._shapes = [one.shape for one in tensors]
        flat = torch.cat([one.detach().double().reshape(-1) for one in tensors])
        self._arrived: runtime.Event | None = None
        if runtime.is_gpu(flat.device):
            self._values = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._values.copy_(flat, non_blocking=True)
            self._arrived = runtime.recorded_event(flat.device)
        else:
            self._values = flat

    @property
    def is_there(self) -> bool:
        """Whether `tensors` waits for nothing."""
        return self._arrived is None or self._arrived.query()

    def tensors(self) -> list[torch.Tensor]:
        """The values on the host, float64, in the shapes of the tensors; waits for the device to
        have come to them."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        parts = self._values.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def numbers(self) -> list[float]:
        """As `tensors`, of tensors of one element each."""
        return [one.item() for one in self.tensors()]
