"""The examples whose import alone is changed, run as they are and as they were.

In ranks of the harness, so that what they import is imported once.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
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
MORE = {"lightning_clm": SCRIPTS["clm_no_trainer"]}  # more than their import is changed
BATCH = 12


def stock(script: Path) -> str:
    """The script as it was: with the library's own import."""
    text = script.read_text(encoding="utf-8")
    (line,) = OURS.finditer(text)
    return OURS.sub(f"from {line['of'] or 'accelerate'} import {line['name']}", text)


def ran(script: Path, name: str, folder: Path, world: int) -> list[float]:
    """The losses that a script writes down."""
    os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    if world > 1:
        rank = _rank()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        os.environ["GPUMIX_CLUSTER"] = str(folder / "cluster.yaml")
    settings, batch = (SCRIPTS | MORE)[name]
    output = folder / f"{name}-{world}"
    output.mkdir(exist_ok=True)
    trains = batch == "--per_device_train_batch_size"
    where = ["--output_dir", str(output)] if trains else ["--losses", str(output / "losses.json")]
    where += ["--output_dir", str(output)] if name in MORE else []
    sys.argv = [str(script), *settings, batch, str(BATCH // world), *where]
    runpy.run_path(str(script), run_name="__main__")
    if _rank() != 0:
        return []
    if not trains:
        return json.loads((output / "losses.json").read_text())
    state: dict[str, Any] = json.loads((output / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def losses_of(name: str, folder: Path, *, changed: bool) -> list[float]:
    """Of an example on unlike emulated devices, or, with the library's own import, of one process.

    Args:
        folder: that what is written goes into.
    """
    (folder / "cluster.yaml").write_text(DEVICES)
    script = EXAMPLES / f"{name}.py"
    if changed:
        return run_ranks(ran, 2, script, name, folder, 2, timeout_s=200)[0]
    before = folder / f"{name}.py"
    before.write_text(stock(script).replace("__file__", repr(str(script))))
    return run_ranks(ran, 1, before, name, folder, 1, timeout_s=120)[0]
