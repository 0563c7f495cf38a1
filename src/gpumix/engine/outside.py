"""A sharded model outside of the steps of its engine: called, read, saved, made plain again.

Between two steps a rank that has all of the masters holds an ordinary model, whose parameters are
these. Where state is divided, the model is called by gathering block after block, and its weights
are read inside of `whole`, which all ranks enter.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpumix.engine.coroutine import ModelError
from gpumix.engine.tensor import Changes
from gpumix.spec.errors import InputError

if TYPE_CHECKING:
    from gpumix.engine.engine import Engine

Forward = Callable[..., Any]
SYNCHRONISED = "synced_gpus"  # of transformers
UNSHARDING = ("merge_and_unload", "unload")  # of PEFT: they take the model's layers apart
_of_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OutsideSteps]] = (
    weakref.WeakKeyDictionary()
)


class OutsideSteps:
    """What happens to a model that an engine has sharded while no step is under way.

    Attributes:
        in_step: whether the engine runs the model.

    Args:
        changes: of its modules, for teams.
        forwards: of each unit, from before its calls stopped.
    """

    def __init__(self, engine: Engine, changes: Changes, forwards: Mapping[str, Forward]) -> None:
        self.in_step = False
        self._engine = engine
        self._model = engine.model
        self._changes = changes
        self._forwards = dict(forwards)
        self._is_whole = False
        self._root_is_here = 0
        self._undo = ExitStack()
        if not engine.is_whole:
            self._watch_calls()
        for name in UNSHARDING:
            self._unshard_before(name)
        _of_models[engine.model] = weakref.ref(self)

    def __call__(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit returns that is called outside of a step. Collective where state is divided.

        Raises:
            ModelError: the plan has stages or teams.
        """
        forward = self._forwards[unit]
        if self._is_whole or self._engine.is_whole:
            return forward(*args, **kwargs)
        with torch.no_grad(), self._engine.gathered_unit(unit):
            return forward(*args, **kwargs)

    def _unshard_before(self, name: str) -> None:
        """Let a method of the model, if it has it, find an ordinary one."""
        method = getattr(self._model, name, None)
        if method is None:
            return
        of_model = weakref.ref(self._model)

        @wraps(method)
        def unsharding(*args: Any, **kwargs: Any) -> Any:
            model = of_model()
            assert model is not None, "its method is called"
            unshard(model)
            return getattr(model, name)(*args, **kwargs)

        vars(self._model)[name] = unsharding
        self._undo.callback(lambda: vars(self._model).pop(name, None))

    @property
    def is_frozen_otherwise(self) -> bool:
        """Whether its user has frozen or thawed parameters since the model was sharded."""
        stored = self._engine.stored_parameters
        return any(
            registered[name].requires_grad is not stored[own].trained
            for registered, name, own in self._places()
        )

    @property
    def can_be_called(self) -> bool:
        """Whether a rank computes all of the model, whose parameters come to it."""
        return not self._engine.places and not self._engine.plan.in_teams

    def _watch_calls(self) -> None:
        """Gather what lies outside of the blocks whenever the model is called or generates."""
        before = self._model.register_forward_pre_hook(lambda *_: self._come())
        after = self._model.register_forward_hook(lambda *_: self._leave(), always_call=True)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        generate = getattr(self._model, "generate", None)
        if generate is None:
            return
        # Ranks whose samples end early go on with the others: each block is gathered by all.
        is_adapted = hasattr(self._model, "peft_config")
        if is_adapted or SYNCHRONISED in inspect.signature(generate).parameters:
            together = {SYNCHRONISED: self._engine.comm.world > 1}
        else:
            together = {}

        @wraps(generate)
        def generate_together(*args: Any, **kwargs: Any) -> Any:
            kwargs = together | kwargs
            self._come()
            try:
                return generate(*args, **kwargs)
            finally:
                self._leave()

        self._model.generate = generate_together  # type: ignore[assignment]
        self._undo.callback(lambda: vars(self._model).pop("generate", None))

    def begin_step(self) -> None:
        """
        Raises:
            InputError: the model is whole.
        """
        if self._is_whole:
            raise InputError(
                "a step is made inside of gpumix.whole(model)",
                why="there the model is an ordinary one, which the engine does not run",
                fix="leave the with statement before",
            )
        self.in_step = True

    def _come(self) -> None:
        if self.in_step or self._is_whole:
            return
        if not self._root_is_here:
            self._engine.gather_root()
        self._root_is_here += 1

    def _leave(self) -> None:
        if self.in_step or self._is_whole or not self._root_is_here:
            return
        self._root_is_here -= 1
        if not self._root_is_here:
            self._engine.leave_root()

    def at_end(self, act: Callable[[], object]) -> None:
        """Do so when the model becomes an ordinary one."""
        self._undo.callback(act)

    # -- whole -------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, the model is an ordinary one with all of its weights. What is changed of them, on
        all ranks alike, is in the sharded model afterwards. Collective."""
        if self._is_whole:
            yield self._model
            return
        held = self._places()
        before = [parameters[name] for parameters, name, _ in held]
        parameters = self._whole_parameters()
        versions = {name: p._version for name, p in parameters.items()}
        for registered, name, own in held:
            registered[name] = parameters[own]
        self._is_whole = True
        try:
            with self._changes.undone(), self._plain_calls():
                yield self._model
        finally:
            self._is_whole = False
            for (registered, name, _), parameter in zip(held, before):
                registered[name] = parameter
        changed = {n: p.detach() for n, p in parameters.items() if p._version != versions[n]}
        if changed:
            self._engine.load_state_dict(changed, strict=False)

    def dissolve(self, *, everywhere: bool) -> None:
        """Make the model an ordinary one for good; its engine is at its end. Collective. See
        `unshard`."""
        flags = {own: registered[name].requires_grad for registered, name, own in self._places()}
        parameters = self._whole_parameters(on_host=True, everywhere=everywhere)
        self._changes.undo()
        for name, module in self._units().items():
            vars(module).pop("forward", None)
            if module.forward != self._forwards[name]:  # it had one of its own
                module.forward = self._forwards[name]
        for registered, name, own in self._places():
            registered[name] = parameters[own].requires_grad_(flags[own])
        device = next((p.device for p in parameters.values()), self._engine.device)
        for module in self._model.modules() if device.type != "meta" else ():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._undo.close()
        del _of_models[self._model]
        self._engine.end("its model is an ordinary one again")
        del self._engine, self._model  # each holds the other

    def _plain_calls(self) -> ExitStack:
        """Inside, units run as they did before their calls stopped."""
        stack = ExitStack()
        for name, module in self._units().items():
            stopping = module.forward
            module.forward = self._forwards[name]
            stack.callback(setattr, module, "forward", stopping)
        return stack

    def _units(self) -> dict[str, nn.Module]:
        return {name: self._model.get_submodule(name) for name in self._forwards}

    def _places(self) -> list[tuple[dict[str, Any], str, str]]:
        """Where modules register parameters: by which name, and the name of the piece."""
        found = []
        for name, own in self._engine.parameter_names.items():
            path, _, attribute = name.rpartition(".")
            found.append((self._model.get_submodule(path)._parameters, attribute, own))
        return found

    def _whole_parameters(
        self, *, on_host: bool = False, everywhere: bool = True
    ) -> dict[str, nn.Parameter]:
        """All weights, in the dtypes that they were given in; on the host of a rank that has not
        all of them anyway, if so asked, or on that of the first rank alone."""
        engine = self._engine
        values = engine.state_dict(rank0_only=not everywhere)
        device: torch.device | str = "cpu" if on_host and not engine.is_whole else engine.device
        if not values:
            device = "meta"
        return {
            own: nn.Parameter(
                values[own].to(device, one.given_dtype)
                if values
                else torch.empty(one.shape, dtype=one.given_dtype, device=device),
                one.trained,
            )
            for own, one in engine.stored_parameters.items()
        }


def outside_of(model: nn.Module) -> OutsideSteps | None:
    """That of a model which an engine has sharded; None for an ordinary one."""
    found = _of_models.get(model)
    return None if found is None else found()


@contextmanager
def whole(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, a model that was sharded is an ordinary one with all of its weights: to be called,
    read, saved or changed. All ranks enter it, and each has room for all of the model.

        with gpumix.whole(model):
            print(model.lm_head.weight.norm())

    Raises:
        InputError: a step is under way.
    """
    outside = outside_of(model)
    if outside is None:
        yield model
        return
    if outside.in_step:
        raise InputError(
            "the model cannot be made whole inside of a step",
            fix="do it between two steps, on all ranks",
        )
    with outside.whole():
        yield model


def unshard(model: nn.Module, *, everywhere: bool = True) -> None:
    """Make a model that was sharded an ordinary one again. All ranks call it; nothing happens to a
    model that is not sharded.

    A rank that had all of the weights on its device has them there. Else they are in the memory of
    its host.

    Args:
        everywhere: or on the first rank alone: elsewhere the parameters have no values (`meta`).
    """
    outside = outside_of(model)
    if outside is not None:
        outside.dissolve(everywhere=everywhere)


def refuse_stages() -> ModelError:
    """The error of a call outside of a step by a plan whose ranks have parts of the computation."""
    return ModelError(
        "the model was called outside of a step, and no rank computes all of it",
        why="by this plan ranks compute stages of the model, or parts of its layers",
        fix="with gpumix.whole(model): on all ranks; to evaluate, engine.evaluate(batch) or "
        "engine.outputs(function, batch)",
    )
