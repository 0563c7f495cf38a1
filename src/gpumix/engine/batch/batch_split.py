"""Samples of a rank: number, cutting, and a check that ranks sharing samples agree.

Ranks of several stages, and of a tensor-parallel group, read the same part of a batch. A loop
feeding each rank something else would train on nonsense without an error; so ranks once compare a
digest of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.engine.batch.ragged_batch import RaggedRows, SampleEntries
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.engine.model.forward_coroutine import Randomness
from gpumix.engine.model.kernel_selection import to_channels_last
from gpumix.engine.model.rng import OtherGenerators
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan

Loss = tuple[torch.Tensor, torch.Tensor]
Objective = Callable[[nn.Module, Any], Loss]
"""Returns (summed loss, count) of a micro-batch."""

DIGEST_MASK = 2**40 - 1  # sums over thousands of ranks are exact in float64

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's and transformers' ignore_index
LABELS, MASK, TOKENS = "labels", "attention_mask", "input_ids"
PER_TOKEN = frozenset({TOKENS, LABELS, MASK, "position_ids", "token_type_ids"})


ROW_TYPES = (torch.Tensor, RaggedRows, SampleEntries)


def has_rows(value: Any) -> bool:
    """Return True if a value has rows per sample."""
    return isinstance(value, ROW_TYPES)


def has_samples(value: Any) -> bool:
    """Return True if a value has rows per sample, or an entry per sample and is no tensor."""
    if isinstance(value, list):
        return bool(value) and not any(isinstance(v, torch.Tensor | list | dict) for v in value)
    return isinstance(value, (*ROW_TYPES, np.ndarray))


def select_samples(batch: Any, samples: slice | Sequence[int]) -> Any:
    """Return some samples of a batch, a pytree."""
    which = samples if isinstance(samples, slice) else list(samples)
    return tree_map(lambda t: t[which] if has_rows(t) else t, batch, is_leaf=has_rows)


@dataclass(frozen=True)
class MicroBatchTask:
    """Micro-batch to compute: its loss function, random numbers, tensor shapes, and padded tokens
    per sample (`width`; None without tokens)."""

    compute_loss: Callable[[], Loss]
    randomness: Randomness
    looks: tuple[torch.Size, ...]
    width: int | None = None


def repeat_sample(batch: Any, times: int) -> Any:
    """Return `times` copies of the single sample of `batch`."""

    def several(value: Any) -> Any:
        if isinstance(value, RaggedRows | SampleEntries):
            return value.repeated(times)
        return value.expand(times, *value.shape[1:]) if torch.is_tensor(value) else value

    return tree_map(several, batch, is_leaf=has_rows)


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its tensors.

    Raises:
        InputError: tensors disagree about it, a tensor has no dimensions, or values should be
            tensors.
    """
    leaves = tree_leaves(batch, is_leaf=has_samples)
    uncut = next((leaf for leaf in leaves if isinstance(leaf, list | np.ndarray)), None)
    if uncut is not None:
        raise InputError(
            f"a batch holds a {type(uncut).__name__} of values, which cannot be cut into "
            "micro-batches",
            code="batch-not-divisible",
            fix="make it a tensor whose first dimension is the samples",
        )
    shapes = [_shape(t) for t in leaves if isinstance(t, ROW_TYPES)]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise InputError(
            f"the tensors of a batch must agree in their first dimension, these have {shapes}",
            code="batch-dimensions-differ",
            fix="make the first dimension of every tensor the samples",
        )
    return shapes[0][0] if shapes else 0


def _shape(value: torch.Tensor | RaggedRows | SampleEntries) -> tuple[int, ...]:
    """Return the shape of a value's tensor, as if each sample had one row."""
    if isinstance(value, SampleEntries):
        return (len(value),)
    if isinstance(value, RaggedRows):
        return (len(value), *value.tensor.shape[1:])
    return tuple(value.shape)


