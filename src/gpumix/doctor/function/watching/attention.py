"""Detection of unfused attention: a softmax between two batched matrix products. torch has a fused
kernel for attention, which avoids the matrix of all pairs of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_direct_user_line

_PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
_FUSED = "scaled_dot_product_attention"
_SCORES = ""  # mark of scores; weights get the line of their softmax


class UnfusedAttentionFinder:
    """An `OperationLooker` finding unfused attention.

    Attributes:
        places: lines of user code with the softmax of unfused attention.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._marks: Any = WeakTensorKeyDictionary()  # scores and weights in flight
        self._patches = Patches()
        self._fused = 0

    def begin(self) -> None:
        self._patches.replace_everywhere(functional, _FUSED, self._counting)

    def end(self) -> None:
        self._patches.close()

    def _counting(self, before: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            self._fused += 1  # without a fitting kernel, torch runs unfused attention itself
            try:
                return before(*args, **kwargs)
            finally:
                self._fused -= 1

        return attend

    def look(self, operation: Any, args: Any, result: Any, *, backward: bool) -> None:
        if self._fused or backward:
            return
        given = [one for one in args if isinstance(one, Tensor) and one in self._marks]
        made = result[0] if isinstance(result, tuple) and result else result  # dropout adds a mask
        if operation in _PRODUCTS:
            for place in map(self._marks.__getitem__, given):
                if place not in (_SCORES, LIBRARY_LINE, *self.places):
                    self.places.append(place)
            self._marks[made] = _SCORES
        elif given and isinstance(made, Tensor) and made.numel() == given[0].numel():
            mark = self._marks[given[0]]
            self._marks[made] = (
                find_direct_user_line() if operation in _SOFTMAX and mark == _SCORES else mark
            )
