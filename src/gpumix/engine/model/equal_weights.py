"""Equal initial weights on all ranks: rank 0's values, as under DDP.

Programs make their models before the engine runs, on each rank separately, from files or from
random numbers with equal or different seeds. Ranks compare digests, and only differing tensors are
sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.frozen_base import as_signed, checksum
from gpumix.engine.quantised.weight_formats import iterate_quantised_parameters
from gpumix.schema.errors import InputError


def check_equal_models(model: nn.Module, comm: Communicator) -> None:
    """Refuse models that differ between ranks. Collective.

    Raises:
        InputError: names, shapes or dtypes of parameters or buffers differ.
    """
    named = [(name, tensor.shape, tensor.dtype) for name, tensor in _iterate_tensors(model)]
    digest = hashlib.sha256(repr(named).encode()).hexdigest()
    looks = _all_gather_numbers([int(digest[:12], 16)], comm)
    other = next((rank for rank, row in enumerate(looks) if row != looks[0]), None)
    if other is not None:
        raise InputError(
            f"rank {other} has a different model from rank 0",
            code="models-differ-by-rank",
            why="names, shapes or dtypes of their parameters and buffers differ",
            fix="build the same model on all ranks",
        )


def broadcast_weights(model: nn.Module, comm: Communicator) -> list[str]:
    """Broadcast rank 0's values of differing parameters and buffers, and return the names. Names
    and shapes must be equal on all ranks. Collective."""
    if comm.world == 1:
        return []
    named = list(_iterate_tensors(model))
    if not named:  # made without weights
        return []
    table = _all_gather_numbers([as_signed(checksum(tensor)) for _, tensor in named], comm)
    differing = [len(set(column)) > 1 for column in zip(*table)]
    found = [(name, tensor) for differs, (name, tensor) in zip(differing, named) if differs]
    for name, tensor in found:
        _broadcast_tensor(tensor, name, comm)
    return [name for name, _ in found]


def _all_gather_numbers(own: Sequence[int], comm: Communicator) -> list[list[int]]:
    told = torch.tensor(own, dtype=torch.int64, device=comm.device)
    return comm.exchanged(told, "comparison of models").tolist()  # type: ignore[no-any-return]


def _iterate_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers that have values; meta tensors are initialized equally later."""
    packed = {id(one.original): one for _, one in iterate_quantised_parameters(model)}
    for name, p in model.named_parameters():
        tensors = packed[id(p)].tensors() if id(p) in packed else None
        named = {name: p} if tensors is None else {f"{name}.{n}": t for n, t in tensors.items()}
        yield from ((own, tensor.detach()) for own, tensor in named.items() if not tensor.is_meta)
    yield from ((name, b) for name, b in model.named_buffers() if not b.is_meta)


@torch.no_grad()
def _broadcast_tensor(tensor: Tensor, name: str, comm: Communicator) -> None:
    there = tensor.to(comm.device, copy=True).contiguous()
    comm.broadcast(there, 0, f"broadcast of '{name}'")
    tensor.copy_(there)
