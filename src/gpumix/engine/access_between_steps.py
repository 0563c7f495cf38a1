"""A sharded model outside of its engine's steps: calls, reads, saves and unsharding.

Between two steps, a rank with all of the masters has an ordinary model with these parameters. If
state is sharded, calls gather block after block, and weights are read inside of
`summon_full_params`, which all ranks enter.
"""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gpumix.engine.model.adapters import list_disabled_adapters
from gpumix.engine.model.forward_coroutine import ModelError, make_pickling_error
from gpumix.engine.quantised.quantised_parameter import ModuleAttribute, restore_module_parameter
from gpumix.engine.schedule.pipeline_parallel import PipelineStage
from gpumix.engine.sharded_model import ShardedModel
from gpumix.engine.sharding.bucket import Bucket
from gpumix.engine.tensor_parallel.parallelize import ModuleChanges
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan

Forward = Callable[..., Any]
SYNCED_GPUS = "synced_gpus"  # of transformers
UNSHARDING = ("merge_and_unload", "unload")  # of PEFT: they take the model's layers apart
_access_by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AccessBetweenSteps]] = (
    weakref.WeakKeyDictionary()
)


class BlockwiseEngine(ShardedModel):
    """An engine whose model may be called between two steps, with one block gathered at a time."""

    plan: Plan
    places: Sequence[PipelineStage]
    changes: ModuleChanges
    _parts: ShardedUnits

    @abstractmethod
    def look_back(self) -> None:
        """Check that the losses of the last steps added up. Collective."""

    @property
    def unit_names(self) -> Sequence[str]:
        """Names of all units, on any rank."""
        return self._inventory.unit_names

    @property
    def can_be_called(self) -> bool:
        """True if each rank can compute the full model with gathered parameters."""
        return not self.places and not self.plan.uses_tensor_parallel

    @contextmanager
    def gathered_unit(self, name: str) -> Iterator[None]:
        """Gather a unit's parameters in the body, outside of a step. Collective.

        Raises:
            ModelError: by this plan no rank computes the full model.
        """
        self._refuse_stages()
        bucket = self._parts.units[name].bucket
        bucket.gathered()
        try:
            yield
        finally:
            bucket.leave()

    def gather_root(self) -> None:
        """Gather the parameters outside of the units, outside of a step. Collective.

        Raises:
            ModelError: by this plan no rank computes the full model.
        """
        self._refuse_stages()
        for bucket in self._root_buckets:
            bucket.gathered_apart()

    def leave_root(self) -> None:
        """Release the parameters of `gather_root`."""
        for bucket in self._root_buckets:
            bucket.leave()

    @property
    def _root_buckets(self) -> tuple[Bucket, ...]:
        return (*self._parts.always_used_buckets, self._parts.before, self._parts.after)

    @abstractmethod
    def end(self, why: str) -> None: ...

    def _refuse_stages(self) -> None:
        if not self.can_be_called:
            raise ModelError(
                "the model was called outside of a step, and no rank computes all of it",
                code="model-called-between-steps",
                why="by this plan ranks compute stages of the model, or parts of its layers",
                fix="with gpumix.summon_full_params(model): on all ranks; to evaluate, "
                "engine.evaluate(batch) or engine.outputs(function, batch)",
            )


