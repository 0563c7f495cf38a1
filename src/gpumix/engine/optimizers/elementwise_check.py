"""Refusal of optimizers whose results on pieces would differ from full parameters.

Most run without an error: torch's own Adafactor takes a piece for a vector, LBFGS takes the pieces
of one rank for all parameters. So every optimizer of an engine's pieces is checked before its first
update, and earlier if passed to gpumix.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumix.engine.optimizers.base import WholeOptimizer
from gpumix.schema.errors import InputError

_MATRICES = "it looks at whole matrices, and this rank has an interval of their elements"
_NORMS = "it goes by the norms of whole parameters, and this rank has a part of their elements"
_ALL = "it goes by all parameters together, and this rank has a part of them"
_OWN = "gpumix.{}(engine.parameters(), engine.layout(), ...)"
_ELEMENTWISE = "use one that treats elements one by one, such as torch.optim.AdamW, or gpumix.Muon"
# By class name, of torch and of common libraries.
REFUSED: dict[str, tuple[str, str]] = {
    "Adafactor": (_MATRICES, _OWN.format("Adafactor")),
    "Muon": (_MATRICES, _OWN.format("Muon")),
    "MuonWithAuxAdam": (_MATRICES, _OWN.format("Muon")),
    "SingleDeviceMuon": (_MATRICES, _OWN.format("Muon")),
    "SingleDeviceMuonWithAuxAdam": (_MATRICES, _OWN.format("Muon")),
    "LBFGS": (_ALL, _ELEMENTWISE),
    **dict.fromkeys(
        ("Shampoo", "DistributedShampoo", "SOAP", "CAME", "SM3", "KFAC", "PSGD", "Kron", "GaLore"),
        (_MATRICES, _OWN.format("Muon")),
    ),
    **dict.fromkeys(
        ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor", "APOLLOAdamW"),
        (_MATRICES, _OWN.format("Muon")),
    ),
    **dict.fromkeys(
        ("Lamb", "LAMB", "FusedLAMB", "LARS", "Lars", "FusedLars", "NovoGrad", "FusedNovoGrad"),
        (_NORMS, _ELEMENTWISE),
    ),
    **dict.fromkeys(("StableAdamW", "AdaLomo"), (_NORMS, _ELEMENTWISE)),
    **dict.fromkeys(
        ("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad"), (_ALL, _ELEMENTWISE)
    ),
}


def holds_any(optimizer: Optimizer, ids: Collection[int]) -> bool:
    """Return whether any parameter of the optimizer has an identity in `ids`."""
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def check(optimizer: Optimizer, pieces: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer of `pieces` with results unlike on full parameters.

    Raises:
        InputError: the optimizer cannot update pieces.
    """
    if not holds_any(optimizer, {id(piece) for piece in pieces}):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, WholeOptimizer):
        if not optimizer.layout.of_engine:
            raise InputError(
                f"{name} was made without the engine's layout",
                why="it would take this rank's pieces for whole parameters",
                fix=_OWN.format(name),
            )
        return
    check_kind(type(optimizer))


def check_kind(kind: type, fix: str = "") -> None:
    """Refuse a class of optimizers that cannot update pieces.

    Args:
        fix: replaces the advice for programs with access to an engine.

    Raises:
        InputError: the class cannot update pieces.
    """
    if issubclass(kind, WholeOptimizer):
        return
    found = next((c.__name__ for c in kind.__mro__ if c.__name__ in REFUSED), None)
    if found is not None:
        why, instead = REFUSED[found]
        raise InputError(
            f"{kind.__module__}.{kind.__name__} cannot update a sharded model",
            why=why,
            fix=fix or instead,
        )


class FirstUpdateCheck:
    """Check of every optimizer of an engine's pieces before its first update."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        handle = register_optimizer_step_pre_hook(self._before_step)
        weakref.finalize(engine, handle.remove)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        if engine is not None and optimizer not in self._checked:
            check(optimizer, engine.parameters())
            self._checked.add(optimizer)
