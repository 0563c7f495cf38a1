"""Detection of unfused attention: a softmax between two batched matrix products. torch has a fused
kernel for attention, which avoids the matrix of all pairs of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_direct_user_line

_PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
_FUSED = "scaled_dot_product_attention"
_SCORES = ""  # mark of scores; weights get the line of their softmax


class UnfusedAttentionFinder(TorchDispatchMode):
    """A dispatch mode inspecting, and slowing down, each operation from `begin` to `end`.

    Attributes:
        places: lines of user code with the softmax of unfused attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._marks: Any = WeakTensorKeyDictionary()  # scores and weights in flight
        self._patches = Patches()
        self._fused = 0
        self._on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise torch compiles no function called in this mode, nor later."""
        return True

    def begin(self) -> None:
        self._patches.replace_everywhere(functional, _FUSED, self._counting)
        self.__enter__()  # type: ignore[no-untyped-call]
        self._on = True

    def end(self) -> None:
        """Undo the patch and leave the mode, unless another mode is above; repeatable."""
        self._patches.close()
        if self._on and _get_current_dispatch_mode() is self:  # type: ignore[no-untyped-call]
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _counting(self, before: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            self._fused += 1  # without a fitting kernel, torch runs unfused attention itself
            try:
                return before(*args, **kwargs)
            finally:
                self._fused -= 1

        return attend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._fused and torch._C._current_autograd_node() is None:  # not in backward
            self._look(getattr(func, "overloadpacket", None), args, result)
        return result

    def _look(self, operation: Any, args: Any, result: Any) -> None:
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
