"""Observations of a rehearsal, and the deviation of parts from the full batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpumix.engine.quantised.weight_formats import find_layer_dtypes
from gpumix.engine.rehearsal.samples import all_gather_values
from gpumix.engine.trial_steps import TrialSteps

PARTS, COLUMNS = 16, 61  # number of sums compared of a gradient
MIN_PART_ELEMENTS = 4096  # least number of elements in a part
MAX_COPIED_ELEMENTS = 2**20  # in float64 at a time, unless a part has more
# Relative deviation of losses, and of gradients, explained by rounding, by compute dtype.
TOLERANCE = {"fp32": (1e-4, 1e-3), "fp16": (1e-2, 5e-2), "bf16": (2e-2, 1e-1)}
PADDING_TOLERANCE = (3e-6, 3e-5)  # in fp32, for samples that differ in padding alone
# Further deviation of a parameter's gradient, in fp32, relative to the size of all gradients.
SMALLEST = 2e-5


@dataclass
class TrialLoss:
    """Loss of some samples, with candidate denominators and sums of the gradient.

    Attributes:
        sums: sums of this rank's part of the gradient; None without backward.
        counts: denominators by rule; NaN for missing rules.
        denominators: denominators of the loss's terms, from its graph.
        values: `denominators` without numbers of elements, except numbers determined by values.
        ignored: the label left out of the loss, if any.
    """

    sums: Tensor | None
    loss: float = math.nan
    counts: Sequence[float] = ()
    denominators: Sequence[float] = ()
    values: Sequence[float] = ()
    ignored: int | None = None
    changed: list[nn.Module] = field(default_factory=list)


def tolerance_of(engine: TrialSteps) -> tuple[float, float]:
    """Return the tolerances of losses and gradients, for the coarsest arithmetic of the plan and of
    the model's quantised layers."""
    workers, kind = engine.plan.workers, engine.device.type
    dtypes = {worker.compute_dtype for worker in workers} | find_layer_dtypes(engine.model)
    if any(worker.efficiency.tf32 for worker in workers):
        dtypes.add("fp16")
    if torch.is_autocast_enabled(kind):
        dtypes.add("bf16" if torch.get_autocast_dtype(kind) == torch.bfloat16 else "fp16")
    return max(TOLERANCE[dtype] for dtype in dtypes)


def is_trial_close(
    engine: TrialSteps, one: TrialLoss, other: TrialLoss, *, same_samples: bool = False
) -> bool:
    """Return True if two trials agree in loss and gradient. Collective.

    Args:
        same_samples: True if the trials differ in padding alone. Its effect is far below rounding
            of sums in another order, so small parts of a gradient are checked too.
    """
    of_loss, of_gradient = tolerance_of(engine)
    if same_samples and (of_loss, of_gradient) == TOLERANCE["fp32"]:
        of_loss, of_gradient = PADDING_TOLERANCE
    told = [0.0, 0.0]
    if one.sums is not None and other.sums is not None:
        told = [_square(one.sums - other.sums), _square(other.sums)]
    wrong, size = (sum(column) for column in zip(*all_gather_values(engine, told)))
    near = abs(one.loss - other.loss) <= of_loss * max(abs(other.loss), 1e-30)
    return near and math.sqrt(wrong / max(size, 1e-60)) <= of_gradient


def weights_of(whole: TrialLoss, parts: Sequence[TrialLoss], rule: int) -> list[float]:
    """Return the weight of each part's loss in the full loss."""
    total = whole.counts[rule]
    counts = counts_of(whole, parts, rule)
    return [count / total if total else math.nan for count in counts]


def counts_of(whole: TrialLoss, parts: Sequence[TrialLoss], rule: int) -> list[float]:
    """Return the denominators of the parts' losses. A part with nothing to count may divide by 1 at
    least: its loss is 0, and it counts nothing in the full batch."""
    counts = [part.counts[rule] for part in parts]
    filled = [count if part.loss else 0.0 for count, part in zip(counts, parts)]
    total = whole.counts[rule]
    return filled if math.isclose(sum(filled), total, rel_tol=1e-6) else counts


