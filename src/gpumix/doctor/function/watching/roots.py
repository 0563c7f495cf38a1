"""Root modules of a function's training: trained modules called by no other module. Roots are
detected and treated when called in the first steps; afterwards, only calls of known roots are
noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpumix.doctor.function.observations import ModelObservation
from gpumix.doctor.function.patches import Patches, find_user_line

Treatment = Callable[[nn.Module], None]


class RootModules:
    """The root modules, changed by `treatments` on discovery.

    Attributes:
        called: called at the start of each forward pass of a root.
    """

    def __init__(self, treatments: list[Treatment]) -> None:
        self._treatments = treatments
        self.on_forward: Callable[[], None] = lambda: None
        self._known: dict[int, tuple[nn.Module, str, bool, bool]] = {}
        self._parts: set[int] = set()
        self._inside = False
        self._patches, self._noted = Patches(), Patches()

    def find(self) -> None:
        """Start detecting roots."""
        self._patches.replace(nn.Module, "__call__", self._calling)

    def found(self) -> None:
        """Stop detecting roots."""
        self._patches.close()

    def end(self) -> None:
        """Stop detecting roots and noting calls."""
        self.found()
        self._noted.close()

    def seen(self) -> tuple[ModelObservation, ...]:
        return tuple(_seen(*one) for one in self._known.values())

    def _calling(self, before: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or id(module) in self._parts or not _is_trained(module):
                return before(module, *args, **kwargs)
            if id(module) not in self._known:
                # Submodules recomputed in a backward pass have no caller.
                self._parts |= {id(part) for part in module.modules()} - {id(module)}
                place, casts = find_user_line(), torch.is_autocast_enabled(device_of(module).type)
                for treatment in self._treatments:
                    treatment(module)
                self._known[id(module)] = module, place, casts, _compiled(module)
                self._note(module)
            self._inside = True
            try:
                return before(module, *args, **kwargs)
            finally:
                self._inside = False

        return call

    def _note(self, module: nn.Module) -> None:
        """Note calls from outside of compiled code, where a hook would be compiled in. Attributes
        set on a module from torch.compile end up on the inner module."""
        own, name = vars(module), "_compiled_call_impl"
        code = own.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # otherwise part of code being compiled
                self.on_forward()
            return (module._call_impl if code is None else code)(*args, **kwargs)

        own[name] = call
        self._noted.callback(own.pop if code is None else own.__setitem__, name, code)


def _is_trained(module: nn.Module) -> bool:
    trains = module.training and torch.is_grad_enabled()
    return trains and any(p.requires_grad for p in module.parameters())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(module.parameters()).device


def _compiled(module: nn.Module) -> bool:
    own = getattr(module, "_compiled_call_impl", None) is not None
    return own or type(module).__name__ == "OptimizedModule"


def _seen(module: nn.Module, place: str, casts: bool, compiled: bool) -> ModelObservation:
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    config = getattr(module, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return ModelObservation(
        place=place,
        name=type(module).__name__,
        fp32=dtypes == {torch.float32} and not casts,
        eager_attention=eager and bool(getattr(module, "_supports_sdpa", False)),
        compiled=compiled,
        fp64=torch.float64 in dtypes,
    )
