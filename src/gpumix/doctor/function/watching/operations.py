"""Inspection of each operation of some steps."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


class OperationReceiver(Protocol):
    """A receiver of operations."""

    def begin(self) -> None: ...

    def look(self, operation: Any, args: Any, result: Any, *, backward: bool) -> None:
        """Look at an operation after its execution; `backward`: called by autograd."""
        ...

    def end(self) -> None:
        """Stop looking; repeatable."""
        ...


class OperationInspector(TorchDispatchMode):
    """A dispatch mode passing each operation to all lookers, from `begin` to `end`; it slows steps
    down."""

    def __init__(self, *lookers: OperationReceiver) -> None:
        super().__init__()
        self._lookers = lookers
        self._on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise torch compiles no function called in this mode, nor later."""
        return True

    def begin(self) -> None:
        for one in self._lookers:
            one.begin()
        self.__enter__()  # type: ignore[no-untyped-call]
        self._on = True

    def end(self) -> None:
        """Stop inspecting, and leave the mode unless another mode is above; repeatable."""
        for one in self._lookers:
            one.end()
        if self._on and _get_current_dispatch_mode() is self:  # type: ignore[no-untyped-call]
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = getattr(func, "overloadpacket", None)
        backward = torch._C._current_autograd_node() is not None
        for one in self._lookers:
            one.look(operation, args, result, backward=backward)
        return result
