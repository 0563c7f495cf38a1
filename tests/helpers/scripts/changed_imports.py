"""The examples whose import alone is changed, run as they were and as they are.

As they were in a process of the harness, which has imported what they need; as they are by
`gpumix launch`, as their first lines say, or torchrun, on unlike emulated devices.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.paths import EXAMPLES
from helpers.processes.commands import environment, run
from helpers.processes.harness import run_ranks

OURS = re.compile(r"^from gpumix(\.integrations\.(?P<of>\w+))? import (?P<name>\w+)$", re.M)
DEVICES = (
    "- {{class: fast, count: 1, memory: 200MB, emulate: {}}}\n"
    "- {{class: slow, count: 1, memory: 60MB, emulate: {}}}\n"
)
RATES = (2e9, 5e8)
# Its model is so small that a busy machine is no faster than the former.
RATES_OF = {"sft_lora": (4e8, 1e8)}
STEPS = 6
REPORTED_STEPS = 12  # of the one whose report is read: it is told twice how devices did
# Of arguments one says that it computes on a CPU, and others leave that to be found out.
FOUND = [
    *("--max_steps", str(STEPS), "--logging_steps", "1", "--learning_rate", "3e-3"),
    *("--disable_tqdm", "True", "--report_to", "none", "--save_strategy", "no"),
]
TRAINER = [*FOUND, "--use_cpu", "True"]
SCRIPTS = {
    "run_clm": (
        [*FOUND, "--max_steps", str(REPORTED_STEPS)],
        "--per_device_train_batch_size",
    ),
    "run_classification": (TRAINER, "--per_device_train_batch_size"),
    "sft_lora": (FOUND, "--per_device_train_batch_size"),
    "clm_no_trainer": (["--steps", str(STEPS)], "--per_device_batch_size"),
}
# Are started so too, as pages say: a script with a trainer, and one with a loop.
BY_TORCHRUN = ("run_clm", "clm_no_trainer")
MORE = {"lightning_clm": SCRIPTS["clm_no_trainer"]}  # more than their import is changed
BATCH = 12
LOSSES = "losses.json"
LAUNCH = ["gpumix", "launch", "--cluster"]
TORCHRUN = ["torch.distributed.run", "--standalone"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def stock(script: Path) -> str:
    """The script as it was: with the library's own import."""
    text = script.read_text(encoding="utf-8")
    (line,) = OURS.finditer(text)
    return OURS.sub(f"from {line['of'] or 'accelerate'} import {line['name']}", text)


def arguments_of(name: str, folder: Path, world: int) -> list[str]:
    """Of an example, whose batch of all processes is always as large; it writes into `folder`."""
    settings, batch = (SCRIPTS | MORE)[name]
    where = [] if name == "clm_no_trainer" else ["--output_dir", str(folder)]
    where += [] if _trains(name) else ["--losses", str(folder / LOSSES)]
    return [*settings, batch, str(BATCH // world), *where]


def _trains(name: str) -> bool:
    """Whether it is one with a trainer of transformers, which writes its losses down itself."""
    return (SCRIPTS | MORE)[name][1] == "--per_device_train_batch_size"


def _written(name: str, folder: Path) -> list[float]:
    if not _trains(name):
        found: list[float] = json.loads((folder / LOSSES).read_text())
        return found
    state: dict[str, Any] = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def _ran(script: Path, name: str, folder: Path) -> None:
    """A script as it was, in this process."""
    os.environ.update(ENVIRONMENT)
    sys.argv = [str(script), *arguments_of(name, folder, 1)]
    runpy.run_path(str(script), run_name="__main__")


def losses_before(name: str, folder: Path) -> list[float]:
    """Of an example with the library's own import, in one process.

    Args:
        folder: that what is written goes into.
    """
    script = EXAMPLES / f"{name}.py"
    before, output = folder / f"{name}.py", folder / f"{name}-before"
    output.mkdir()
    before.write_text(stock(script).replace("__file__", repr(str(script))))
    run_ranks(_ran, 1, before, name, output, timeout_s=120)
    return _written(name, output)


@dataclass(frozen=True)
class Launched:
    """What an example did on unlike devices: its losses, and of a step the samples that each device
    computes, as it prints them; `output` is its folder."""

    losses: list[float]
    samples: list[int]
    output: Path


def launched(name: str, folder: Path, *, torchrun: bool = False) -> Launched:
    """An example on two unlike emulated devices, started as a user does; what was measured in
    `folder` before is not measured again."""
    cluster, output = folder / "cluster.yaml", Path(f"{name}-{'torchrun' if torchrun else 'after'}")
    cluster.write_text(DEVICES.format(*RATES_OF.get(name, RATES)))
    (folder / output).mkdir()
    start = [*TORCHRUN, "--nproc-per-node", "2"] if torchrun else [*LAUNCH, cluster.name]
    script = [str(EXAMPLES / f"{name}.py"), *arguments_of(name, output, 2)]
    more = {"GPUMIX_CLUSTER": str(cluster)} if torchrun else {}
    return trained([*start, *script], name, folder / output, **more)


def trained(words: list[str], name: str, output: Path, **more: str) -> Launched:
    """What `python -m WORDS` does with an example, by `launched` or as that did before.

    Args:
        output: its folder; it is started in the one around it.
        more: of the environment.
    """
    folder = output.parent
    env = environment(folder / "cache") | ENVIRONMENT | more
    done = run([sys.executable, "-m", *words], folder=folder, env=env, timeout_s=240)
    assert done.code == 0, done.err[-4000:]
    assert done.out.count("***** eval metrics") <= 1, "one rank tells of all"
    samples = [int(found) for found in re.findall(r"(\d+) samples a step", done.out)]
    return Launched(_written(name, output), samples, output)