def find_padding_starts(batch: Any, rows: Sequence[range]) -> list[int | None]:
    """Return each micro-batch's first column of pure padding; None if padding is unknown. Padding
    is hidden by a mask on the host at the right of all samples, with labels that do not count; all
    further entries of the batch must be known to be per token."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if mask is None or not PER_TOKEN.issuperset(batch) or mask.device.type != "cpu":
        return [None] * len(rows)
    if any(value.shape != mask.shape or value.dim() != 2 for value in batch.values()):
        return [None] * len(rows)
    used = mask != 0
    if LABELS in batch:
        used = used | (batch[LABELS] != IGNORED_LABEL)
    columns = torch.arange(1, mask.shape[1] + 1)
    last = (used * columns).amax(1) if mask.numel() else used.new_zeros(len(used), dtype=int)
    found, begin = [], 0
    for of_one in rows:
        found.append(max([1, *last[begin : begin + len(of_one)].tolist()]))
        begin += len(of_one)
    return found


def add_label_before_padding(batch: Any) -> Any:
    """Return a batch with a known label of each sample also at its last place before padding, the
    place next to padding."""
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or mask is None or labels.shape != mask.shape:
        return batch
    labels = labels.clone()
    for row, used in zip(labels, mask != 0):
        known, last = row[row != IGNORED_LABEL], used.nonzero()
        if len(known) and len(last):
            row[last[-1]] = known[0]
    return {**batch, LABELS: labels}


def fill_padding_with_tokens(batch: Any) -> Any:
    """Return a batch with a word of each sample in place of padding hidden by the mask. The
    embedding of padding begins as zeros, so its neighbors see no difference before the first step;
    later they do, if the embedding is the head's weight too."""
    ids = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if ids is None or mask is None or ids.shape != mask.shape or ids.dim() != 2:
        return batch
    ids = ids.clone()
    for row, used in zip(ids, (mask != 0).cpu()):
        own = row[used.to(row.device)].tolist()
        # Neither a mark of beginning or end, nor a placeholder of a picture.
        word = next((one for one in own[1:-1] if own.count(one) == 1), None)
        if word is not None:
            row[~used.to(row.device)] = word
    return {**batch, TOKENS: ids}


def iterate_micro_batches(
    batch: Any, rows: Sequence[range], widths: Sequence[int | None]
) -> Iterator[Any]:
    """Yield the parts of a batch, one per range of rows, without padding columns.

    A model may write into a part; the backward of another part does not see it.
    """
    begin = 0
    for of_one, width in zip(rows, widths, strict=True):
        own = slice(begin, begin + len(of_one))
        part = tree_map(_separate_version_counter, select_samples(batch, own), is_leaf=has_rows)
        if width is not None:
            part = {key: value[:, :width].contiguous() for key, value in part.items()}
        yield part
        begin += len(of_one)


def copy_batch(batch: Any) -> Any:
    """Copy a batch for a model with writes into inputs, such as labels, before training."""
    return tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
        batch,
        is_leaf=has_rows,
    )


def _separate_version_counter(value: Any) -> Any:
    """Return a view of the same memory with a separate version counter."""
    return value.data if isinstance(value, torch.Tensor) and not value.requires_grad else value


