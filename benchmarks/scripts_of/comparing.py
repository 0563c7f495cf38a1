"""How far what a script reports is from what it reported before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

LIMIT = 1e-4
LEAST = 1e-3  # below which a difference is taken as a part of this
LEAST_WEIGHT = 1e-2  # by which a step moves an element: the learning rate


class Difference(NamedTuple):
    """Where two reports differ, and how far: by a relative error, or infinitely."""

    error: float
    where: str
    told: str


def differences(found: Any, truth: Any, where: str = "") -> Iterator[Difference]:
    """All, with those that rounding explains.

    Args:
        found, truth: numbers, arrays, texts, and lists and dictionaries of these.
    """
    if isinstance(truth, Mapping) and isinstance(found, Mapping):
        for name in sorted({*truth, *found}, key=str):
            place = f"{where}.{name}" if where else str(name)
            if name not in truth or name not in found:
                yield Difference(math.inf, place, "missing" if name in truth else "new")
            else:
                yield from differences(found[name], truth[name], place)
    elif isinstance(truth, list | tuple) and isinstance(found, list | tuple):
        if len(truth) != len(found):
            yield Difference(math.inf, where, f"{len(found)} instead of {len(truth)}")
        for n, (own, true) in enumerate(zip(found, truth)):
            yield from differences(own, true, f"{where}[{n}]")
    elif isinstance(truth, str | bool | None) or isinstance(found, str | bool | None):
        if found != truth:
            yield Difference(math.inf, where, f"{found!r} instead of {truth!r}"[:120])
    else:
        yield _of_numbers(found, truth, where)


def _of_numbers(found: Any, truth: Any, where: str) -> Difference:
    """The largest distance of two arrays' elements, as a part of the largest of these."""
    own, true = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    if own.shape != true.shape:
        return Difference(math.inf, where, f"shape {own.shape} instead of {true.shape}")
    nans = np.isnan(true)
    if (nans != np.isnan(own)).any() or nans.all():
        same = (nans == np.isnan(own)).all()
        return Difference(0.0 if same else math.inf, where, f"{found} instead of {truth}"[:120])
    same = (own == true) | nans  # infinities too
    distance = np.abs(own[~same] - true[~same]).max(initial=0.0)
    least = LEAST_WEIGHT if where.startswith("weights") else LEAST
    size = max(np.abs(true[np.isfinite(true)]).max(initial=0.0), least)
    told = f"{own} instead of {true}" if not true.ndim else f"largest distance {distance:.2e}"
    return Difference(float(distance / size), where, told)


def worst_of(found: Mapping[str, Any], truth: Mapping[str, Any]) -> list[Difference]:
    """From the largest on."""
    return sorted(differences(found, truth), key=lambda one: -one.error)
