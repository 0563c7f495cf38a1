"""Refusal of optimizers whose results on pieces would differ from full parameters.

Most run without an error: torch's own Adafactor takes a piece for a vector, LBFGS takes the pieces
of one rank for all parameters. So every optimizer of an engine's pieces is checked before its first
update, and earlier if passed to gpumix.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumix.engine.optimizers.base import FullParameterOptimizer
from gpumix.schema.errors import InputError

_MATRICES = "it looks at whole matrices, and this rank has an interval of their elements"
_NORMS = "it goes by the norms of whole parameters, and this rank has a part of their elements"
_ALL = "it goes by all parameters together, and this rank has a part of them"
_OWN_OPTIMIZER_FIX = "gpumix.{}(engine.parameters(), engine.layout(), ...)"
_ELEMENTWISE = "use one that treats elements one by one, such as torch.optim.AdamW, or gpumix.Muon"
_SHAPES, _CUT, _STEPS = ((4, 6), (5,)), 3, 3
_PLAIN = (bool, int, float, str, type(None))  # of attributes that a copy may share
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
                why="it would take this rank's pieces for whole parameters",
                fix=_OWN_OPTIMIZER_FIX.format(name),
            )
    else:
        check_optimizer_class(type(optimizer))
    return True


def check_optimizer_class(kind: type, fix: str = "") -> None:
    """Refuse a class of optimizers that cannot update pieces.

    Args:
        fix: replaces the advice for programs with access to an engine.

    Raises:
        InputError: the class cannot update pieces.
    """
    if issubclass(kind, FullParameterOptimizer):
        return
    found = next((c.__name__ for c in kind.__mro__ if c.__name__ in REFUSED_OPTIMIZERS), None)
    if found is not None:
        why, instead = REFUSED_OPTIMIZERS[found]
        raise InputError(
            f"{kind.__module__}.{kind.__name__} cannot update a sharded model",
            why=why,
            fix=fix or instead,
        )


def check_on_pieces(optimizer: Optimizer) -> None:
    """Compare updates of small tensors with updates of their pieces, by a copy of an optimizer of
    unknown kind. Optimizers that hold other objects, or fail alone, are not compared.

    Raises:
        InputError: pieces are updated otherwise.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") or isinstance(
        optimizer, FullParameterOptimizer
    )
    own = vars(optimizer).keys() - vars(Optimizer([torch.zeros(1)], {})).keys()
    if known or not all(isinstance(vars(optimizer)[name], _PLAIN) for name in own):
        return
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (
        [torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS + 1)
    )
    try:
        whole = _updated(optimizer, values, gradients)
        pieces = [
            _updated(
                optimizer,
                [value.flatten()[part] for value in values],
                [[gradient.flatten()[part] for gradient in of_step] for of_step in gradients],
            )
            for part in (slice(_CUT), slice(_CUT, None))
        ]
    except Exception:  # it needs a closure, a GPU, or what only training has
        return
    together = [torch.cat(both) for both in zip(*pieces)]
    if not all(torch.allclose(*both, rtol=1e-4, atol=1e-6) for both in zip(whole, together)):
        raise InputError(
            f"{kind.__module__}.{kind.__qualname__} cannot update a sharded model",
            why="tried on small tensors, it updates their pieces otherwise than the whole",
            fix=_ELEMENTWISE,
        )


def _updated(
    optimizer: Optimizer, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return flat values after a step with each row of gradients, by a copy of the optimizer."""
    trial = copy.copy(optimizer)
    parameters = [nn.Parameter(value.clone()) for value in values]
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    trial.param_groups = [{**copy.deepcopy(options), "params": parameters}]
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step):
                parameter.grad = gradient.clone()
            type(optimizer).step(trial)
    return [parameter.detach().flatten() for parameter in parameters]


class UpdateChecks:
    """Checks of every optimizer of an engine's pieces before its first update, and of gradients
    before each update."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._checked: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        handle = register_optimizer_step_pre_hook(self._before_step)
        weakref.finalize(engine, handle.remove)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if optimizer not in self._checked:
            self._checked[optimizer] = check_optimizer(optimizer, engine.parameters())
            if self._checked[optimizer] and engine.comm.world > 1:
                check_on_pieces(optimizer)
        if self._checked[optimizer] and engine.gradient_scaling is not None:
            engine.gradient_scaling.before_update()
