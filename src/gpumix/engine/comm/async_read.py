"""Asynchronous reads of device values by the host.

`tensor.item()` blocks the host until the device has caught up, and so leaves the device without
work. A reading is copied into pinned memory behind the kernels computing it; read a step later, the
copy has long been complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpumix.hardware import runtime


class AsyncRead:
    """Values of some tensors at the time of the reading.

    Args:
        tensors: tensors of one device, of any shapes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._shapes = [one.shape for one in tensors]
        flat = torch.cat([one.detach().double().reshape(-1) for one in tensors])
        self._arrived: runtime.Event | None = None
        if runtime.is_gpu(flat.device):
            self._values = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._values.copy_(flat, non_blocking=True)
            self._arrived = runtime.record_event(flat.device)
        else:
            self._values = flat

    @property
    def is_complete(self) -> bool:
        """True if `tensors` would not wait."""
        return self._arrived is None or self._arrived.query()

    def tensors(self) -> list[torch.Tensor]:
        """Return the values on the host, float64, in the shapes of the tensors; wait until the
        device has computed them."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        parts = self._values.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def numbers(self) -> list[float]:
        """Return the values of tensors with one element each; see `tensors`."""
        return [one.item() for one in self.tensors()]