@dataclass(frozen=True)
class BatchCutter:
    """Cut of a rank's batches into micro-batches on its device.

    Attributes:
        dtype: of floating tensors.
        channels_last: whether images get the layout that tensor cores prefer.
        seed: of the run.
        generators, others: see `Randomness`.
        copies: clock of the waits for copies to the device.
    """

    model: nn.Module
    rank: int
    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    seed: int
    generators: Sequence[torch.Generator]
    others: OtherGenerators
    copies: WaitClock

    def cut(
        self, batch: Any, rows: Sequence[range], objective: Objective, step: int, *, trims: bool
    ) -> list[MicroBatchTask]:
        """Cut a batch into micro-batches, whose samples are `rows` of the global batch.

        Args:
            objective: returns (summed loss, count) of a micro-batch.
            step: number of the step, for random numbers.
            trims: whether padding columns are cut off.

        Raises:
            InputError: the number of samples is not that of `rows`.
        """
        if (given := count_samples(batch)) != (wanted := sum(map(len, rows))):
            raise InputError(
                f"rank {self.rank} was given {given} samples, the plan gives it {wanted}",
                code="samples-not-as-planned",
                fix="feed it with gpumix.Loader(dataset, plan, rank), or cut batches as "
                "plan.rows_of(rank) says",
            )
        widths: list[int | None] = [None] * len(rows)
        if trims:  # asks the host, before any copy to the device
            widths = find_padding_starts(batch, rows)
        if any(map(self._is_away, tree_leaves(batch))):
            with self.copies:
                batch = tree_map(self._to_device, batch)
        return [
            MicroBatchTask(
                partial(objective, self.model, part),
                Randomness(self.seed, step, of_one.start, self.generators, self.others),
                tuple(t.shape for t in tree_leaves(part) if torch.is_tensor(t)),
                get_padded_length(part),
            )
            for of_one, part in zip(rows, iterate_micro_batches(batch, rows, widths))
        ]

    def _is_away(self, value: Any) -> bool:
        """Return whether a value is not yet as the model takes it."""
        if not isinstance(value, torch.Tensor):
            return False
        floating = value.is_floating_point()
        as_taken = value.device == self.device and not (floating and self.channels_last)
        return not (as_taken and (value.dtype == self.dtype or not floating))

    def _to_device(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.dtype if value.is_floating_point() else value.dtype
        moved = value.to(self.device, dtype, non_blocking=True)
        return to_channels_last(moved) if self.channels_last else moved


def get_padded_length(part: Any) -> int | None:
    """Return the padded number of tokens per sample of a batch; None without tokens."""
    tokens = part.get("input_ids") if isinstance(part, Mapping) else None
    return tokens.shape[1] if torch.is_tensor(tokens) and tokens.dim() == 2 else None


def digest_samples(batch: Any, rows: Sequence[range]) -> int:
    """Return a digest of a rank's samples, `rows` of the global batch. The sum over ranks is the
    same for any split of the samples and any padding."""
    found, widths = 0, find_padding_starts(batch, rows)
    for of_one, part in zip(rows, iterate_micro_batches(batch, rows, widths)):
        own = [_number(leaf) for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)]
        numbers = (number * (of_one.start + 1) * (2 * n + 1) for n, number in enumerate(own))
        found = (found + sum(numbers)) & DIGEST_MASK
    return found


def _number(tensor: torch.Tensor) -> int:
    """Return a number that depends on the values, and not on the device."""
    whole = tensor.float().view(torch.int32) if tensor.is_floating_point() else tensor
    flat = whole.reshape(-1).to(torch.int64)
    places = torch.arange(1, 2 * flat.numel() + 1, 2, device=flat.device)
    return int((flat * places).sum().item()) & DIGEST_MASK


def compare_samples(comm: Communicator, plan: Plan, batch: Any, rows: Sequence[range]) -> None:
    """Raise an InputError unless ranks sharing samples agree. Collective. `batch` and `rows` are
    this rank's."""
    told = torch.tensor([digest_samples(batch, rows)], device=comm.device)
    table = comm.exchanged(told, "comparison of samples")
    refuse_different_samples(plan, table[:, 0].tolist())


def refuse_different_samples(plan: Plan, digests: Sequence[int]) -> None:
    """Raise an InputError if ranks computing the same samples were given different ones, by the
    digest of each rank."""
    why = _unlike(plan, digests)
    if why:
        raise InputError(
            "ranks that compute the same samples were given different ones",
            code="samples-differ-in-group",
            why=why,
            fix="feed each with gpumix.Loader(dataset, engine.plan, rank), or cut batches as "
            "engine.plan.rows_of(rank) says",
        )


def _unlike(plan: Plan, digests: Sequence[int]) -> str:
    """Name the ranks that were given wrong samples, in words; empty if none."""
    sums = []
    for number in range(len(plan.stages)):
        tp_groups = plan.list_tp_groups(number)
        for tp_group in tp_groups:
            if len({digests[rank] for rank in tp_group}) > 1:
                ranks = ", ".join(map(str, tp_group))
                return f"ranks {ranks}, a tensor-parallel group, have different ones"
        sums.append(sum(digests[tp_group[0]] for tp_group in tp_groups) & DIGEST_MASK)
    other = next((number for number, one in enumerate(sums) if one != sums[0]), None)
    return "" if other is None else f"stage {other + 1} has other ones than stage 1"