def gradient_error(
    whole: TrialLoss, parts: Sequence[TrialLoss], weights: Sequence[float]
) -> tuple[float, float]:
    """Return the squared error of the parts' gradients, and their squared size, for this rank's
    part; zeros without gradients."""
    if whole.sums is None:
        return 0.0, 0.0
    added = _weight_sums(parts, weights)
    difference = whole.sums - sum(added)
    return _square(difference), max(_square(one) for one in (whole.sums, *added))


def worst_error(
    whole: TrialLoss,
    parts: Sequence[TrialLoss],
    weights: Sequence[float],
    of_own: float,
    smallest: float,
) -> float:
    """Return the largest gradient error of a parameter on this rank, with 1 for the amount that
    rounding explains: `of_own` times the gradient's size, plus `smallest`. A term of few
    parameters, such as balancing of experts, does not show in the gradient of all."""
    if whole.sums is None or not len(whole.sums):
        return 0.0
    added = _weight_sums(parts, weights)
    wrong = (whole.sums - sum(added)).norm(dim=1)
    size = torch.stack([one.norm(dim=1) for one in (whole.sums, *added)]).amax(0)
    return float((wrong / (of_own * size + max(smallest, 1e-30))).max())


def _weight_sums(parts: Sequence[TrialLoss], weights: Sequence[float]) -> list[Tensor]:
    return [p.sums * w for p, w in zip(parts, weights) if w and p.sums is not None]


def _square(sums: Tensor) -> float:
    return float(sums.square().sum())


def sum_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return sums of parts and of columns of gradients, float64 on the host, [parameters, sums].
    Sums add up as gradients do. A missing gradient adds zeros: other samples may use the parameter.
    Rows of a device are copied at once, because a copy waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            row = parameter.new_zeros(PARTS + COLUMNS, dtype=torch.float64)
            if parameter.grad is not None:
                _add_sums(parameter.grad, row)
            by_device.setdefault(parameter.device, []).append(row)
    found = [torch.stack(rows).cpu() for rows in by_device.values()]
    none = torch.zeros(0, PARTS + COLUMNS, dtype=torch.float64)
    return found[0] if len(found) == 1 else torch.cat([none, *found])


def _add_sums(gradient: Tensor, row: Tensor) -> None:
    """Add the sums of a gradient to `row`, a few parts at a time: summing in another dtype copies
    the summands."""
    rows = math.ceil(max(MIN_PART_ELEMENTS, gradient.numel() / PARTS) / COLUMNS)
    length = rows * COLUMNS
    parts = gradient.numel() // length
    at_once = max(1, MAX_COPIED_ELEMENTS // length)
    for first in range(0, parts, at_once):
        some = gradient[first * length : min(parts, first + at_once) * length]
        sums = some.double().view(-1, rows, COLUMNS).sum(1)
        row[first : first + len(sums)] = sums.sum(1)
        row[PARTS:] += sums.sum(0)
    rest = gradient[parts * length :].double()
    if len(rest):
        row[parts] = rest.sum()
        inside = len(rest) // COLUMNS * COLUMNS
        row[PARTS:] += rest[:inside].view(-1, COLUMNS).sum(0)
        row[PARTS : PARTS + len(rest) - inside] += rest[inside:]


def has_unequal_denominators(trials: Sequence[TrialLoss]) -> bool:
    """Return True if a loss is a sum of terms with denominators that are not in proportion. For
    some samples a term may be missing. Terms with equal denominators may be more for some samples
    than for others."""
    ratios = [
        [of_term / t.denominators[0] for of_term in t.denominators]
        for t in trials
        if t.denominators and all(t.denominators)
    ]
    every = [one for own in ratios for one in own]
    are_equal = all(math.isclose(one, 1, rel_tol=1e-5) for one in every)
    return not are_equal and all(map(math.isfinite, every)) and not _are_alike(ratios)


def _are_alike(rows: Sequence[Sequence[float]]) -> bool:
    return all(
        len(one) == len(rows[0])
        and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(one, rows[0]))
        for one in rows
    )


def is_close_to_any(count: float, denominators: Sequence[float]) -> bool:
    return any(math.isclose(count, one, rel_tol=1e-6) for one in denominators)


def is_in_proportion(trials: Sequence[TrialLoss], rule: int) -> bool:
    """Return True if losses' denominators are in proportion to the counts of a rule."""
    return _are_alike([[v / t.counts[rule] for v in t.values] for t in trials if t.counts[rule]])
