"""Units through torch.compile, one kind of unit at a time: *regional* compilation.

All units of a kind share one compiled function, which takes the module as an argument: its
parameters are then inputs of the graph, so that one layer's graph serves the next, and whatever
buffer they are gathered into. What stays outside (the boundary, the recompute, the collectives)
runs as ever; `docs/design/compiled.md` says why they go together.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.engine.parts import ShardedUnit
from gpumix.hardware.environment import has_cpp_compiler, keep_compiled_code
from gpumix.hardware.runtime import is_gpu
from gpumix.spec.errors import MachineError

Forward = Callable[..., Any]
Backend = str | Callable[..., Any]
OURS = "inductor"


def compile_units(
    units: Iterable[ShardedUnit],
    *,
    sizes: Collection[int],
    device: torch.device,
    backend: Backend = OURS,
) -> None:
    """Let `units` compute by compiled code; it is compiled when a unit of each kind first runs.

    Args:
        sizes: of the micro-batches that will come; for others there may be code of its own.
        backend: of torch.compile.

    Raises:
        MachineError: there is no compiler here that makes code for `device`.
    """
    if backend == OURS:
        _check_compilers(device)
        keep_compiled_code()
    _leave_alone_what_backward_needs()
    shared: dict[tuple[str, Forward], _Kind] = {}
    for unit in units:
        plain = unit.forward
        if hasattr(plain, "_torchdynamo_orig_callable"):
            continue  # its author compiled it
        if inspect.ismethod(plain) and plain.__self__ is unit.module:
            function = plain.__func__
        else:
            function = _without_module(plain)
        kind = shared.get((unit.kind, function))
        if kind is None:
            kind = shared[unit.kind, function] = _Kind(unit.kind, function, sizes, backend)
        unit.forward = CompiledForward(kind, unit.module, plain)


def plain_forward(unit: ShardedUnit) -> Forward:
    """The unit's forward without compiled code."""
    return unit.forward.plain if isinstance(unit.forward, CompiledForward) else unit.forward


class CompiledForward:
    """One unit's forward, in compiled code; `plain` is the one without."""

    def __init__(self, kind: _Kind, module: nn.Module, plain: Forward) -> None:
        self.plain = plain
        self._kind = kind
        self._module = module

        # The same objects for life, which the module holds while it is computed.
        self._parameters: list[nn.Parameter] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_gradients():
            return self._kind.run(self._module, args, kwargs)

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """The tracer makes a copy of each parameter with its gradient, and cannot where that has
        another dtype: the fp32 one of low-precision weights. No forward looks at gradients, and
        whether there are some is no reason to compile again."""
        if self._parameters is None:
            self._parameters = list(self._module.parameters())
        gradients = [p.grad for p in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in zip(self._parameters, gradients):
                parameter.grad = gradient


class _Kind:
    """The compiled function of all units of one kind.

    A rank whose micro-batches are all alike gets code for that size. Else the number of samples is
    a variable of the code, at least 2: torch makes code of its own for 1. Where one sample is to
    come too, it is a variable about which nothing is known, unless the unit needs to know it.

    How a call is run depends on nothing but the call: backward runs it again, and must find the
    same tensors. So calls whose other dimensions are as in the first one have code of their own,
    and the code of all others has those that differ as variables: where torch sees dimensions
    change it makes code that would serve the first calls too, when they are run again.
    """

    def __init__(
        self, name: str, function: Forward, sizes: Collection[int], backend: Backend
    ) -> None:
        self._function = function
        self._compiled = torch.compile(_named(name), backend=backend)
        self._whole = torch.compile(_named(name), backend=backend, fullgraph=True)
        self._of_others = torch.compile(_named(f"{name} of other shapes"), backend=backend)
        self._first: dict[Any, list[torch.Size]] = {}  # shapes, by form
        self._sizes = frozenset(sizes) - {1} if len(set(sizes)) > 1 else frozenset()
        self._planned = frozenset(sizes)
        self._one_too = bool(self._sizes) and 1 in sizes and _knows_shape_ids()
        self._need_to_know: set[Any] = set()  # calls of this form

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch._dynamo as dynamo
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
        size = self._size(tensors)
        counted = [t for t in tensors if len(t) == size]
        # Which of equal numbers is that of the samples, a single call does not say.
        plain = not any(size in t.shape[1:] for t in counted)
        form = _form(module, leaves)
        first = self._first.setdefault(form, [t.shape for t in tensors])
        changed = [
            (tensor, place)
            for tensor, before in zip(tensors, first)
            for place in range(tensor.dim())
            if tensor.shape[place] != before[place]
            and (place or not self._planned.issuperset((len(tensor), before[0])))
        ]
        if self._one_too and plain and not changed and form not in self._need_to_know:
            for tensor in counted:
                dynamo.decorators.mark_unbacked(tensor, 0, hint_override=size, shape_id="samples")
            try:
                return self._whole(self._function, module, args, kwargs)
            except (dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode):
                # Told while the unit was traced as a whole: nothing has been computed.
                self._need_to_know.add(form)
                args, kwargs = tree_map(_unmarked, (args, kwargs))
                return self.run(module, args, kwargs)
        for tensor, place in [*((tensor, 0) for tensor in counted), *changed]:
            dynamo.maybe_mark_dynamic(tensor, place)
        run = self._of_others if changed else self._compiled
        return run(self._function, module, args, kwargs)

    def _size(self, tensors: Sequence[torch.Tensor]) -> int:
        """The number of samples in a call, 0 if its tensors do not tell, or if it is 1: so is the
        first dimension of what is broadcast."""
        found = {len(t) for t in tensors} & self._sizes
        return found.pop() if len(found) == 1 else 0


def _named(name: str) -> Forward:
    """A function with code of its own, by which torch finds what was compiled for it, and limits
    how often."""

    def unit(
        forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(module, *args, **kwargs)

    unit.__code__ = unit.__code__.replace(co_name=name)
    return unit


def _without_module(forward: Forward) -> Forward:
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def _form(module: nn.Module, leaves: Sequence[Any]) -> Any:
    """What code depends on in a call, but for sizes."""
    kinds = tuple(t.dim() if isinstance(t, torch.Tensor) else type(t) for t in leaves)
    return torch.is_grad_enabled(), module.training, kinds


def _unmarked(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) else value


@functools.cache
def _leave_alone_what_backward_needs() -> None:
    """Where a unit is no single graph, its saved tensors pass through the hooks of the recompute
    while torch looks for code to compile. And where a backward is split, its graph runs twice: code
    must not write into what it saved."""
    import torch._functorch.config as of_graphs
    from torch._dynamo import trace_rules

    trace_rules.add("gpumix.engine.recompute")
    of_graphs.donated_buffer = False


@functools.cache
def _knows_shape_ids() -> bool:
    """Whether torch can be told that sizes of which nothing is known are equal."""
    from torch._dynamo.decorators import mark_unbacked

    return "shape_id" in inspect.signature(mark_unbacked).parameters


def _check_compilers(device: torch.device) -> None:
    if is_gpu(device):
        from torch.utils._triton import has_triton

        if not has_triton():
            raise MachineError(
                f"cannot compile units for {device}: Triton is missing, or does not support it",
                fix="pip install triton, or leave the class out: `compile: {CLASS: off}`",
            )
    elif not has_cpp_compiler():
        raise MachineError(
            "cannot compile units for the CPU: there is no C++ compiler",
            fix="apt-get install g++ (or xcode-select --install), or `compile: off` in the job",
        )
