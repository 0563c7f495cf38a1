"""Changes applied to a function in a window, by name.

Changes are applied from outside, through torch, and can be measured before anyone edits code.
`suspects` describes the permanent edit for the user.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn, set_default_dtype  # unpatched
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from gpumix.doctor.function.patches import LIBRARY_LINE, Patches, find_user_line
from gpumix.doctor.function.suspects import DELAYABLE_READS
from gpumix.doctor.function.watching.lines import is_standard_stream
from gpumix.doctor.function.watching.optimizers import (
    FUSIBLE,
    UNFUSIBLE,
    ParameterReferences,
    list_parameters,
)
from gpumix.doctor.function.watching.roots import Treatment, device_of
from gpumix.doctor.function.watching.watch import SETTERS
from gpumix.hardware import runtime
from gpumix.hardware.host.environment import use_expandable_segments

MOST_KEPT = 8  # optimizers of one line kept for their successors
_LATER_STATE = "_gpumix_state"  # attribute of optimizers, with the state to take over


def apply_changes(changes: Mapping[str, Any], patches: Patches) -> list[Treatment]:
    """Apply all `changes`, and return the treatments for the trained modules."""
    made: dict[str, Callable[[Any, Patches], None]] = {
        "num_workers": _workers,
        "batch_size": _batches,
        "pinned": _pin,
        "late_values": _delay_reads,
        "quiet": _silence_output,
        "reuse_optimizer": _reuse_optimizers,
        "fused": _fuse,
        "recompute": _disable_recompute,
        "tf32": _tf32,
        "threads": _threads,
        "anomaly": partial(_unset, "anomaly"),
        "deterministic": partial(_unset, "deterministic"),
        "expandable_segments": lambda value, patches: use_expandable_segments(),
    }
    # In this order: compilation comes after all changes of the module.
    treated: dict[str, Callable[[Any, nn.Module], None]] = {
        "attention": _attend,
        "fp32": _compute_in_fp32,
        "autocast": _cast,
        "compile": lambda mode, module: module.compile(mode=mode),
    }
    for name, value in changes.items():
        if name not in treated:
            made[name](value, patches)
    return [partial(treat, changes[name]) for name, treat in treated.items() if name in changes]


# -- data ------------------------------------------------------------------------------------------


def _patch_constructor(
    patches: Patches, made: type, change: Callable[[str, dict[str, Any]], None]
) -> None:
    """Pass the line and arguments of each construction of `made` to `change`."""

    def making(before: Any) -> Any:
        signature = inspect.signature(before)

        @wraps(before)
        def init(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            change(find_user_line(), given.arguments)
            before(*given.args, **given.kwargs)

        return init

    patches.replace(made, "__init__", making)


def _workers(by_line: Mapping[str, int], patches: Patches) -> None:
    def change(line: str, given: dict[str, Any]) -> None:
        if line not in by_line:
            return
        given["num_workers"] = by_line[line]
        given["persistent_workers"] = by_line[line] > 0
        if not by_line[line]:  # these are for workers only
            for name in ("prefetch_factor", "multiprocessing_context", "timeout"):
                given.pop(name, None)

    _patch_constructor(patches, DataLoader, change)


def _batches(by_line: Mapping[str, int], patches: Patches) -> None:
    def change(line: str, given: dict[str, Any]) -> None:
        if line in by_line:
            given["batch_size"] = by_line[line]

    _patch_constructor(patches, DataLoader, change)


def _pin(_: Any, patches: Patches) -> None:
    def change(line: str, given: dict[str, Any]) -> None:
        given["pin_memory"] = True

    def copying(before: Any) -> Any:
        def copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not runtime.is_gpu(tensor.device) and tensor.is_pinned():
                kwargs["non_blocking"] = True
            return before(tensor, *args, **kwargs)

        return copy

    _patch_constructor(patches, DataLoader, change)
    for name in ("to", "cuda"):
        patches.replace(Tensor, name, copying)


# -- waits of the host -----------------------------------------------------------------------------


@dataclass
class PinnedHostCopy:
    """A GPU value on its way to pinned memory."""

    host: Tensor
    event: runtime.Event

    @classmethod
    def of(cls, tensor: Tensor) -> PinnedHostCopy:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        return cls(host, runtime.record_event(tensor.device))

    def result(self) -> Tensor:
        self.event.synchronize()
        return self.host


@dataclass
class DelayedReads:
    """Delayed reads: each line of user code gets the value of its previous read, without waiting.
    Reads in libraries are not delayed, because no line identifies them."""

    foreign: Callable[[Tensor], bool] = lambda tensor: runtime.is_gpu(tensor.device)
    send: Callable[[Tensor], Any] = PinnedHostCopy.of
    _sent: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def reading(self, before: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            line = find_user_line() if self.foreign(tensor) else LIBRARY_LINE
            if line == LIBRARY_LINE:
                return before(tensor, *args, **kwargs)
            key = (before, line, tensor.shape, tensor.dtype)
            last, self._sent[key] = self._sent.get(key), self.send(tensor)
            return before(tensor if last is None else last.result(), *args, **kwargs)

        return read


def _delay_reads(_: Any, patches: Patches) -> None:
    late = DelayedReads()
    for name in DELAYABLE_READS:
        patches.replace(Tensor, name, late.reading)


def _silence_output(_: Any, patches: Patches) -> None:
    for name in ("stdout", "stderr"):
        patches.replace(sys, name, _Silent)
    patches.replace(builtins, "print", _printing)


def _printing(before: Any) -> Any:
    """Suppress printing, including the formatting of values."""

    def printing(*values: Any, file: Any = None, **kwargs: Any) -> None:
        if not is_standard_stream(file):
            before(*values, file=file, **kwargs)

    return printing


class _Silent:
    """A text stream discarding all output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- settings of the process -----------------------------------------------------------------------


