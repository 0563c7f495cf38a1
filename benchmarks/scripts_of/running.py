"""Runs one script as it is, and with its import changed on ranks of a plan that is made by hand.

All processes are forked from the caller, which has imported what they need.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpumix.engine.engine import Engine
from gpumix.integrations.common import plan_and_shard
from gpumix.integrations.common.even_plan import record_unit_calls, select_called_units
from gpumix.schema.plan.plan import Plan
from gpumix.testing import Share, plan_for
from scripts_of import comparing
from zoo_of import judging
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

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 400.0  # for a script
STOCK_S = 120.0
RANKS_S = 240.0
# What a script imports, and from where it does so when it is changed.
CHANGED = {
    ("transformers", "Trainer"): "gpumix.integrations.transformers",
    ("transformers", "Seq2SeqTrainer"): "gpumix.integrations.transformers",
    ("trl", "SFTTrainer"): "gpumix.integrations.trl",
    ("accelerate", "Accelerator"): "gpumix",
}
# Lightning's trainer stays, and is given a strategy.
STRATEGY = 'strategy = "auto"\n'
CHANGED_STRATEGY = (
    "from gpumix.integrations.lightning import GpumixStrategy\nstrategy = GpumixStrategy()\n"
)
SETTINGS = re.compile(r"^# (variants|plan|limit): (.*)$", re.M)
UNTHREADED = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Script:
    """A script, with the argument that it is started with.

    Attributes:
        plan: A: two ranks, ZeRO 3; B: three, ZeRO 1, one stores nothing; C: three, ZeRO 3, one
            computes nothing; D: two, nothing is divided; E: one, in two micro-batches.
        limit: up to which results are the same; low precision has larger ones.
    """

    path: Path
    variant: str
    plan: str
    limit: float

    @property
    def name(self) -> str:
        return f"{self.path.stem}[{self.variant}]" if self.variant else self.path.stem

    def changed(self) -> str:
        """Its text with the changed import.

        Raises:
            ValueError: there is not one import to change.
        """
        text = self.path.read_text(encoding="utf-8")
        changes = text.count(STRATEGY)
        text = text.replace(STRATEGY, CHANGED_STRATEGY)
        for (library, name), ours in CHANGED.items():
            line = re.search(rf"^from {library} import (.*\b)?{name}\b.*$", text, re.M)
            if line is not None:
                names = re.split(", ", line[0].partition(" import ")[2])
                names.remove(name)
                kept = f"from {library} import {', '.join(names)}\n" if names else ""
                new = f"{kept}from {ours} import {name}"
                text = text.replace(line[0], new)
                changes += 1
        if changes != 1:
            raise ValueError(f"{self.path.name} has {changes} imports to change")
        return text


def scripts() -> list[Script]:
    """All, in the order of their names."""
    found = []
    for path in sorted(SCRIPTS.glob("*.py")):
        said = dict(SETTINGS.findall(path.read_text(encoding="utf-8")))
        for variant in said.get("variants", "").split() or [""]:
            limit = float(said.get("limit", comparing.LIMIT))
            found.append(Script(path, variant, said.get("plan", "A"), limit))
    return found


def shares_of(kind: str, batch: int) -> tuple[list[Share], int]:
    """The ranks of a plan, and its ZeRO stage."""
    most = -(-batch * 7 // 12)
    rest = batch - most
    if kind == "E":
        return [Share(batch, -(-batch // 2), 1)], 3
    if kind in "AD":
        return [Share(most, -(-most // 3), 1), Share(rest, rest, 3)], 3 if kind == "A" else 0
    if kind == "C":
        return [Share(most, -(-most // 2), 1), Share(rest, rest, 3), Share(0, 0, 2)], 3
    half, third = batch // 2, batch // 3
    rest = batch - half - third
    return [Share(half, -(-half // 2), 1), Share(third, third, 0), Share(rest, 1, 2)], 1


def try_script(script: Script) -> dict[str, Any]:
    """What became of a script, as JSON has it: `status`, and why."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        folder = Path(name)
        leader = fork(
            lambda: _compared(script, folder), folder / "script", lead=True, limit_s=2 * LIMIT_S
        )
        wait_for([leader], LIMIT_S)
        kill_group(leader)
        return result_of(folder / "script") or {"status": "crashed", "why": "no end in time"}


