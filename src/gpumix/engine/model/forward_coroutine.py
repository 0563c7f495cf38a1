"""A model's forward as a coroutine that stops at every unit.

The model's own code runs unchanged in a greenlet. Where it calls a unit, the greenlet yields the
call to its resumer and sleeps until it gets the unit's outputs. The scheduler can thereby run unit
k of every micro-batch before unit k + 1 of any.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import greenlet
from torch import nn
from torch.utils.hooks import RemovableHandle

from gpumix.engine.model.adapters import AdapterSwitches
from gpumix.engine.model.rng import OtherGenerators
from gpumix.hardware import runtime
from gpumix.schema.errors import GpumixError, InputError

T = TypeVar("T")


class ModelError(GpumixError):
    """The model does something that the engine cannot run; the message names the unit."""

    exit_code = 2


# Device types with an autocast switch and dtype.
DEVICE_TYPES = ("cpu", *runtime.GPU_BACKENDS)
# Switches of the kernels of scaled_dot_product_attention, in the order of `ThreadState.attention`.
SDPA_SWITCHES = (
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cuda.enable_mem_efficient_sdp,
    torch.backends.cuda.enable_math_sdp,
    torch.backends.cuda.enable_cudnn_sdp,
)


class Randomness:
    """Seeds of a micro-batch in one step.

    Each stretch (a unit call, or the code between two) starts from a separate seed, a hash of seed,
    step, position and stretch. So recomputation needs no saved state, and the same step of the same
    plan draws the same numbers after a resume.

    Args:
        seed, step: of the run.
        position: number of the micro-batch's first sample in the global batch.
        generators: torch's, of the CPU and the device.
        others: seeded too, if the model draws from them.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        position: int,
        generators: Sequence[torch.Generator],
        others: OtherGenerators,
    ) -> None:
        digest = hashlib.sha256(f"{seed}:{step}:{position}".encode()).digest()
        self._base = int.from_bytes(digest[:7], "little")
        self._generators = generators
        self._others = others

    def start(self, stretch: int) -> None:
        """Seed the generators for stretch number `stretch`."""
        # An odd multiplier spreads neighboring numbers over the seed space.
        seed = (self._base + stretch * 0x9E3779B97F4A7C15) % 2**63
        for generator in self._generators:
            generator.manual_seed(seed)
        if self._others.looks or self._others.are_used:
            self._others.seed(seed)


class ThreadState(NamedTuple):
    """Thread or process state changed by a model's context managers, which must follow the
    coroutine: gradient mode, autocast, the default dtype, attention kernels.

    It is captured and compared several times at each unit call, and almost never differs.
    """

    gradients: bool
    autocast: list[tuple[bool, torch.dtype]]  # for each of `DEVICE_TYPES`
    default_dtype: torch.dtype
    attention: tuple[bool, bool, bool, bool]
    function_modes: int

    @classmethod
    def capture(cls) -> ThreadState:
        """Capture the state of this thread."""
        return cls(
            torch.is_grad_enabled(),
            [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in DEVICE_TYPES],
            torch.get_default_dtype(),
            # The queries behind `torch.backends.cuda.flash_sdp_enabled` and so on, each of which
            # takes as long as all four of these.
            (
                torch._C._get_flash_sdp_enabled(),
                torch._C._get_mem_efficient_sdp_enabled(),
                torch._C._get_math_sdp_enabled(),
                torch._C._get_cudnn_sdp_enabled(),
            ),
            torch._C._len_torch_function_stack(),
        )

    def applied(self) -> _ThreadStateScope:
        """Apply this state in a context, and restore the previous state on exit."""
        return _ThreadStateScope(self)

    def run(self, seed: Callable[[], None], function: Callable[..., T], *args: Any) -> T:
        """Call `function` with this state, after `seed`; then restore the previous state."""
        seed()
        with _ThreadStateScope(self):
            return function(*args)

    def replace(self, current: ThreadState) -> None:
        """Make this state the current thread's, which has state `current`."""
        if self == current:
            return
        torch.set_grad_enabled(self.gradients)
        for kind, wanted, found in zip(DEVICE_TYPES, self.autocast, current.autocast):
            if wanted != found:
                torch.set_autocast_enabled(kind, wanted[0])
                torch.set_autocast_dtype(kind, wanted[1])
        if current.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        for enable, enabled, is_enabled in zip(SDPA_SWITCHES, self.attention, current.attention):
            if is_enabled != enabled:
                enable(enabled)


