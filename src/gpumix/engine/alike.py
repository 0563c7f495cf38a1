"""All ranks begin with the weights of the first one, as they do under DDP.

Programs make their models before anybody is asked, on each rank by itself: from the same files, or
from random numbers that were seeded alike or not. Ranks compare digests, and only what differs is
sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gpumix.engine.comm import Communicator
from gpumix.spec.errors import InputError


def refuse_other_models(model: nn.Module, comm: Communicator) -> None:
    """
    Raises:
        InputError: a rank has made another model. Collective.
    """
    named = [(name, tensor.shape, tensor.dtype) for name, tensor in _tensors(model)]
    digest = hashlib.sha256(repr(named).encode()).hexdigest()
    looks = _all_numbers([int(digest[:12], 16)], comm)
    other = next((rank for rank, row in enumerate(looks) if row != looks[0]), None)
    if other is not None:
        raise InputError(
            f"rank {other} has made another model than rank 0",
            why="names, shapes or dtypes of their parameters and buffers differ",
            fix="make the same model on all ranks, whatever their number",
        )


def make_alike(model: nn.Module, comm: Communicator) -> list[str]:
    """Give parameters and buffers of a model, alike on all ranks in names and shapes, the values of
    the first rank's; the names of those that differed. Collective."""
    if comm.world == 1:
        return []
    named = list(_tensors(model))
    if not named:  # it was made without weights
        return []
    table = _all_numbers([_digest(tensor) for _, tensor in named], comm)
    differing = [len(set(column)) > 1 for column in zip(*table)]
    found = [(name, tensor) for differs, (name, tensor) in zip(differing, named) if differs]
    for name, tensor in found:
        _take(tensor, name, comm)
    return [name for name, _ in found]


def _all_numbers(own: Sequence[int], comm: Communicator) -> list[list[int]]:
    told = torch.tensor(own, dtype=torch.int64, device=comm.device)
    return comm.exchanged(told, "comparison of models").tolist()  # type: ignore[no-any-return]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What has values: a model that was made without weights has them made alike anyway."""
    yield from ((name, p.detach()) for name, p in model.named_parameters() if not p.is_meta)
    yield from ((name, b) for name, b in model.named_buffers() if not b.is_meta)


def _digest(tensor: Tensor) -> int:
    """Another one for other values, in all likelihood."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
    places = torch.arange(whole.numel(), device=whole.device) * 2 + 1
    return int((whole * places).sum()) ^ int(flat[len(whole) * 8 :].long().sum())


@torch.no_grad()
def _take(tensor: Tensor, name: str, comm: Communicator) -> None:
    there = tensor.to(comm.device, copy=True).contiguous()
    comm.broadcast(there, 0, f"broadcast of '{name}'")
    tensor.copy_(there)
