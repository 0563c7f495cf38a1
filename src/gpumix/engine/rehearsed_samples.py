"""The few samples of a batch that a rehearsal computes: unlike ones, which tell rules apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.ragged import take
from gpumix.engine.reduction import Reduces
from gpumix.engine.samples import IGNORED_LABEL, samples_in
from gpumix.engine.trials import Trials
from gpumix.spec.plan import Plan

SAMPLES = 3  # that are computed at once, where a micro-batch has as many
MORE_SAMPLES = 8  # without gradients, where the loss of so few is nothing


@dataclass(frozen=True)
class Place:
    """Where the rehearsal runs: on all ranks that compute one micro-batch.

    Attributes:
        number: of the micro-batch among this rank's own; None: it has no samples of it.
        size: how many samples it has.
        batches: how many micro-batches its rank computes in a step.
        most_batches: the same of the rank with the most.
    """

    number: int | None
    size: int
    batches: int = 1
    most_batches: int = 1


def choose(
    engine: Trials,
    batch: Any,
    rows: Sequence[range],
    objective: Reduces,
    *,
    uncut: bool = False,
) -> Place | None:
    """The micro-batch with samples that tell rules apart, with most samples, with most labels; None
    if the batch is not cut, unless an `uncut` one is wanted too. Collective."""
    plan, rank = engine.plan, engine.comm.rank
    first = plan.team_of(rank, plan.stages_of(rank)[0])[0]
    numbers = list(engine.places[0].batches) if engine.places else [first]
    known = [
        (int(_tells_apart(part, objective)), size, _labels_in(part, objective), -number)
        for size, part, number in zip(
            _sizes(engine, rows), _candidates(engine, batch, rows), numbers
        )
    ]
    largest = max(known, default=(0, 0, 0, 0))
    cut = engine.tells_losses * sum(bool(of) for of in rows)
    table = exchanged(engine, [*map(float, largest), float(cut)])
    if not uncut and sum(row[-1] for row in table) <= 1:
        return None
    found = max(tuple(map(int, row[:-1])) for row in table)
    own = next((n for n, one in enumerate(known) if one == found), None)
    batches = [int(row[-1]) for row in table]
    there = (n for n, row in zip(batches, table) if tuple(map(int, row[:-1])) == found)
    return Place(own, found[1], min(filter(None, there), default=1), max(batches))


def own_samples(
    engine: Trials,
    batch: Any,
    rows: Sequence[range],
    place: Place,
    objective: Reduces,
    *,
    most: int = SAMPLES,
) -> Any:
    """The samples that this rank rehearses with, if any, `most` at most."""
    if place.number is None:
        return None
    parts = _candidates(engine, batch, rows)
    return _unlike(parts[place.number if engine.places else 0], objective, most)


def _candidates(engine: Trials, batch: Any, rows: Sequence[range]) -> list[Any]:
    """Samples to choose from: all of a rank; in stages, whose ranks must choose the same ones, for
    each micro-batch those of all that take the same way through the stages."""
    if not any(map(len, rows)):
        return []
    if not engine.places:
        return [batch]
    ways = _ways_through(engine.plan)
    numbers = engine.places[0].batches
    own: dict[tuple[int, ...], list[int]] = {}
    for number, of, end in zip(numbers, rows, accumulate(map(len, rows))):
        own.setdefault(ways[number], []).extend(range(end - len(of), end))
    parts = {way: take(batch, places) for way, places in own.items()}
    return [parts[ways[number]] for number, _ in zip(numbers, rows)]


def _ways_through(plan: Plan) -> dict[int, tuple[int, ...]]:
    """By number of a micro-batch, the first rank that computes it in each stage."""
    found: dict[int, list[int]] = {}
    for stage in range(len(plan.stages)):
        for team in plan.teams_of(stage):
            for number in plan.numbers_of(team[0], stage):
                found.setdefault(number, []).append(team[0])
    return {number: tuple(ranks) for number, ranks in found.items()}


def _sizes(engine: Trials, rows: Sequence[range]) -> list[int]:
    """How many samples of each candidate are computed at once."""
    sizes = list(map(len, rows))
    return sizes if engine.places else [max(sizes, default=0)]


def _labels_in(batch: Any, objective: Reduces) -> int:
    own = next(iter(objective.labels_of(batch).values()), None)
    return 0 if own is None else int((own != IGNORED_LABEL).sum())


def _unlike(batch: Any, objective: Reduces, most: int) -> Any:
    """A few samples: with few labels, of which rules count unlike parts, with many. Where there is
    a single one with labels, it twice."""
    counted = objective.counts_by_row(batch)
    order = _with_labels(counted, samples_in(batch))
    if counted is not None:
        order.sort(key=counted[0].tolist().__getitem__)
    order = [order[0], order[-1], *order[1:-1]]  # of a single one: it twice
    row, difference = _least_proportional(counted, order)
    if difference:
        order = [order[0], row, *(other for other in order[1:] if other != row)]
    return take(batch, order[:most])


def _tells_apart(batch: Any, objective: Reduces) -> bool:
    """Whether some sample would tell rules apart."""
    counted = objective.counts_by_row(batch)
    _, difference = _least_proportional(counted, _with_labels(counted, samples_in(batch)))
    return difference > 0


def _with_labels(counted: Tensor | None, samples: int) -> list[int]:
    """The samples in which all rules, [rules, samples], count something, else some, else all
    samples: the loss of one without labels is nothing by any rule."""
    if counted is not None:
        for has in ((counted > 0).all(0), (counted > 0).any(0)):
            if has.any():
                return [row for row, own in enumerate(has.tolist()) if own]
    return list(range(samples))


def _least_proportional(counted: Tensor | None, rows: Sequence[int]) -> tuple[int, float]:
    """Of some samples, the one whose counts by rules, [rules, samples], are least proportional to
    those of the first one, and how far they are from that."""
    if counted is None or not counted.numel():
        return rows[0], 0.0
    counts = counted[:, list(rows)].double()
    ratios = counts / counts.norm(dim=0).clamp(min=1e-30)
    difference = (ratios - ratios[:, :1]).abs().sum(0)
    place = int(difference.argmax())
    far = float(difference[place])
    return (rows[place], far) if far > 1e-9 else (rows[0], 0.0)


def exchanged(engine: Trials, told: Sequence[float]) -> list[list[float]]:
    """What all ranks told."""
    row = torch.tensor(told, dtype=torch.float64, device=engine.device)
    table = engine.comm.exchanged(row, "rehearsal of the first step")
    return table.tolist()  # type: ignore[no-any-return]
