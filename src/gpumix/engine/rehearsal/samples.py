"""Selection of a batch's samples for a rehearsal: a few unlike ones, to tell rules apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.batch.batch_split import (
    IGNORED_LABEL,
    MASK,
    TOKENS,
    count_samples,
    fill_padding_with_tokens,
    select_samples,
)
from gpumix.engine.loss.reduction import ObjectiveWithRule
from gpumix.engine.trial_steps import TrialSteps
from gpumix.schema.plan.plan import Plan

SAMPLES = 3  # computed at once, if a micro-batch has as many
MORE_SAMPLES = 8  # without gradients, if the loss of fewer samples is zero


@dataclass(frozen=True)
class RehearsalMicroBatch:
    """Micro-batch where the rehearsal runs, on all ranks computing it.

    Attributes:
        number: number among this rank's own micro-batches; None: no samples on this rank.
        size: number of samples.
        batches: number of micro-batches in a step of the rank computing it.
        most_batches: number of micro-batches in a step of the rank with the most.
    """

    number: int | None
    size: int
    batches: int = 1
    most_batches: int = 1


def choose_micro_batch(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    objective: ObjectiveWithRule,
    *,
    uncut: bool = False,
) -> RehearsalMicroBatch | None:
    """Choose the micro-batch with samples with and without padding, that tell rules apart, most
    samples, and most labels. Return None if the batch is not cut, unless `uncut` is set.
    Collective."""
    plan, rank = engine.plan, engine.comm.rank
    first = plan.get_tp_group(rank, plan.stages_of(rank)[0])[0]
    numbers = list(engine.places[0].batches) if engine.places else [first]
    known = [
        (
            *_find_merits(part, objective),
            size,
            _labels_in(part, objective),
            -number,
        )
        for size, part, number in zip(
            _sizes(engine, rows), _candidates(engine, batch, rows), numbers
        )
    ]
    largest = max(known, default=(0, 0, 0, 0, 0))
    cut = engine.tells_losses * sum(bool(of) for of in rows)
    table = all_gather_values(engine, [*map(float, largest), float(cut)])
    if not uncut and sum(row[-1] for row in table) <= 1:
        return None
    found = max(tuple(map(int, row[:-1])) for row in table)
    own = next((n for n, one in enumerate(known) if one == found), None)
    batches = [int(row[-1]) for row in table]
    there = (n for n, row in zip(batches, table) if tuple(map(int, row[:-1])) == found)
    return RehearsalMicroBatch(own, found[2], min(filter(None, there), default=1), max(batches))


def select_own_samples(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    place: RehearsalMicroBatch,
    objective: ObjectiveWithRule,
    *,
    most: int = SAMPLES,
) -> Any:
    """Return this rank's samples for the rehearsal, at most `most`; None without any."""
    if place.number is None:
        return None
    parts = _candidates(engine, batch, rows)
    return _select_unlike_samples(parts[place.number if engine.places else 0], objective, most)


def _candidates(engine: TrialSteps, batch: Any, rows: Sequence[range]) -> list[Any]:
    """Return the samples to choose from: all of a rank. With several stages, whose ranks choose
    alike, each micro-batch has all samples on the same way through the stages."""
    if not any(map(len, rows)):
        return []
    if not engine.places:
        return [batch]
    ways = _map_rank_paths(engine.plan)
    numbers = engine.places[0].batches
    own: dict[tuple[int, ...], list[int]] = {}
    for number, of, end in zip(numbers, rows, accumulate(map(len, rows))):
        own.setdefault(ways[number], []).extend(range(end - len(of), end))
    parts = {way: select_samples(batch, places) for way, places in own.items()}
    return [parts[ways[number]] for number, _ in zip(numbers, rows)]


