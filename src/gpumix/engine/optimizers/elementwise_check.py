"""Refusal of optimizers whose results on pieces would differ from full parameters.

Most run without an error: torch's own Adafactor takes a piece for a vector, LBFGS takes the pieces
of one rank for all parameters. So every optimizer of an engine's pieces is checked before its first
update, and earlier if passed to gpumix.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.optimizers.base import FullParameterOptimizer
from gpumix.schema.errors import InputError

_MATRICES = "it looks at whole matrices, and this rank has an interval of their elements"
_NORMS = "it goes by the norms of whole parameters, and this rank has a part of their elements"
_ALL = "it goes by all parameters together, and this rank has a part of them"
_OWN_OPTIMIZER_FIX = "gpumix.{}(engine.parameters(), engine.layout(), ...)"
_BLOCKS = "it quantises state in blocks of elements, and a plan's cuts go through its blocks"
_OWN_BLOCKS = "gpumix.AdamW8bit(engine.parameters(), ...)"
_ELEMENTWISE = "use one that treats elements one by one, such as torch.optim.AdamW, or gpumix.Muon"
# Their kernels get addresses of elements, and treat elements, or short runs of them, one by one.
KERNEL_LIBRARIES = ("apex", "bitsandbytes", "deepspeed", "torchao", "transformer_engine")
# By class name, of torch and of common libraries.
REFUSED_OPTIMIZERS: dict[str, tuple[str, str]] = {
    "Adafactor": (_MATRICES, _OWN_OPTIMIZER_FIX.format("Adafactor")),
    "Muon": (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    "MuonWithAuxAdam": (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    "SingleDeviceMuon": (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    "SingleDeviceMuonWithAuxAdam": (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    "LBFGS": (_ALL, _ELEMENTWISE),
    **dict.fromkeys(
        ("Shampoo", "DistributedShampoo", "SOAP", "CAME", "SM3", "KFAC", "PSGD", "Kron", "GaLore"),
        (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    ),
    **dict.fromkeys(
        ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor", "APOLLOAdamW"),
        (_MATRICES, _OWN_OPTIMIZER_FIX.format("Muon")),
    ),
    **dict.fromkeys(
        ("Lamb", "LAMB", "FusedLAMB", "LARS", "Lars", "FusedLars", "NovoGrad", "FusedNovoGrad"),
        (_NORMS, _ELEMENTWISE),
    ),
    **dict.fromkeys(("StableAdamW", "AdaLomo"), (_NORMS, _ELEMENTWISE)),
    **dict.fromkeys(
        [
            f"{paged}{name}8bit"
            for paged in ("", "Paged")
            for name in ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix")
        ],
        (_BLOCKS, _OWN_BLOCKS),
    ),
    **dict.fromkeys(
        ("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad"), (_ALL, _ELEMENTWISE)
    ),
}


def has_any_parameter(optimizer: Optimizer, ids: Collection[int]) -> bool:
    """Return whether any parameter of the optimizer has an identity in `ids`."""
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def check_optimizer(optimizer: Optimizer, pieces: Iterable[nn.Parameter]) -> bool:
    """Refuse an optimizer of `pieces` with results unlike on full parameters; return whether it
    updates any of them.

    Raises:
        InputError: the optimizer cannot update pieces.
    """
    if not has_any_parameter(optimizer, {id(piece) for piece in pieces}):
        return False
    name = type(optimizer).__name__
    if isinstance(optimizer, FullParameterOptimizer):
        if not optimizer.layout.of_engine:
            raise InputError(
                f"{name} was made without the engine's layout",
                code="optimizer-without-layout",
                why="it would treat this rank's pieces as whole parameters",
                fix=_OWN_OPTIMIZER_FIX.format(name),
            )
    else:
        check_optimizer_class(type(optimizer))
        if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:
            raise InputError(
                f"{name} cannot update a sharded model",
                code="optimizer-not-elementwise",
                why=_BLOCKS,
                fix=_OWN_BLOCKS,
            )
    return True


def check_optimizer_class(kind: type, fix: str = "") -> None:
    """Refuse a class of optimizers that cannot update pieces.

    Args:
        fix: replaces the advice for programs with access to an engine.

    Raises:
        InputError: the class cannot update pieces.
    """
    if issubclass(kind, FullParameterOptimizer | AdamW8bit):
        return
    found = next((c.__name__ for c in kind.__mro__ if c.__name__ in REFUSED_OPTIMIZERS), None)
    if found is not None:
        why, instead = REFUSED_OPTIMIZERS[found]
        raise InputError(
            f"{kind.__module__}.{kind.__name__} cannot update a sharded model",
            code="optimizer-not-elementwise",
            why=why,
            fix=fix or instead,
        )


class UpdateChecks:
    """Checks of every optimizer of an engine's pieces before its first update. Optimizers known to
    treat elements one by one compute with pieces as with ordinary tensors."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._checked: weakref.WeakKeyDictionary[Optimizer, _UnguardedSteps | None]
        self._checked = weakref.WeakKeyDictionary()
        handle = register_optimizer_step_pre_hook(self._before_step)
        weakref.finalize(engine, handle.remove)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if optimizer not in self._checked:
            is_ours = engine.check_optimizer(optimizer) and is_known(optimizer)
            if is_ours:
                _flatten_state(optimizer)
            self._checked[optimizer] = _UnguardedSteps(optimizer) if is_ours else None
        steps = self._checked[optimizer]
        if steps is not None:
            steps.stay_innermost(optimizer)


def is_known(optimizer: Optimizer) -> bool:
    """Return True if `optimizer` is known to give the same result on pieces."""
    package = type(optimizer).__module__.partition(".")[0]
    return (
        type(optimizer).__module__.startswith("torch.optim")
        or isinstance(optimizer, FullParameterOptimizer | AdamW8bit)
        or package in KERNEL_LIBRARIES
    )


def _flatten_state(optimizer: Optimizer) -> None:
    """Flatten state that an optimizer such as Adagrad made when it was made, in the shapes of full
    parameters, where each rank has all elements."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > parameter.dim():
                    state[name] = value.reshape(-1)


class _UnguardedSteps:
    """Hooks of an optimizer: innermost, so that other hooks see pieces as programs do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._inside: Any = None
        self._before_id = optimizer.register_step_pre_hook(self._before).id
        self._after_id = optimizer.register_step_post_hook(self._after).id

    def stay_innermost(self, optimizer: Optimizer) -> None:
        """Let hooks that a program has added run outside of these."""
        before: Any = optimizer._optimizer_step_pre_hooks
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before_id)
        after.move_to_end(self._after_id, last=False)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._leave()  # a step that failed
        self._inside = torch._C.DisableTorchFunctionSubclass()
        self._inside.__enter__()
        first, *others = args  # the optimizer
        given = {name: _as_outside(value) for name, value in kwargs.items()}
        return (first, *map(_as_outside, others)), given

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)


def _as_outside(closure: Any) -> Any:
    """Return a closure given to a step that runs as outside of the step; any other value as is."""
    if not callable(closure):
        return closure

    def run() -> Any:
        with torch._C._EnableTorchFunction():
            return closure()

    return run