class _ThreadStateScope:
    """See `ThreadState.applied`."""

    def __init__(self, state: ThreadState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._outside, self._caching = ThreadState.capture(), torch.is_autocast_cache_enabled()
        self._state.replace(self._outside)
        # Autocast caches its copies of weights until the model's own context ends. Copies made by a
        # unit without gradients, or of weights changed since, must not be found.
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._caching)
        self._outside.replace(ThreadState.capture())


class UnitCall(NamedTuple):
    """A call of a unit: its name and arguments, and the caller's thread state and context."""

    unit: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ThreadState
    context: contextvars.Context


@dataclass(frozen=True)
class ForwardResult:
    """The return of the model's forward."""

    value: Any


class _Run(greenlet):
    """The greenlet of a coroutine.

    Attributes:
        first_hook: number of the first hook that is set from its beginning on.
        hooks: those met inside of units.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(function)
        self.first_hook = RemovableHandle.next_id
        self.hooks: list[_HookOfCall] = []


class Coroutine:
    """A run of `function`, which calls a model whose units are `intercepted`.

    Args:
        randomness: seeded before each stretch; None: the generators stay as they are.
    """

    def __init__(self, function: Callable[[], Any], randomness: Randomness | None = None) -> None:
        self.greenlet = _Run(lambda _: ForwardResult(function()))
        self.greenlet.gr_context = contextvars.copy_context()
        self._randomness = randomness

    def resume(self, value: Any = None, stretch: int = 0) -> UnitCall | ForwardResult:
        """Run stretch number `stretch`, until the next unit call or the end, with `value` as result
        of the last unit call. Exceptions of the model propagate."""
        if self._randomness is not None:
            self._randomness.start(stretch)
        outside = ThreadState.capture()
        try:
            reached = self.greenlet.switch((value, outside))
        except BaseException:
            outside.replace(ThreadState.capture())
            raise
        if not isinstance(reached, UnitCall):
            outside.replace(ThreadState.capture())
            _refuse_removed_hooks(self.greenlet.hooks)
            return reached
        outside.replace(reached.state)
        if reached.state.function_modes != outside.function_modes:
            raise ModelError(
                f"unit '{reached.unit}' is called inside of a torch function mode",
                code="unit-in-function-mode",
                why="a mode (`with torch.device(...)`, say) cannot follow one of several "
                "micro-batches that run in turn",
                fix="enter it outside of the model and of the loss function, around engine.step",
            )
        return reached

    def close(self) -> None:
        """Drop the coroutine; its `finally` blocks run."""
        if not self.greenlet.dead:
            self.greenlet.throw()


Answer = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class UnitCallHandlers:
    """Handlers of unit calls outside of a coroutine: `use_handler` while active, or `outside`.

    Args:
        model: the model of the units.
    """

    def __init__(self, model: nn.Module) -> None:
        self._switches = AdapterSwitches(model)
        self._switched = self._switches.read()  # when the step began
        self._answer: Answer | None = None
        self._first_hook = 0  # of those set by the model's call
        self._hooks: list[_HookOfCall] = []
        self.outside: Answer | None = None

    def begin_step(self) -> None:
        """Note which adapters are active: the model's calls may not change them until the end."""
        if self._switches.holders:
            self._switched = self._switches.read()

    def refuse_switched_adapters(self, unit: str) -> None:
        """Refuse a call of a unit with other adapters than those of the step.

        Raises:
            ModelError: the model, or its loss, has switched them.
        """
        if self._switches.holders and self._switches.read() != self._switched:
            raise ModelError(
                "the model's call switches its adapters off, or to others",
                code="adapters-switched",
                where=f"unit '{unit}'",
                why="micro-batches run in turn, and units are run again in backward, when the call "
                "has switched them back",
                fix="compute what needs other adapters in a program of its own before (an "
                "evaluation inside `with model.disable_adapter():`), and keep it in the data set",
            )

    @contextlib.contextmanager
    def use_handler(self, answer: Answer) -> Iterator[None]:
        """Use `answer` in the body to compute results of unit calls from name and arguments."""
        self._answer, self._first_hook, self._hooks = answer, RemovableHandle.next_id, []
        try:
            yield
        finally:
            self._answer = None
        _refuse_removed_hooks(self._hooks)

    def answer(
        self, name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call of the unit `name`, made of `module`."""
        answer = self._answer or self.outside
        if self._answer is not None:
            self.refuse_switched_adapters(name)
            self._hooks.extend(_list_hooks_of_call(name, module, self._first_hook))
        if answer is None:
            raise ModelError(
                f"unit '{name}' was called outside of the engine",
                code="unit-called-outside-engine",
                why="its parameters are sharded over ranks and only there during a step",
                fix="train with engine.step(batch), evaluate with engine.evaluate(batch)",
            )
        return answer(name, args, kwargs)


class _Boundary:
    """The forward of a unit of a sharded model."""

    def __init__(self, name: str, module: nn.Module, calls: UnitCallHandlers) -> None:
        self._name, self._calls, forward = name, calls, module.forward
        self._module = weakref.ref(module)
        self.__name__ = "forward"
        with contextlib.suppress(ValueError, TypeError):  # inspected for a batch's names
            self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = greenlet.getcurrent()
        if current.parent is None:
            return self._calls.answer(self._name, self._module(), args, kwargs)
        self._calls.refuse_switched_adapters(self._name)
        if isinstance(current, _Run):
            hooks = _list_hooks_of_call(self._name, self._module(), current.first_hook)
            current.hooks.extend(hooks)
        inside = ThreadState.capture()
        call = UnitCall(self._name, args, kwargs, inside, contextvars.copy_context())
        outputs, outside = current.parent.switch(call)
        inside.replace(outside)
        return outputs

    def __deepcopy__(self, _: Any) -> _Boundary:
        return self

    def __reduce__(self) -> Any:
        raise make_pickling_error(f"unit '{self._name}'")


def make_pickling_error(where: str) -> InputError:
    """Make the error for a sharded model that is to be pickled."""
    return InputError(
        "a model that is sharded over ranks cannot be pickled",
        code="sharded-model-pickled",
        where=where,
        why="each process has pieces of its parameters",
        fix="save its state_dict(), or call gpumix.unshard(model) before",
    )


class _HookOfCall(NamedTuple):
    """A hook inside of a unit, set since the model's call began: the unit, the path of the module
    in it, its hooks by number, and the number."""

    unit: str
    path: str
    hooks: Mapping[int, Any]
    number: int


def _list_hooks_of_call(
    unit: str, module: nn.Module | None, first_hook: int
) -> Iterator[_HookOfCall]:
    """Yield the forward hooks inside of a unit that were set from number `first_hook` on."""
    if first_hook == RemovableHandle.next_id or module is None:
        return
    for path, inner in module.named_modules():
        for hooks in (inner._forward_pre_hooks, inner._forward_hooks):
            if path and hooks and (number := max(hooks)) >= first_hook:
                yield _HookOfCall(unit, path, hooks, number)


def _refuse_removed_hooks(found: Iterable[_HookOfCall]) -> None:
    """Refuse hooks that the call has set and removed again, as PEFT does to hand arguments to
    layers: the next micro-batch's replace them, and in a recompute they are gone. Those that stay,
    as transformers sets to record outputs, are the same for all."""
    for hook in found:
        if hook.number not in hook.hooks:
            raise ModelError(
                f"the model's call sets a hook on '{hook.path}' of unit '{hook.unit}', and "
                "removes it",
                code="hook-set-in-forward",
                why="hooks of one call cannot follow one of several micro-batches that run in "
                "turn, and are gone when a unit is recomputed; PEFT sets such hooks for "
                "`adapter_names`, `task_ids`, activated LoRA and X-LoRA",
                fix="train with a single adapter of another kind; or set the hook once, before "
                "training",
            )


def intercept(name: str, module: nn.Module, calls: UnitCallHandlers) -> None:
    """Make calls of `module` stop the surrounding coroutine; calls outside of a coroutine go to
    `calls`."""
    module.forward = _Boundary(name, module, calls)