def _compared(script: Script, folder: Path) -> dict[str, Any]:
    os.environ.update(UNTHREADED, XDG_CACHE_HOME=str(folder / "cache"))
    text = script.path.read_text(encoding="utf-8")
    pid = fork(lambda: _run(script, text, folder / "stock"), folder / "truth")
    wait_for([pid], STOCK_S)
    truth = result_of(folder / "truth")
    if not isinstance(truth, dict) or truth.keys() == {"status", "why"}:
        return {"status": "broken", "why": f"as it is: {_told(truth)}"}
    world, port = len(shares_of(script.plan, 12)[0]), free_port()
    paths = [folder / f"rank{rank}" for rank in range(world)]
    pids = []
    for rank, path in enumerate(paths):
        place = rank, world, port
        pids.append(fork(lambda place=place: _rank(script, folder / "changed", place), path))  # type: ignore[misc]
    wait_for(pids, RANKS_S, together=True)
    return judged(script, truth, [result_of(path) for path in paths])


def _told(result: Any) -> str:
    if isinstance(result, tuple):
        _, error, last = result
        return f"{type(error).__name__}: {error} at {last}"
    return str(result["why"])[-1500:] if isinstance(result, dict) else "no end in time"


def judged(script: Script, truth: Mapping[str, Any], ranks: Sequence[Any]) -> dict[str, Any]:
    """The status of a script.

    Args:
        truth: what it reported as it was.
        ranks: what each reported, (steps, error, where) of one that ended with an error, or None of
            one that did not end.
    """
    errors = [one for one in ranks if isinstance(one, tuple)]
    if errors:
        found = judging.of_errors(errors)
        refused = found["verdict"] == "refused"
        why = f"{found['why']} at {found['last']}"
        if found.get("after_steps"):
            why = f"after {found['after_steps']} steps: {why}"
        return {"status": "refused" if refused else "crashed", "why": why}
    dead = [n for n, one in enumerate(ranks) if one is None or one.keys() == {"status", "why"}]
    if dead:
        return {"status": "crashed", "why": f"rank {dead[0]}: {_told(ranks[dead[0]])}"}
    for rank, found in enumerate(ranks):
        of_rank = {k: v for k, v in truth.items() if rank == 0 or k != "weights"}
        own = {k: v for k, v in found.items() if rank == 0 or k != "weights"}
        wrong = [d for d in comparing.worst_of(own, of_rank) if not d.error <= script.limit]
        if wrong:
            told = "; ".join(f"{d.where}: {d.told} ({d.error:.1e})" for d in wrong[:4])
            why = f"rank {rank}: {told}" + (f" and {len(wrong) - 4} more" * (len(wrong) > 4))
            return {"status": "different", "why": why, "error": min(wrong[0].error, 1e9)}
    worst = max((d.error for d in comparing.worst_of(ranks[0], truth)), default=0.0)
    return {"status": "same", "error": worst}


def _run(script: Script, text: str, output: Path) -> Any:
    """What a script reports, as arrays and plain values."""
    sys.argv = [str(script.path), *filter(None, [script.variant])]
    output.mkdir(exist_ok=True)
    os.environ["OUTPUT"] = str(output)
    from scripts_of import parts

    space = {"__name__": "__main__", "__file__": str(script.path)}
    sys.modules["__main__"].__dict__.update(space)  # for what is pickled
    try:
        exec(compile(text, str(script.path), "exec"), space)
    except BaseException as error:
        traceback.print_exc()
        steps = [engine.steps for engine in _engines()]
        return max(steps, default=0), packed(error), last_line(error)
    return _plain(parts.reported)


def _engines() -> list[Engine]:
    return [one for one in gc.get_objects() if isinstance(one, Engine)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64).numpy()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _rank(script: Script, output: Path, place: tuple[int, int, int]) -> Any:
    launched(*place)

    def by_hand(model: nn.Module, training: plan_and_shard.TrainingSetup, *_: Any) -> Plan:
        return plan_by_hand(script.plan, model, training)

    plan_and_shard._measure_and_plan = by_hand
    return _run(script, script.changed(), output)


def plan_by_hand(kind: str, model: nn.Module, training: plan_and_shard.TrainingSetup) -> Plan:
    """Of a model that a program is about to train."""
    shares, zero_stage = shares_of(kind, training.global_batch)
    batch = training.make_batch(min(2, training.global_batch))
    assert training.loss is not None
    loss = training.loss
    dtype = training.precision
    calls = record_unit_calls(model, torch.enable_grad()(lambda: loss(model, batch)))
    return plan_for(
        model,
        shares,
        calls=calls,
        units=select_called_units(model, calls),
        sequence_length=training.sequence_length,
        zero_stage=zero_stage,
        compute_dtype=plan_and_shard.precision_of_weights(model) if dtype == "auto" else dtype,
    )
