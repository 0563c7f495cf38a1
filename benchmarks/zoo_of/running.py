"""Tries one class in processes of its own, which leave nothing behind.

A class has a process group: a process that finds data and truth, then the ranks of each plan. All
are forked from the caller, which has imported what they need.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpumix.schema.plan.plan import Plan
from zoo_of import judging
from zoo_of.classes import Entry, NotBuilt, look
from zoo_of.forking import (
    fork,
    free_port,
    kill_group,
    last_line,
    launched,
    packed,
    result_of,
    wait_for,
)
from zoo_of.small import SIZES
from zoo_of.training import Failed, Trained, plans_of, train

LIMIT_S = 480.0  # for a class
RANKS_S = 120.0  # for one plan of it
REPEATS = 1e-5  # relative, of two runs in one process
SEEDS = 0, 1234
OTHER_DATA = 2
STIRRED = 1e-7, -1e-7, 2e-7, -2e-7  # roundings of fp32, relative


def try_class(number: int, entry: Entry, kinds: str) -> dict[str, Any]:
    """What became of a class, as JSON has it: `status`, and the verdict on each of its `plans`."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as name:
        folder = Path(name)
        leader = fork(
            lambda: _class(number, entry, kinds, folder),
            folder / "class",
            lead=True,
            limit_s=2 * LIMIT_S,
        )
        wait_for([leader], LIMIT_S)
        kill_group(leader)
        return result_of(folder / "class") or {"status": "crashed", "why": "no end in time"}


def _class(number: int, entry: Entry, kinds: str, folder: Path) -> dict[str, Any]:
    with suppress(Exception), torch.device("meta"):
        entry.make(SIZES[0])  # imports for all that are forked from here
    gc.freeze()  # what is there is never collected: children would copy its pages
    pid = fork(lambda: _prepared(number, entry, kinds), folder / "truth")
    wait_for([pid], LIMIT_S)
    prepared = result_of(folder / "truth")
    if prepared is None:
        return {"status": "not built", "why": "no end in time, or the process died"}
    if "status" in prepared:  # there is no truth
        return dict(prepared)
    plans: dict[str, dict[str, Any]] = {}
    for kind, made in prepared["plans"].items():
        if isinstance(made, str):
            plans[kind] = _by_plan(entry, prepared, made, folder / kind)
        else:
            plans[kind] = judging.of_plan(made)
    if any(one["verdict"] == "deviates" for one in plans.values()):
        pid = fork(lambda: _rounding(entry, prepared), folder / "rounding")
        wait_for([pid], LIMIT_S)
        rounding = result_of(folder / "rounding")
        if isinstance(rounding, float):
            judging.excuse(plans.values(), rounding)
        for kind, one in plans.items():
            if one["verdict"] == "deviates" and one["error"] < judging.CHAOS:
                plans[kind] = _once_more(entry, prepared, kind, one, folder)
    status = judging.status(plans)
    worst = next((p for p in plans.values() if p["verdict"] == status), {})
    why = str(worst.get("why", worst.get("where", "")))
    return {"status": status, "why": why, "plans": plans}


def _prepared(number: int, entry: Entry, kinds: str) -> dict[str, Any]:
    """Data, truth and plans of a class, or its `status` where there is no truth."""
    try:
        found = look(entry)
    except NotBuilt as error:
        return {"status": "not built", "why": str(error)}
    try:
        truth, again = (train(entry, found, seed=seed) for seed in SEEDS)
    except Failed as error:
        why = f"under the stock Trainer: {error.__cause__!r}"[:300]
        return {"status": "not built", "why": why}
    error, where = judging.distance(again, truth)
    if error > REPEATS:
        return {"status": "not deterministic", "why": f"{where} differs by {error:.1e}"}
    plans = plans_of(entry, found, kinds, number)
    return {"found": found, "truth": truth, "plans": plans}


def _once_more(
    entry: Entry, prepared: dict[str, Any], kind: str, found: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """The verdict on a plan that deviated a little, with other data: a value that came to the other
    side of a kink does so once, a wrong step is wrong with any."""
    path = folder / f"{kind}-again"
    pid = fork(lambda: train(entry, prepared["found"], data=OTHER_DATA), path)
    wait_for([pid], LIMIT_S)
    truth = result_of(path)
    if not isinstance(truth, Trained):
        return found
    other = {**prepared, "truth": truth, "data": OTHER_DATA}
    again = _by_plan(entry, other, prepared["plans"][kind], path)
    if again["verdict"] == "exact":
        return {**again, "why": f"with other data {found['where']}"}
    return found


def _rounding(entry: Entry, prepared: dict[str, Any]) -> float:
    """How far the truth is from itself in float64, and from those of weights that are rounded
    otherwise: near a kink, as of ReLU, it is chance which side a value comes to."""
    found, truth = prepared["found"], prepared["truth"]
    others = [
        train(entry, found, dtype=torch.float64),
        *(train(entry, found, stir=stir) for stir in STIRRED),
    ]
    return max(judging.distance(truth, other)[0] for other in others)


def _by_plan(entry: Entry, prepared: dict[str, Any], text: str, path: Path) -> dict[str, Any]:
    """The verdict on one plan."""
    plan = Plan.model_validate_json(text)
    world, port = len({w.device for w in plan.workers}), free_port()
    paths = [path.with_suffix(f".{rank}") for rank in range(world)]

    def rank_of(rank: int) -> Callable[[], Any]:
        return lambda: _rank(entry, prepared, plan, (rank, world, port))

    pids = [fork(rank_of(rank), paths[rank]) for rank in range(world)]
    wait_for(pids, RANKS_S, together=True)
    results = [result_of(one) for one in paths]
    errors = [one for one in results if isinstance(one, tuple)]
    if errors:
        return judging.of_errors(errors)
    if not all(isinstance(one, Trained) for one in results):
        return {"verdict": "crashed", "why": "a rank died, or did not end in time"}
    every = Trained(
        results[0].losses,
        [piece for one in results for piece in one.gradients],
        [piece for one in results for piece in one.weights],
    )
    error, where = judging.distance(every, prepared["truth"])
    if error > judging.LIMIT:
        told = {"where": f"{where}: {error:.1e}", "losses": every.losses}
        truth = prepared["truth"].losses
        return {"verdict": "deviates", "error": min(error, 1e9), **told, "truth": truth}
    return {"verdict": "exact", "error": error}


def _rank(entry: Entry, prepared: dict[str, Any], plan: Plan, place: tuple[int, int, int]) -> Any:
    launched(*place)
    try:
        return train(entry, prepared["found"], plan=plan, data=prepared.get("data", 1))
    except Failed as failed:
        error = failed.__cause__
        assert error is not None
        return failed.steps, packed(error), last_line(error)
