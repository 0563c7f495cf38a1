"""Three steps of a class under a Trainer: of `transformers` as it is, or under a plan of gpumix."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from gpumix.engine.loss.reduction import SUM_AND_COUNT, SummedLoss
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.integrations.common.even_plan import record_unit_calls, select_called_units
from gpumix.integrations.transformers import Trainer
from gpumix.profiler.compute.dataflow import DataFlow, find_flows
from gpumix.profiler.compute.unit_kinds import separate_kinds
from gpumix.profiler.compute.unit_runner import UnitRunner
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.testing import Share, plan_for
from helpers.training.reference import Pieces, pieces_of
from zoo_of.classes import Entry, Found

STEPS, BATCH, RATE = 3, 6, 1e-3
# Rounding alone moves what has no gradient by a step of AdamW's; with this it does not.
EPSILON = 1e-3
DECAY = 0.1


@dataclass
class Trained:
    """Losses of all steps, gradients of the first, and weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: Pieces = field(default_factory=list)
    weights: Pieces = field(default_factory=list)


class _Watch(transformers.TrainerCallback):
    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 0:
            self.trained.gradients = _pieces(self.trainer, gradients=True)


def _pieces(trainer: Any, *, gradients: bool = False) -> Pieces:
    engine = getattr(trainer, "_engine", None)
    if engine is not None:
        return [(*told, values.copy()) for *told, values in pieces_of(engine, gradients)]
    found: Pieces = []
    for name, parameter in trainer.model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            whole = tensor.numpy().copy()
            found.append((name, whole.shape, (0,) * whole.ndim, whole))
    return found


class Failed(Exception):
    """Training ended with an error, its cause, after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


def train(
    entry: Entry,
    found: Found,
    *,
    plan: Plan | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    stir: float = 0.0,
    data: int = 1,
) -> Trained:
    """Three steps, in this process alone or as one of the ranks of `plan`.

    Args:
        seed: of numbers that are drawn in training.
        dtype: of weights and data.
        stir: by which part of itself each weight is changed before, more or less.
        data: seed of samples.

    Raises:
        Failed: from the error.
    """
    transformers.logging.set_verbosity_error()
    model = found.model(entry).to(dtype)
    feed = found.feed(model)
    if stir:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + stir * torch.randn_like(parameter))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    trained = Trained()
    watch = _Watch(trained)
    trainer: Any = None
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=RATE, eps=EPSILON, weight_decay=DECAY
            )
            made = transformers.Trainer if plan is None else partial(Trainer, plan=plan)
            world = 1 if plan is None else len({w.device for w in plan.workers})
            trainer = made(
                model=model,
                args=_arguments(folder, BATCH // world, seed),
                train_dataset=feed.samples(STEPS * BATCH, seed=data),
                data_collator=lambda samples: feed.collate(samples, dtype),
                optimizers=(optimizer, None),
                callbacks=[watch],
            )
            watch.trainer = trainer
            trainer.train()
        except BaseException as error:
            engine = getattr(trainer, "_engine", None)
            raise Failed(0 if engine is None else engine.steps) from error
        trained.losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        trained.weights = _pieces(trainer)
    return trained


def _arguments(folder: str, batch: int, seed: int) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        seed=seed,
    )


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoPlan:
    """There is none of this kind for a model, and why."""

    why: str


def plans_of(entry: Entry, found: Found, kinds: str, number: int) -> dict[str, Any]:
    """By kind the JSON of a plan, a `NoPlan`, or the error of making it.

    Args:
        kinds: letters of kinds.
        number: of the class, by which B's ZeRO stage goes.
    """
    made: dict[str, Any] = {}
    for kind in kinds:
        try:
            plan = _plan_of(kind, entry, found, number)
            made[kind] = plan if isinstance(plan, NoPlan) else plan.model_dump_json()
        except GpumixError as error:
            made[kind] = error
        except Exception as error:  # a crash, of which the text can cross to another process
            made[kind] = RuntimeError(f"{type(error).__name__}: {error}")
    return made


def _plan_of(kind: str, entry: Entry, found: Found, number: int) -> Plan | NoPlan:
    if kind == "C":
        return _staged(entry, found)
    model = found.model(entry)
    calls = _calls(model, found)
    called = select_called_units(model, calls)
    if kind == "A":
        shares = [Share(4, 2, state=1), Share(2, 1, state=3)]
        ends = _ends(entry, found, calls)
        return plan_for(model, shares, calls=calls, units=called, zero_stage=3, stage=ends)
    shares = [Share(3, 2, state=1), Share(2, 2, state=0), Share(1, 1, state=2)]
    return plan_for(model, shares, calls=calls, units=called, zero_stage=number % 3)


def _calls(model: nn.Module, found: Found) -> list[str]:
    feed = found.feed(model)
    return record_unit_calls(model, lambda: model(**feed.collate(feed.samples(2, seed=0))))


def _ends(entry: Entry, found: Found, calls: list[str]) -> dict[str, tuple[str, ...]]:
    """Return parameters used at one end of the model only, in memory of their own by the plan; of
    a model without such a flow, none."""
    try:
        flows, _ = _flows(entry, found, calls)
    except GpumixError:
        return {}
    return {"before": flows.before.names, "after": flows.after.names}


def _flows(entry: Entry, found: Found, calls: list[str]) -> tuple[DataFlow, str]:
    """Return the flow of values through the model, and the model's fingerprint."""
    model = found.model(entry)
    feed = found.feed(model)
    anatomy = split_into_units(model, select_called_units(model, calls))
    fingerprint = anatomy.fingerprint()
    runner = UnitRunner(
        model,
        anatomy,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        objective=SummedLoss(_loss_alone, SUM_AND_COUNT),
    )
    batch = feed.collate(feed.samples(2, seed=0))
    separate_kinds(runner, batch)
    return find_flows(runner, batch, in_chunks=False), fingerprint


def _staged(entry: Entry, found: Found) -> Plan | NoPlan:
    calls = _calls(found.model(entry), found)
    if len(calls) < 2:
        return NoPlan("fewer than two unit calls")
    flows, fingerprint = _flows(entry, found, calls)
    if flows.no_stages:
        return NoPlan(flows.no_stages)
    cuts = [n for n in range(1, len(calls)) if not {*calls[:n]}.intersection(calls[n:])]
    if not cuts:
        return NoPlan("its units are called again")
    middle = min(cuts, key=lambda n: abs(2 * n - len(calls)))
    ends, needs = [0, middle, len(calls)], flows.needs
    stages = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        wanted = [*needs[begin:end], *(needs[-1:] if end == len(calls) else ())]
        stages.append(
            Stage(
                units=calls[begin:end],
                workers=(
                    Worker(
                        device=f"d{number}", device_class="cpu", samples=BATCH, micro_batch=2,
                        state_share=1.0,
                    ),
                ),
                root=tuple(dict.fromkeys(name for one in wanted for name in one.root)),
                takes=tuple(
                    dict.fromkeys(t for one in wanted for t in one.outputs if t.call < begin)
                ),
            )
        )  # fmt: skip
    return Plan(
        strategy="by hand",
        model=fingerprint,
        sequence_length=1,
        global_batch=BATCH,
        stages=tuple(stages),
    )


def _loss_alone(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(**batch)["loss"], torch.ones(())
