"""Gathering of a batch's predictions, labels and texts from all ranks, to all ranks.

Ranks have different numbers of rows, of different widths, or no rows and no knowledge of the shapes
of other ranks. Only numbers and text cross between ranks, never a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.schema.errors import InputError

PADDING = -100  # transformers' padding of predictions and labels of unlike lengths


def gather_integers(own: Sequence[int], label: str) -> list[list[int]]:
    """Return every rank's integers, equally many on each, in rank order. Collective."""
    told = torch.tensor(own, dtype=torch.int64)
    rows: list[list[int]] = _gather_row(told, make_communicator(get_group_device()), label).tolist()
    return rows


def gather_texts(text: str, comm: Communicator, label: str) -> list[str]:
    """Return every rank's text, in rank order. Collective."""
    own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    sizes = _gather_row(torch.tensor([len(text.encode())]), comm, label)
    longest = max(1, int(sizes.max()))
    told = torch.zeros(longest, dtype=torch.uint8)
    told[: int(sizes[comm.rank])] = own[: int(sizes[comm.rank])]
    rows = _gather_row(told, comm, label)
    return [bytes(row[: int(n)].tolist()).decode() for row, (n,) in zip(rows, sizes)]


def gather_rows(parts: Mapping[range, Any], comm: Communicator, label: str) -> Any:
    """Return a batch's rows on all ranks, on the host, in the order of places. Collective.

    Args:
        parts: this rank's rows by places in the global batch: a pytree of tensors whose first
            dimension is the rows. Ranks with equal places have equal rows.

    Returns:
        One pytree like the parts; shorter rows are padded at the end with -100. None if no rank has
        any rows.

    Raises:
        InputError: trees of ranks differ, or a tensor's rows do not match its places.
    """
    leaves, spec = [], None
    for of, part in parts.items():
        flat, spec = tree_flatten(part)
        _check_row_count(of, flat)
        leaves.append(flat)
    told = {
        "spec": None if spec is None else treespec_dumps(spec),
        "places": [[of.start, of.stop] for of in parts],
        "shapes": [[list(t.shape) for t in flat] for flat in leaves],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in leaves[0]] if leaves else [],
    }
    every = [json.loads(text) for text in gather_texts(json.dumps(told), comm, label)]
    known = next((one for one in every if one["spec"] is not None), None)
    if known is None:
        return None
    if any(one["spec"] not in (None, known["spec"]) for one in every):
        raise InputError(
            f"{label}: ranks have made unlike things of their samples",
            code="gathered-structures-differ",
        )
    found = [
        _gather_leaf(number, [flat[number] for flat in leaves], every, known, comm, label)
        for number in range(len(known["dtypes"]))
    ]
    return tree_unflatten(found, treespec_loads(known["spec"]))


def gather_objects(own: Any, comm: Communicator, label: str) -> list[list[Any]]:
    """Return every rank's list, in rank order. Collective.

    Raises:
        InputError: `own` is no list, or an entry does not survive JSON unchanged.
    """
    if not isinstance(own, list | tuple) or not all(_is_json_exact(thing) for thing in own):
        raise InputError(
            f"{label} gets objects that do not cross between ranks: {_describe_type(own)}",
            code="gathered-type-unsupported",
            why="ranks tell each other numbers and text, never a pickle",
            fix="give tensors, or a list, with one thing for each sample, of texts, numbers, lists "
            "and dictionaries by texts",
        )
    return [json.loads(text) for text in gather_texts(json.dumps(list(own)), comm, label)]


def _is_json_exact(value: Any) -> bool:
    """Return True if JSON preserves a value exactly."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json_exact(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_json_exact(thing) for thing in value)
    return value is None or isinstance(value, str | int | float)


def _describe_type(own: Any) -> str:
    inside = {type(thing).__name__ for thing in own} if isinstance(own, list | tuple) else set()
    of = f" of {', '.join(sorted(inside))}" if inside else ""
    return f"{type(own).__name__}{of}"


def _check_row_count(of: range, flat: Sequence[Tensor]) -> None:
    for tensor in flat:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != len(of):
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"of {len(of)} samples something of shape {given} was made, whose first dimension "
                "is not theirs",
                code="gathered-rows-wrong",
                fix="return tensors with one row for each sample",
            )


def _gather_leaf(
    number: int,
    own: Sequence[Tensor],
    every: Sequence[dict[str, Any]],
    known: dict[str, Any],
    comm: Communicator,
    label: str,
) -> Tensor:
    """Gather a tensor of the tree."""
    shapes = [[tuple(flat[number]) for flat in one["shapes"]] for one in every]
    wide = [max(sizes) for sizes in zip(*(s[1:] for of_rank in shapes for s in of_rank))]
    rows = max(sum(s[0] for s in of_rank) for of_rank in shapes)
    dtype = getattr(torch, known["dtypes"][number])
    mine = torch.full((rows, *wide), PADDING if dtype != torch.bool else 0, dtype=dtype)
    begin = 0
    for part in own:
        mine[begin : begin + len(part)] = _padded(part.detach().cpu(), wide)
        begin += len(part)
    raw = _gather_row(mine.reshape(-1).view(torch.uint8), comm, label)
    placed: dict[int, Tensor] = {}
    for one, of_rank in zip(every, raw):
        table = of_rank.contiguous().view(dtype).view(rows, *wide)
        begin = 0
        for start, stop in one["places"]:
            placed.setdefault(start, table[begin : begin + stop - start])
            begin += stop - start
    return torch.cat([placed[start] for start in sorted(placed)])


def _padded(rows: Tensor, wide: Sequence[int]) -> Tensor:
    missing = [want - have for have, want in zip(rows.shape[1:], wide)]
    if not any(missing):
        return rows
    value = 0 if rows.dtype == torch.bool else PADDING
    return F.pad(rows, [n for want in reversed(missing) for n in (0, want)], value=value)


def _gather_row(row: Tensor, comm: Communicator, label: str) -> Tensor:
    """Return a table [ranks, len(row)] on the host."""
    table = comm.exchanged(row.to(comm.device), label)
    return table.cpu()
