"""Scripts with Trainer, SFTTrainer and Accelerator: with one line changed they train to the same
losses on unlike devices."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import EXAMPLES

from harness import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OURS = re.compile(r"^from gpumix(\.integrations\.(?P<of>\w+))? import (?P<name>\w+)$", re.M)
DEVICES = (
    "- {class: fast, count: 1, memory: 200MB, emulate: 8e9}\n"
    "- {class: slow, count: 1, memory: 60MB, emulate: 2e9}\n"
)
STEPS = 6
TRAINER = [
    *("--max_steps", str(STEPS), "--logging_steps", "1", "--learning_rate", "3e-3"),
    *("--use_cpu", "True", "--disable_tqdm", "True", "--report_to", "none"),
    *("--save_strategy", "no"),
]
SCRIPTS = {
    "run_clm": (TRAINER, "--per_device_train_batch_size"),
    "sft_lora": ([*TRAINER, "--bf16", "False"], "--per_device_train_batch_size"),
    "clm_no_trainer": (["--steps", str(STEPS)], "--per_device_batch_size"),
}
BATCH = 12


def stock(script: Path) -> str:
    """The script as it was: with the library's own import."""
    text = script.read_text(encoding="utf-8")
    (line,) = OURS.finditer(text)
    return OURS.sub(f"from {line['of'] or 'accelerate'} import {line['name']}", text)


def ran(script: Path, name: str, folder: Path, world: int) -> list[float]:
    """The losses that a script writes down."""
    os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    if world > 1:
        rank = _rank()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        os.environ["GPUMIX_CLUSTER"] = str(folder / "cluster.yaml")
    settings, batch = SCRIPTS[name]
    output = folder / f"{name}-{world}"
    output.mkdir(exist_ok=True)
    trains = batch == "--per_device_train_batch_size"
    where = ["--output_dir", str(output)] if trains else ["--losses", str(output / "losses.json")]
    sys.argv = [str(script), *settings, batch, str(BATCH // world), *where]
    runpy.run_path(str(script), run_name="__main__")
    if _rank() != 0:
        return []
    if not trains:
        return json.loads((output / "losses.json").read_text())
    state: dict[str, Any] = json.loads((output / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_is_changed_and_the_losses_are_the_same(name, tmp_path):
    (tmp_path / "cluster.yaml").write_text(DEVICES)
    script = EXAMPLES / f"{name}.py"
    before = tmp_path / f"{name}.py"
    before.write_text(stock(script).replace("__file__", repr(str(script))))
    (expected,) = run_ranks(ran, 1, before, name, tmp_path, 1, timeout_s=120)
    found = run_ranks(ran, 2, script, name, tmp_path, 2, timeout_s=200)[0]
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-4)
    plan = tmp_path / f"{name}-2" / "gpumix" / "plan.json"
    if plan.is_file():
        samples = [
            w["samples"] for s in json.loads(plan.read_text())["stages"] for w in s["workers"]
        ]
        assert samples[0] > samples[1]
