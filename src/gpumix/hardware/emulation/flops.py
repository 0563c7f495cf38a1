"""FLOPs of torch operations.

Uses torch's formulas, plus formulas missing for CPUs. The latter are not registered with torch,
because the whole process shares torch's table. Operations without a formula count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

Formula = Callable[..., int]
"""Called with the operation's arguments and the result as `out_val=`; returns FLOPs."""

aten = torch.ops.aten


def find_formula(operation: Any) -> Formula | None:
    """Return the formula of an operation seen by a dispatch mode, or None if there is none.

    Overloads (`mm.default`, `mm.out`) share a formula; higher-order operations have no overloads.
    """
    packet = getattr(operation, "overloadpacket", operation)
    known = _EXTRA_FORMULAS.get(packet) or flop_counter.flop_registry.get(packet)
    return known or _LIBRARY_FORMULAS.get(str(packet))


def count_recomputed_flops(operation: Any, args: Sequence[Any]) -> int:
    """Return the FLOPs of an operation that are not part of the gradient's mathematics. Fused
    attention saves no scores, so its backward recomputes queries times keys."""
    name = str(getattr(operation, "overloadpacket", operation))
    if "scaled_dot_product" not in name or not name.endswith(("backward", "backward_for_cpu")):
        return 0
    _, q, k = args[:3]
    return 2 * q.shape[:-1].numel() * q.shape[-1] * k.shape[-2]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(q.shape, *_expand_heads(q, k, v))


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> int:
    return flop_counter.sdpa_backward_flop_count(grad.shape, q.shape, *_expand_heads(q, k, v))


def _expand_heads(q: torch.Tensor, *grouped: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the computed shapes: several query heads share a head of keys and values."""
    return [(*q.shape[:-2], *tensor.shape[-2:]) for tensor in grouped]


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count a mixture of experts. Unless both are 3-D, each row or column belongs to one group
    only."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _packed_linear(x: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    """Count a product with a quantised weight."""
    out = out_val[0] if isinstance(out_val, tuple) else out_val
    return 2 * x.numel() * out.shape[-1]


_EXTRA_FORMULAS: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped_mm,
    aten.addmm_: flop_counter.flop_registry[aten.addmm],
    aten.baddbmm_: flop_counter.flop_registry[aten.baddbmm],
}

# By name: importing the libraries takes seconds.
_LIBRARY_FORMULAS: dict[str, Formula] = {
    "bitsandbytes.gemm_4bit": _packed_linear,
    "bitsandbytes.gemv_4bit": _packed_linear,
    "bitsandbytes.int8_scaled_mm": _packed_linear,
    "bitsandbytes.int8_mixed_scaled_mm": _packed_linear,
}
