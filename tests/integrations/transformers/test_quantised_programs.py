"""Programs with a `BitsAndBytesConfig`, of which the import alone is changed, give what they gave:
Trainer, SFTTrainer and a loop with `Accelerator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.scripts.quantised_programs import (
    ADAPTERS,
    KINDS_OF_SFT,
    RUN,
    STEPS,
    run_each,
    run_trainer,
)
from helpers.training import quantised as q

pytestmark = pytest.mark.slow

pytest.importorskip("bitsandbytes")
pytest.importorskip("trl")
pytest.importorskip("peft")

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    q.save_base(folder / "base")
    stock, *_ = run_ranks(run_each, 1, folder, 1, timeout_s=300)
    ours = run_ranks(run_each, 2, folder, 2, timeout_s=600)
    return folder, stock, ours


@pytest.mark.parametrize("kind", RUN)
def test_losses_are_those_of_the_stock_program(every, kind):
    _, stock, ours = every
    assert len(stock[kind]["losses"]) == STEPS
    for rank in ours:
        assert rank[kind]["losses"] == pytest.approx(stock[kind]["losses"], rel=TOLERANCE)


def test_kinds_of_sft_train_on_different_tokens(every):
    _, stock, _ = every
    assert len({stock[kind]["losses"][0] for kind in KINDS_OF_SFT}) == len(KINDS_OF_SFT)


@pytest.mark.parametrize("kind", ["trainer", *KINDS_OF_SFT])
def test_evaluation_is_that_of_the_stock_program(every, kind):
    _, stock, ours = every
    for rank in ours:
        assert rank[kind]["evaluated"] == pytest.approx(stock[kind]["evaluated"], rel=TOLERANCE)


@pytest.mark.parametrize("kind", RUN)
def test_adapters_alone_are_saved_as_peft_saves_them(every, kind):
    _, stock, ours = every
    assert ours[0][kind]["files"] == stock[kind]["files"] == [ADAPTERS]
    expected, found = (load_file(one[kind]["saved"]) for one in (stock, ours[0]))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Adam moves an element whose gradient is hardly more than rounding by its sign alone.
        assert np.linalg.norm(found[key] - value) <= 5e-3 * np.linalg.norm(value), key


def test_training_goes_on_under_another_plan_from_adapters_alone(every):
    folder, stock, _ = every
    checkpoint = folder / "trainer-2" / "checkpoint-3" / "gpumix"
    base = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
    assert sum(p.stat().st_size for p in checkpoint.rglob("*.distcp")) < base
    for rank in run_ranks(_resumed, 2, folder, timeout_s=300):
        assert rank["losses"] == pytest.approx(stock["trainer"]["losses"], rel=TOLERANCE)


def _resumed(folder: Path) -> dict[str, Any]:
    as_launched(folder)
    return run_trainer(folder, 2, resumes=True)


def test_adapters_of_another_base_are_refused(every, tmp_path):
    folder, _, _ = every
    with raises(InputError, code="adapters-of-another-base"):
        run_ranks(_resumed_on_another_base, 2, folder, tmp_path, timeout_s=300)


def _resumed_on_another_base(folder: Path, other: Path) -> None:
    import shutil

    import torch
    from transformers import LlamaForCausalLM

    as_launched(folder)
    (other / "trainer-2").mkdir(exist_ok=True)
    if torch.distributed.get_rank() == 0:
        model = LlamaForCausalLM.from_pretrained(folder / "base")
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1.0
        model.save_pretrained(other / "base")
        shutil.copytree(folder / "trainer-2" / "checkpoint-3", other / "trainer-2" / "checkpoint-3")
    torch.distributed.barrier()
    run_trainer(other, 2, resumes=True)