def _threads(count: int, patches: Patches) -> None:
    torch.set_num_threads(count)
    own = os.getpid()

    def setting(before: Any) -> Any:
        def set_threads(wanted: int) -> None:
            if os.getpid() != own:  # a worker, which sets its own
                before(wanted)

        return set_threads

    patches.replace(torch, SETTERS["threads"], setting)


def _unset(what: str, _: Any, patches: Patches) -> None:
    patches.replace(torch, SETTERS[what], lambda _: _ignored)


def _tf32(_: Any, patches: Patches) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    patches.replace(torch, "set_float32_matmul_precision", lambda _: _ignored)


def _ignored(*_: Any, **__: Any) -> None:
    return


# -- computation -----------------------------------------------------------------------------------


def _fuse(lines: Collection[str], patches: Patches) -> None:
    def change(line: str, given: dict[str, Any]) -> None:
        if line in lines and not any(given.get(key) for key in UNFUSIBLE):
            given["fused"] = True

    for kind in FUSIBLE:
        _patch_constructor(patches, kind, change)


def _reuse_optimizers(lines: Collection[str], patches: Patches) -> None:
    """Let each optimizer made by one of `lines` take over the settings and the state of the one
    before for the same parameters. The state comes back at the next step, because constructors of
    some optimizers fill it."""
    known: dict[str, list[Optimizer]] = {line: [] for line in lines}

    def making(before: Any) -> Any:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            before(optimizer, *args, **kwargs)
            if (earlier := known.get(find_user_line())) is None:
                return
            parameters = list_parameters(optimizer.param_groups)
            for one in earlier:
                if ParameterReferences(one).match(parameters):
                    state = vars(one).get(_LATER_STATE, one.state)
                    vars(optimizer).update({**vars(one), "state": defaultdict(dict)})
                    vars(optimizer)[_LATER_STATE] = state
                    earlier.remove(one)
                    break
            earlier.append(optimizer)
            del earlier[:-MOST_KEPT]

        return made

    def stepping(optimizer: Any, *_: Any) -> None:
        if _LATER_STATE in vars(optimizer):
            optimizer.state = vars(optimizer).pop(_LATER_STATE)

    patches.replace(Optimizer, "__init__", making)
    patches.callback(register_optimizer_step_pre_hook(stepping).remove)


def _disable_recompute(_: Any, patches: Patches) -> None:
    """Disable activation checkpointing; activations are stored instead of recomputed."""

    def passing(before: Any) -> Any:
        own = {*inspect.signature(before).parameters, "preserve_rng_state"}

        def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **{k: v for k, v in kwargs.items() if k not in own})

        return compute

    patches.replace_everywhere(checkpoint, "checkpoint", passing)


def _attend(name: str, module: nn.Module) -> None:
    choose: Any = getattr(module, "set_attn_implementation", None)
    if choose is not None:
        choose(name)


def _compute_in_fp32(_: Any, module: nn.Module) -> None:
    """Convert a module to fp32, in place for its optimizer; callers see fp64."""
    module.float()
    forward = module.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        set_default_dtype(torch.float32)
        try:
            given = _convert((args, kwargs), torch.float64, torch.float32)
            result = forward(*given[0], **given[1])
        finally:
            set_default_dtype(before)
        return _convert(result, torch.float32, torch.float64)

    module.forward = compute  # type: ignore[method-assign]


def _cast(_: Any, module: nn.Module) -> None:
    forward, device = module.forward, device_of(module).type

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            result = forward(*args, **kwargs)
        return _convert(result, torch.bfloat16, torch.float32)

    module.forward = cast  # type: ignore[method-assign]


def _convert(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Convert all tensors of one dtype in nested values to another."""

    def convert(value: Any) -> Any:
        return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value

    return tree_map(convert, values)
