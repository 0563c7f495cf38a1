"""A loop of a program's own resumes adapters on the base that they were trained on, and is refused
on another: with `Accelerator`, and with `gpumix.prepare` and a `Checkpointer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpumix
from gpumix.engine.prepare import prepare
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, as_launched, make_accelerator, model, train_in_loop
from helpers.training.checkpoints import checkpointer
from helpers.training.reference import Share, optimizer_for, plan_for

pytestmark = pytest.mark.slow

pytest.importorskip("peft")

SHARES = [Share(8, 3, 1), Share(4, 4, 5)]
BATCH = 12


def adapted(*, other: bool) -> Any:
    """With adapters; `other`: on a base of which one value differs."""
    from peft import LoraConfig, get_peft_model

    base = model()
    if other:
        with torch.no_grad():
            base.model.layers[1].self_attn.k_proj.weight[0, 0] += 0.5  # which has no adapter
    torch.manual_seed(2)
    made: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


def plan() -> Any:
    return plan_for(adapted(other=False), SHARES, zero_stage=3)


def values_of(network: nn.Module) -> list[torch.Tensor]:
    with gpumix.summon_full_params(network):
        return [p.detach().clone() for p in network.parameters()]


def in_accelerator(folder: Path, state: Path, *, resumes: bool, other: bool) -> list[float]:
    from torch.utils.data import DataLoader

    as_launched(folder)
    accelerator = make_accelerator(2, plan)
    network = adapted(other=other)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(Texts(3 * BATCH), batch_size=BATCH // 2)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    if resumes:
        _check_unchanged(network.module, lambda: accelerator.load_state(str(state)))
    losses = train_in_loop(accelerator, network, optimizer, loader)
    if not resumes:
        accelerator.save_state(str(state))
    return losses


def in_own_loop(folder: Path, state: Path, *, resumes: bool, other: bool) -> list[float]:
    as_launched(folder)
    network = adapted(other=other)
    engine = prepare(network, plan())
    optimizer = optimizer_for(engine.parameters())
    keeping = checkpointer(state)
    if resumes:
        _check_unchanged(network, lambda: keeping.load(engine, optimizer))
    rows = [row for part in engine.plan.rows_of(engine.comm.rank) for row in part]
    samples = torch.utils.data.default_collate([Texts(BATCH)[row] for row in rows])
    losses = []
    for _ in range(3):
        losses.append(engine.step(samples).item())
        optimizer.step()
        optimizer.zero_grad()
    if not resumes:
        keeping.save(3, engine, optimizer, cursor={})
    return losses


def _check_unchanged(network: nn.Module, load: Any) -> None:
    """Load a state; where that is refused, the weights are those from before."""
    before = values_of(network)
    try:
        load()
    except InputError:
        assert all(map(torch.equal, before, values_of(network)))
        raise


LOOPS = {"Accelerator": in_accelerator, "own loop": in_own_loop}


def run(loop: str, folder: Path, state: Path, resumes: bool, other: bool) -> list[float]:
    return LOOPS[loop](folder, state, resumes=resumes, other=other)


@pytest.mark.parametrize("loop", LOOPS)
def test_another_base_is_refused(tmp_path, loop):
    state = tmp_path / "state"
    begun = run_ranks(run, 2, loop, tmp_path, state, False, False)
    continued = run_ranks(run, 2, loop, tmp_path, state, True, False)
    assert continued[0][0] < begun[0][0]
    with raises(InputError, code="adapters-of-another-base") as caught:
        run_ranks(run, 2, loop, tmp_path, state, True, True)
    assert str(state) in caught.value.where