class AccessBetweenSteps:
    """Behavior of a sharded model while no step is under way.

    The model references this object, and so does the engine. It references both weakly, so that
    their memory is freed as soon as nothing else references them. An unsharded model outlives its
    engine.

    Attributes:
        in_step: whether the engine runs the model.
        is_whole: whether the model is unsharded by `summon_full_params`.

    Args:
        forwards: units' original forwards, where these are not their classes'.
    """

    def __init__(self, engine: BlockwiseEngine, forwards: Mapping[str, Forward]) -> None:
        self.in_step = False
        self._of_engine = weakref.ref(engine)
        self._of_model = weakref.ref(engine.model)
        self._forwards = forwards
        self._names = dict(engine.parameter_names)
        self._stored = dict(engine.stored_parameters)
        self._units = list(engine.unit_names)
        self._always_whole = engine.is_whole
        self.is_whole = False
        self._root_is_here = 0
        self._undo = ExitStack()
        if not self._always_whole:
            self._watch_calls(engine.model)
        for name in UNSHARDING:
            self._unshard_before(engine.model, name)
        _access_by_model[engine.model] = weakref.ref(self)

    def __deepcopy__(self, _: object) -> AccessBetweenSteps:
        """Return itself: a copied model has no engine of its own."""
        return self

    def __reduce__(self) -> Any:
        raise make_pickling_error(type(self._of_model()).__name__)

    @property
    def _model(self) -> nn.Module:
        model = self._of_model()
        assert model is not None, "who comes here has it"
        return model

    @property
    def _engine(self) -> BlockwiseEngine:
        """The engine.

        Raises:
            ModelError: the engine is gone, and with it a part of the weights.
        """
        engine = self._of_engine()
        if engine is None:
            raise ModelError(
                "the model's engine is gone, and with it this rank's part of the weights",
                code="engine-gone",
                fix="call gpumix.unshard(model) on all ranks while the engine, the Trainer or the "
                "Accelerator is still there",
            )
        return engine

    def __call__(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a unit called outside of a step. Collective if state is sharded.

        Raises:
            ModelError: the plan has stages or tensor parallelism.
        """
        forward = self._forward_of(unit)
        if self.is_whole or self._always_whole:
            return forward(*args, **kwargs)
        with torch.no_grad(), self._engine.gathered_unit(unit):
            return forward(*args, **kwargs)

    def _forward_of(self, unit: str) -> Forward:
        """Return a unit's original forward, which does not stop."""
        if unit in self._forwards:
            return self._forwards[unit]
        module = self._model.get_submodule(unit)
        return partial(type(module).forward, module)

    def _unshard_before(self, model: nn.Module, name: str) -> None:
        """Make a method of the model, if present, unshard the model first."""
        if getattr(model, name, None) is None:
            return
        of_model = weakref.ref(model)

        def unsharding(*args: Any, **kwargs: Any) -> Any:
            whole = of_model()
            assert whole is not None, "its method is called"
            unshard(whole)
            return getattr(whole, name)(*args, **kwargs)

        vars(model)[name] = unsharding
        self._undo.callback(lambda: vars(self._model).pop(name, None))

    def has_changed_requires_grad(self) -> bool:
        """Return True if the user has frozen or thawed parameters since the model was sharded. PEFT
        freezes adapters only while they are disabled. Collective."""
        disabled = {
            inner
            for layer in list_disabled_adapters(self._model).values()
            for inner in layer.modules()
        }
        enabled = {own for module, _, own in self._places() if module not in disabled}
        flags = self._read_requires_grad()
        return any(flags[own] is not self._stored[own].trained for own in enabled)

    def _read_requires_grad(self) -> dict[str, bool]:
        """Return `requires_grad` of all parameters, by piece name. With several stages collective:
        a rank without a parameter has a stand-in, which is never trained."""
        flags = {own: _registered(m)[name].requires_grad for m, name, own in self._places()}
        engine = self._of_engine()
        if engine is None or not engine.places:
            return flags
        stored = {piece.name for piece in engine.pieces()}
        row = torch.tensor([int(flags[own]) if own in stored else 0 for own in flags])
        table = engine.comm.exchanged(row.to(engine.device), "exchange of requires_grad")
        return {own: bool(flag) for own, flag in zip(flags, table.sum(0).tolist())}

    @property
    def can_be_called(self) -> bool:
        """True if each rank can compute the full model."""
        return self._engine.can_be_called

    def _watch_calls(self, model: nn.Module) -> None:
        """Gather parameters outside of the blocks whenever the model is called or generates."""
        before = model.register_forward_pre_hook(self._come)
        after = model.register_forward_hook(self._leave, always_call=True)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        if getattr(model, "generate", None) is None:
            return
        generate: Any = getattr(type(model), "generate", None)
        known = inspect.signature(generate).parameters if generate is not None else {}
        # Ranks whose samples end early continue: each block is gathered by all ranks.
        is_told = SYNCED_GPUS in known or hasattr(model, "peft_config")

        def generate_together(*args: Any, **kwargs: Any) -> Any:
            if is_told:
                kwargs.setdefault(SYNCED_GPUS, self._engine.comm.world > 1)
            whole: Any = self._model
            own = vars(whole).pop("generate")
            self._come()
            try:
                return whole.generate(*args, **kwargs)
            finally:
                self._leave()
                vars(whole)["generate"] = own

        vars(model)["generate"] = generate_together
        self._undo.callback(lambda: vars(self._model).pop("generate", None))

    def refuse_step(self) -> None:
        """Refuse a step while the model is unsharded by `summon_full_params`.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a step is made inside of gpumix.summon_full_params(model)",
            code="step-inside-summon-full-params",
            why="inside of it the model is an ordinary module, which the engine does not run",
            fix="leave the with statement before",
        )

    def _come(self, *_: Any) -> None:
        if self.in_step or self.is_whole:
            return
        if not self._root_is_here:
            self._engine.gather_root()
        self._root_is_here += 1

    def _leave(self, *_: Any) -> None:
        if self.in_step or self.is_whole or not self._root_is_here:
            return
        self._root_is_here -= 1
        if not self._root_is_here:
            self._engine.leave_root()

    def call_on_unshard(self, act: Callable[[], object]) -> None:
        """Run `act` when the model is unsharded for good."""
        self._undo.callback(act)

    # -- unsharding --------------------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self) -> Iterator[nn.Module]:
        """Make the model an ordinary one with all weights in the body. Changes of weights, equal on
        all ranks, are written to the sharded model afterwards. Collective."""
        if self.is_whole or (self._of_engine() is None and self._always_whole):
            yield self._model
            return
        parameters = self._whole_parameters()
        versions = {name: p._version for name, p in parameters.items()}
        before = self._install_whole(parameters)
        self.is_whole = True
        try:
            with self._engine.changes.undo_temporarily(), self._restore_forwards():
                yield self._model
        finally:
            self.is_whole = False
            for one in before:
                one.holder[one.key] = one.value
        changed = {n: p.detach() for n, p in parameters.items() if p._version != versions[n]}
        if changed:
            self._engine.load_state_dict(changed, strict=False)

    def unshard_model(self, *, everywhere: bool) -> None:
        """Unshard the model for good and end its engine. Collective. See `unshard`."""
        model, engine = self._model, self._of_engine()
        if engine is not None:
            engine.look_back()
        held = {own: _registered(module)[name] for module, name, own in self._places()}
        flags = self._read_requires_grad()
        if engine is None and self._always_whole:
            parameters = {
                own: parameter
                if self._stored[own].format is not None
                else nn.Parameter(parameter.detach().to(self._stored[own].given_dtype))
                for own, parameter in held.items()
            }
        else:
            parameters = self._whole_parameters(on_host=True, everywhere=everywhere)
        if engine is not None:
            engine.changes.undo()
        for name in self._units:
            module = model.get_submodule(name)
            vars(module).pop("forward", None)
            if name in self._forwards:
                module.forward = self._forwards[name]
        for own, parameter in parameters.items():
            parameter.requires_grad_(flags[own])
        self._install_whole(parameters)
        self._keep_buffers_beside(parameters)
        self._undo.close()
        del _access_by_model[model]
        if engine is not None:
            engine.end("its model is an ordinary one again")

    def _keep_buffers_beside(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Move buffers to the parameters' device."""
        device = next((parameter.device for parameter in parameters.values()), None)
        if device is None or device.type == "meta":
            return
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def _restore_forwards(self) -> ExitStack:
        """Restore the original forwards of units until the returned stack closes."""
        stack = ExitStack()
        for name in self._units:
            module = self._model.get_submodule(name)
            stack.enter_context(replace_attributes(module, forward=self._forward_of(name)))
        return stack

    def _places(self) -> list[tuple[nn.Module, str, str]]:
        """Return the modules of all parameters, each with attribute name and piece name."""
        found = []
        for name, own in self._names.items():
            path, _, attribute = name.rpartition(".")
            found.append((self._model.get_submodule(path), attribute, own))
        return found

    def _install_whole(self, parameters: Mapping[str, nn.Parameter]) -> list[ModuleAttribute]:
        """Install full parameters in the modules; return what was there before."""
        new: list[ModuleAttribute] = []
        for module, name, own in self._places():
            parameter, form = parameters[own], self._stored[own].format
            if form is not None and type(parameter) is nn.Parameter:  # bytes
                shown = restore_module_parameter(form, parameter.data, [module])
                parameter = shown.parameter
                new += shown.attributes
            new.append(ModuleAttribute(_registered(module), name, parameter))
        before = [one._replace(value=one.holder.get(one.key)) for one in new]
        for one in new:
            one.holder[one.key] = one.value
        return before

    def _whole_parameters(
        self, *, on_host: bool = False, everywhere: bool = True
    ) -> dict[str, nn.Parameter]:
        """Return all weights in their original dtypes. With `on_host`, on the host of ranks that
        store only a part; without `everywhere`, on the first rank only."""
        engine = self._engine
        values = engine.gather_values(rank0_only=not everywhere)
        at_host = on_host and not self._always_whole
        device: torch.device | str = "cpu" if at_host else engine.device
        if not values:
            device = "meta"
        return {
            own: nn.Parameter(
                values[own].to(device, one.given_dtype)
                if values
                else torch.empty(one.shape, dtype=one.given_dtype, device=device),
                one.trained,
            )
            for own, one in self._stored.items()
        }


def _registered(module: nn.Module) -> dict[str, Any]:
    return module._parameters


def get_access_between_steps(model: nn.Module) -> AccessBetweenSteps | None:
    """Return the `AccessBetweenSteps` of a sharded model; None for an ordinary model."""
    found = _access_by_model.get(model)
    return None if found is None else found()


@contextmanager
def summon_full_params(model: nn.Module) -> Iterator[nn.Module]:
    """Make a sharded model an ordinary one with all weights in the body: to be called, read, saved
    or changed. All ranks enter it, and each needs memory for the full model.

        with gpumix.summon_full_params(model):
            print(model.lm_head.weight.norm())

    Raises:
        InputError: a step is under way.
    """
    outside = get_access_between_steps(model)
    if outside is None:
        yield model
        return
    if outside.in_step:
        raise InputError(
            "the model cannot be made whole inside of a step",
            code="summon-full-params-inside-step",
            fix="call gpumix.summon_full_params(model) between two steps, on all ranks",
        )
    with outside.summon_full_params():
        yield model


def unshard(model: nn.Module, *, everywhere: bool = True) -> None:
    """Make a sharded model an ordinary model again. All ranks call it; nothing happens to an
    unsharded model.

    Weights are on the device of a rank that had all of them there, otherwise in host memory.

    Args:
        everywhere: if False, only the first rank gets values; elsewhere parameters are on `meta`.
    """
    outside = get_access_between_steps(model)
    if outside is not None:
        outside.unshard_model(everywhere=everywhere)
