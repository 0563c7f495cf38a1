"""How a class did under one plan, and under all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpumix.engine.comm.communicator import CommunicationError
from gpumix.schema.errors import GpumixError
from helpers.training.reference import joined, tensor_errors
from zoo_of.training import EPSILON, RATE, NoPlan, Trained

LIMIT = 1e-4
CHAOS = 1e-3  # by which rounding moves what nobody can compare
LEAST_WEIGHT = RATE  # by which a step of AdamW moves an element
LEAST_GRADIENT = 1e-2  # of the root mean square of all gradients
CANCELLED = EPSILON  # of terms that add up to nothing, rounding leaves far less than this
# From good to bad: that of a class is its worst one's.
VERDICTS = (
    "exact", "no plan", "not deterministic", "refused", "refused without reason", "crashed",
    "deviates",
)  # fmt: skip


def distance(found: Trained, truth: Trained) -> tuple[float, str]:
    """The largest relative error of a loss, of a gradient of the first step or of a weight; and
    where."""
    errors = {"steps": 0.0 if len(found.losses) == len(truth.losses) else math.inf}
    for n, (own, true) in enumerate(zip(found.losses, truth.losses)):
        errors[f"loss {n + 1}"] = abs(own - true) / max(abs(true), 1e-3)
    gradients, true_gradients = joined([found.gradients]), joined([truth.gradients])
    total = sum(g.size for g in true_gradients.values())
    rms = math.sqrt(sum(float(np.sum(np.square(g))) for g in true_gradients.values()) / total)
    for name in true_gradients.keys() | gradients.keys():  # without a gradient: no change
        one = true_gradients.get(name, np.zeros(1, np.float32))
        gradients.setdefault(name, np.zeros_like(one))
        true_gradients.setdefault(name, np.zeros_like(gradients[name]))
    floors = {"gradient": max(LEAST_GRADIENT * rms, CANCELLED), "weight": LEAST_WEIGHT}
    weights = joined([found.weights]), joined([truth.weights])
    for kind, (own_of, true_of) in {
        "gradient": (gradients, true_gradients),
        "weight": weights,
    }.items():
        for values in (own_of, true_of):  # a parameter without elements is no rank's
            for name in [name for name, value in values.items() if not value.size]:
                del values[name]
        if own_of.keys() != true_of.keys():
            return math.inf, f"{kind}s of {sorted(own_of.keys() ^ true_of.keys())[:3]}"
        for name, error in tensor_errors(own_of, true_of, floor=floors[kind]).items():
            errors[f"{kind} {name}"] = error
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return (math.inf if math.isnan(errors[worst]) else errors[worst]), worst


def of_errors(errors: Sequence[tuple[int, BaseException, str]]) -> dict[str, Any]:
    """The verdict on ranks that ended with (steps done, error, last line of its traceback)."""
    # That a peer is gone is what the others see of a rank's own error.
    steps, error, last = min(errors, key=lambda one: isinstance(one[1], CommunicationError))
    told = {"why": str(error)[:600], "last": last}
    if isinstance(error, CommunicationError) or not isinstance(error, GpumixError):
        return {"verdict": "crashed", **told}
    if steps:
        return {"verdict": "crashed", "after_steps": steps, **told}
    return {"verdict": refusal(error), **told}


def refusal(error: GpumixError) -> str:
    """Whether a user can act on an error: it says more than a name, and a way out."""
    said = len(error.what.split()) >= 4 and len(error.fix.split()) >= 2
    return "refused" if said else "refused without reason"


def of_plan(made: Any) -> dict[str, Any]:
    """The verdict where there is no plan."""
    if isinstance(made, NoPlan):
        return {"verdict": "no plan", "why": made.why}
    if not isinstance(made, GpumixError):
        return {"verdict": "crashed", "why": f"{type(made).__name__}: {made}"[:600]}
    return {"verdict": refusal(made), "why": str(made)[:600]}


def excuse(plans: Iterable[dict[str, Any]], rounding: float) -> None:
    """Let plans not deviate that are hardly further from the truth than this is from itself in
    float64."""
    for own in plans:
        if own["verdict"] == "deviates" and own["error"] <= 3 * rounding:
            own["verdict"] = "exact" if rounding < CHAOS else "not deterministic"
            own["why"] = f"rounding moves the truth by {rounding:.1e}"


def status(plans: dict[str, dict[str, Any]]) -> str:
    """That of a class: the worst of its plans; that it has no stages, or that they are refused,
    counts only for plans of stages."""
    counted = [
        own["verdict"]
        for kind, own in plans.items()
        if kind != "C" or own["verdict"] not in ("no plan", "refused")
    ]
    return max(counted, key=VERDICTS.index) if counted else "exact"
