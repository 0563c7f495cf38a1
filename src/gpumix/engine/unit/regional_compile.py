"""Regional compilation: units through torch.compile, one kind of unit at a time.

All units of a kind share one compiled function that takes the module as an argument. Parameters are
inputs of the graph, so one layer's graph serves the next and any gather buffer. The boundary, the
recompute and the collectives stay outside and run eagerly; `docs/design/compiled.md` says why this
works.
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

from gpumix.engine.unit.sharded_units import ShardedUnit
from gpumix.hardware.host.environment import has_cpp_compiler, keep_compiled_code
from gpumix.hardware.runtime import is_gpu
from gpumix.schema.errors import MachineError

Forward = Callable[..., Any]
Backend = str | Callable[..., Any]
DEFAULT_BACKEND = "inductor"


def compile_units(
    units: Iterable[ShardedUnit],
    *,
    sizes: Collection[int],
    device: torch.device,
    backend: Backend = DEFAULT_BACKEND,
) -> None:
    """Replace the forward of `units` by compiled code, compiled at the first run of each kind.

    Args:
        sizes: sizes of the expected micro-batches; other sizes may get separate code.
        backend: of torch.compile.

    Raises:
        MachineError: no compiler on this machine makes code for `device`.
    """
    if backend == DEFAULT_BACKEND:
        _check_compilers(device)
        keep_compiled_code()
    _configure_torch_compile()
    shared: dict[tuple[str, Forward], _CompiledKind] = {}
    for unit in units:
        plain = unit.forward
        if hasattr(plain, "_torchdynamo_orig_callable"):
            continue  # the model's author compiled it
        if inspect.ismethod(plain) and plain.__self__ is unit.module:
            function = plain.__func__
        else:
            function = _without_module(plain)
        kind = shared.get((unit.kind, function))
        if kind is None:
            kind = shared[unit.kind, function] = _CompiledKind(unit.kind, function, sizes, backend)
        unit.forward = CompiledForward(kind, unit.module, plain)


def get_uncompiled_forward(unit: ShardedUnit) -> Forward:
    """Return the unit's forward without compiled code."""
    return unit.forward.plain if isinstance(unit.forward, CompiledForward) else unit.forward


class CompiledForward:
    """Compiled forward of a unit; `plain` is the uncompiled forward."""

    def __init__(self, kind: _CompiledKind, module: nn.Module, plain: Forward) -> None:
        self.plain = plain
        self._kind = kind
        self._module = module

        # The module has the same parameter objects whenever it is computed.
        self._parameters: list[nn.Parameter] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_gradients():
            return self._kind.run(self._module, args, kwargs)

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Remove the parameters' gradients during a call. The tracer copies each parameter with its
        gradient, and fails if the gradient has another dtype, as fp32 gradients of low-precision
        weights do. No forward reads gradients, and their presence is no reason to recompile."""
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


class _CompiledKind:
    """Compiled function of all units of a kind.

    A rank with micro-batches of one size gets code for that size. Otherwise the number of samples
    is dynamic and at least 2, because torch specializes on 1. If a single sample is expected too,
    the number is an unbacked symbol, unless the unit needs its value.

    The choice of code depends only on the call, because backward repeats the call and must find the
    same tensors. Calls whose other dimensions equal the first call's have their own code. All other
    calls share code in which the differing dimensions are dynamic. Otherwise torch, seeing
    dimensions change, would make code that also serves the first calls in their recompute.
    """

    def __init__(
        self, name: str, function: Forward, sizes: Collection[int], backend: Backend
    ) -> None:
        self._function = function
        self._compiled = torch.compile(_make_named_runner(name), backend=backend)
        self._whole = torch.compile(_make_named_runner(name), backend=backend, fullgraph=True)
        self._of_others = torch.compile(
            _make_named_runner(f"{name} of other shapes"), backend=backend
        )
        self._first: dict[Any, list[torch.Size]] = {}  # shapes, by form
        self._sizes = frozenset(sizes) - {1} if len(set(sizes)) > 1 else frozenset()
        self._planned = frozenset(sizes)
        self._one_too = bool(self._sizes) and 1 in sizes and _has_shape_id_support()
        self._need_to_know: set[Any] = set()  # calls of this form

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch._dynamo as dynamo
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
        size = self._size(tensors)
        counted = [t for t in tensors if len(t) == size]
        # Among equal numbers, a single call does not show which is the number of samples.
        plain = not any(size in t.shape[1:] for t in counted)
        form = _make_call_key(module, leaves)
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
                # Raised while the full unit was traced: nothing has been computed.
                self._need_to_know.add(form)
                args, kwargs = tree_map(_drop_dynamic_marks, (args, kwargs))
                return self.run(module, args, kwargs)
        for tensor, place in [*((tensor, 0) for tensor in counted), *changed]:
            dynamo.maybe_mark_dynamic(tensor, place)
        run = self._of_others if changed else self._compiled
        return run(self._function, module, args, kwargs)

    def _size(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of samples in a call. 0 if the tensors are ambiguous or the number is
        1, which is also the first dimension of broadcast tensors."""
        found = {len(t) for t in tensors} & self._sizes
        return found.pop() if len(found) == 1 else 0


def _make_named_runner(name: str) -> Forward:
    """Return a function with separate code. torch finds compiled code, and limits recompilations,
    by code object."""

    def unit(
        forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(module, *args, **kwargs)

    unit.__code__ = unit.__code__.replace(co_name=name)
    return unit


def _without_module(forward: Forward) -> Forward:
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def _make_call_key(module: nn.Module, leaves: Sequence[Any]) -> Any:
    """Return all properties of a call that code depends on, except sizes."""
    kinds = tuple(t.dim() if isinstance(t, torch.Tensor) else type(t) for t in leaves)
    return torch.is_grad_enabled(), module.training, kinds


def _drop_dynamic_marks(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) else value


@functools.cache
def _configure_torch_compile() -> None:
    """Configure torch for the recompute and for split backward. Saved tensors of a unit with graph
    breaks pass through the recompute's hooks while torch looks for code to compile. A split
    backward runs a graph twice, so code must not write into saved tensors."""
    import torch._functorch.config as of_graphs
    from torch._dynamo import trace_rules

    trace_rules.add("gpumix.engine.model.backward_hooks")
    of_graphs.donated_buffer = False


@functools.cache
def _has_shape_id_support() -> bool:
    """Return whether torch supports `shape_id`, which marks unbacked sizes as equal."""
    from torch._dynamo.decorators import mark_unbacked

    return "shape_id" in inspect.signature(mark_unbacked).parameters


def _check_compilers(device: torch.device) -> None:
    if is_gpu(device):
        from torch.utils._triton import has_triton

        if not has_triton():
            raise MachineError(
                f"cannot compile units for {device}: Triton is missing, or does not support it",
                code="triton-missing",
                fix="pip install triton, or leave the class out: `torch_compile: {CLASS: off}`",
            )
    elif not has_cpp_compiler():
        raise MachineError(
            "cannot compile units for the CPU: there is no C++ compiler",
            code="compiler-missing",
            fix="apt-get install g++ (or xcode-select --install), or `torch_compile: off` in the "
            "job",
        )