def _map_rank_paths(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Map each micro-batch's number to the first rank computing it in each stage."""
    found: dict[int, list[int]] = {}
    for stage in range(len(plan.stages)):
        for tp_group in plan.list_tp_groups(stage):
            for number in plan.numbers_of(tp_group[0], stage):
                found.setdefault(number, []).append(tp_group[0])
    return {number: tuple(ranks) for number, ranks in found.items()}


def _sizes(engine: TrialSteps, rows: Sequence[range]) -> list[int]:
    """Return the number of samples computed at once, for each candidate."""
    sizes = list(map(len, rows))
    return sizes if engine.places else [max(sizes, default=0)]


def _labels_in(batch: Any, objective: ObjectiveWithRule) -> int:
    own = next(iter(objective.labels_of(batch).values()), None)
    return 0 if own is None else int((own != IGNORED_LABEL).sum())


def _select_unlike_samples(batch: Any, objective: ObjectiveWithRule, most: int) -> Any:
    """Select a few samples: with few labels, with unlike counts by rules, and with many labels. A
    single sample with labels is taken twice. If samples are padded, the first is not, or no longer,
    and others are: alone, a model may compute it without a mask."""
    counted = objective.counts_by_row(batch)
    order = _find_labeled_samples(counted, count_samples(batch))
    if counted is not None:
        order.sort(key=counted[0].tolist().__getitem__)
    order = [order[0], order[-1], *order[1:-1]]  # a single sample: twice
    unpadded = _find_unpadded(batch)
    if unpadded is not None:
        without = [row for row in order if unpadded[row]]
        order = [*without[:1], *(row for row in order if not unpadded[row]), *without[1:]]
    row, difference = _least_proportional(counted, order)
    if difference:
        order = [order[0], row, *(other for other in order[1:] if other != row)]
    return _fill_first(select_samples(batch, order[:most]))


def _fill_first(batch: Any) -> Any:
    """Return samples with tokens in place of the first one's padding, if all are padded."""
    filled = fill_padding_with_tokens(batch)
    if filled is batch or count_samples(batch) < 2:
        return batch
    tokens, mask = batch[TOKENS].clone(), batch[MASK].clone()
    padding = mask == 0
    if not padding.any(1).all() or torch.equal(
        tokens[0][padding[0]], filled[TOKENS][0][padding[0]]
    ):
        return batch
    tokens[0], mask[0] = filled[TOKENS][0], 1
    return {**batch, TOKENS: tokens, MASK: mask}


def _can_distinguish_rules(batch: Any, objective: ObjectiveWithRule) -> bool:
    """Return True if some sample would tell rules apart."""
    counted = objective.counts_by_row(batch)
    _, difference = _least_proportional(
        counted, _find_labeled_samples(counted, count_samples(batch))
    )
    return difference > 0


def _find_merits(batch: Any, objective: ObjectiveWithRule) -> tuple[int, int]:
    """Return what samples show, most important first: after a rehearsal, which rule holds."""
    padding = int(_find_unpadded(batch) is not None)
    rules = int(_can_distinguish_rules(batch, objective))
    return (rules, padding) if objective.alternatives else (padding, rules)


def _find_unpadded(batch: Any) -> Tensor | None:
    """Return which samples have no padding, if some have and others have not."""
    mask = batch.get(MASK) if isinstance(batch, dict) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    unpadded = mask.bool().all(1)
    return unpadded if unpadded.any() and not unpadded.all() else None


def _find_labeled_samples(counted: Tensor | None, samples: int) -> list[int]:
    """Return the samples with counts by all rules, [rules, samples], else by some, else all. The
    loss of a sample without labels is zero by any rule."""
    if counted is not None:
        for has in ((counted > 0).all(0), (counted > 0).any(0)):
            if has.any():
                return [row for row, own in enumerate(has.tolist()) if own]
    return list(range(samples))


def _least_proportional(counted: Tensor | None, rows: Sequence[int]) -> tuple[int, float]:
    """Return the sample whose counts by rules, [rules, samples], are least proportional to the
    first sample's counts, and the deviation."""
    if counted is None or not counted.numel() or not rows:
        return next(iter(rows), 0), 0.0
    counts = counted[:, list(rows)].double()
    ratios = counts / counts.norm(dim=0).clamp(min=1e-30)
    difference = (ratios - ratios[:, :1]).abs().sum(0)
    place = int(difference.argmax())
    far = float(difference[place])
    return (rows[place], far) if far > 1e-9 else (rows[0], 0.0)


def all_gather_values(engine: TrialSteps, told: Sequence[float]) -> list[list[float]]:
    """Return the values given by all ranks. Collective."""
    row = torch.tensor(told, dtype=torch.float64, device=engine.device)
    table = engine.comm.exchanged(row, "rehearsal of the first step")
    return table.tolist()  # type: ignore[no-any-return]


def is_true_on_any_rank(engine: TrialSteps, own: bool) -> bool:
    """Return whether `own` is true on any rank. Collective."""
    return any(told for (told,) in all_gather_values(engine, [float(own)]))
