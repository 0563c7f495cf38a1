"""Documents of unlike length, and what training on them must come to: plain PyTorch, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gpumix.data.core.source import Source
from gpumix.data.loader import Loader, evaluation_batches
from gpumix.data.order.sampler import ByLength
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.text.document_packing import PackedDocuments
from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.schema.plan.plan import Plan
from gpumix.train.checks.packed_documents import check_documents
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, VOCABULARY
from helpers.training.reference import (
    SEED,
    Array,
    Trained,
    initialised,
    joined,
    optimizer_for,
    pieces_of,
)

LONGEST = 24
STEPS = 3


class Texts(list[dict[str, Any]]):
    """Documents of 2 to 24 random tokens; of a masked model a third of them are labels."""

    def __init__(self, n: int, *, masked: bool = False) -> None:
        made = np.random.default_rng(5)
        self.lengths = made.lognormal(2, 0.7, n).clip(2, LONGEST).astype(int)
        for length in self.lengths:
            tokens = made.integers(3, VOCABULARY, length)
            labels = np.where(made.random(length) < 0.3, tokens, -100)
            self.append({"input_ids": tokens, **({"labels": labels} if masked else {})})


def documents(name: str, n: int) -> OwnSamples:
    return OwnSamples(Texts(n, masked=name == "bert"), "texts", longest=LONGEST)


def packs(name: str, n: int) -> PackedDocuments:
    return PackedDocuments(documents(name, n), seed=1, predicts_next=name != "bert", window=16)


def one_by_one(
    name: str, source: OwnSamples, batches: Sequence[np.ndarray], held_out: np.ndarray
) -> tuple[Trained, dict[str, Array]]:
    """Plain PyTorch on the documents of each batch, each alone, without any padding, and then the
    loss of `held_out`; and the last step's gradients."""
    model = initialised(ARCHITECTURES[name].factory)
    optimizer = optimizer_for(model.parameters())
    losses = []
    for numbers in batches:
        optimizer.zero_grad()
        loss = _loss(model, name, source, numbers)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(_loss(model, name, source, held_out).item())
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return Trained(losses, weights), gradients


def _loss(model: nn.Module, name: str, source: OwnSamples, numbers: np.ndarray) -> torch.Tensor:
    parts, total = [], 0
    for sample in source.samples(numbers):
        labels = sample.get("labels", sample["input_ids"])
        counted = int(((labels if name == "bert" else labels[1:]) != -100).sum())
        if counted:
            mean = model(input_ids=sample["input_ids"][None], labels=labels[None]).loss
            parts.append(mean * counted)
            total += counted
    return torch.stack(parts).sum() / total


def on_ranks(source: Source, name: str, plan_json: str, by_length: ByLength) -> Any:
    """On each rank: its losses and that of an evaluation of the first samples, parameters, last
    gradients, and samples of each step."""
    plan = Plan.model_validate_json(plan_json)
    engine = prepare(build(ARCHITECTURES[name].factory, SEED), plan)
    if isinstance(source, PackedDocuments):
        assert check_documents(engine) == ""
    optimizer = optimizer_for(engine.parameters())
    losses, read = [], []
    with Loader(source, plan, engine.comm.rank, by_length=by_length) as loader:
        for _ in range(STEPS):
            optimizer.zero_grad()
            batch = next(loader)
            losses.append(engine.step(batch).item())
            optimizer.step()
            read.append(loader.last_indices.tolist())
    ((batch, samples),) = evaluation_batches(source, plan, engine.comm.rank, batches=1)
    losses.append(engine.evaluate(batch, samples).item())
    return losses, pieces_of(engine), pieces_of(engine, gradients=True), read


def trained(source: Source, name: str, plan: Plan, by_length: ByLength) -> Any:
    """What all ranks came to, its gradients, and the samples of each step."""
    found = run_ranks(on_ranks, len(plan.workers), source, name, plan.model_dump_json(), by_length)
    losses, pieces, gradients, read = zip(*found, strict=True)
    assert all(of_rank == losses[0] for of_rank in losses)
    return Trained(losses[0], joined(pieces)), joined(gradients), read
