"""Plans of one job on emulated devices, measured in turns, so that whatever else the machine does
falls on all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from emulated.trials import TRIES
from gpumix.schema.plan.plan import Plan
from gpumix.train.controller import JobController
from gpumix.train.run_log.summary import TrialResult

VOCABULARY = 32  # so few that a stage with the head takes hardly longer than another


@dataclass
class Turns:
    """What one plan took each time."""

    trials: list[TrialResult] = field(default_factory=list)

    @property
    def counted(self) -> list[TrialResult]:
        """Those in which no emulated device fell behind its speed, if there are any."""
        return [trial for trial in self.trials if trial.overruns == 0] or self.trials

    @property
    def step_s(self) -> float:
        return median(trial.step_s for trial in self.counted)

    @property
    def idle_share(self) -> float:
        """The part of all devices' time in which they wait for each other."""
        return median(1.0 - fmean(trial.busy_shares) for trial in self.counted)

    @property
    def overruns(self) -> int:
        """Of what counted."""
        return sum(trial.overruns for trial in self.counted)


def llama(*, width: int, layers: int) -> dict[str, Any]:
    """The configuration of a model whose layers are all but all of its work."""
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 8 * width // 3,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


@contextmanager
def job_file(config: dict[str, Any], length: int, **keys: Any) -> Iterator[Path]:
    """A job that trains such a model on samples of so many tokens; `keys` are its others."""
    tokens = {"vocabulary": VOCABULARY, "length": length}
    with TemporaryDirectory(prefix="gpumix-") as folder:
        job = {
            "model": {"config": config},
            "data": {"factory": "emulated.tokens:samples", "arguments": tokens},
            "sequence_length": length,
            "max_steps": 1000,
            "advanced": {"profile_cache": "profiles"},
            "output_dir": "run",
        }
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job | keys), encoding="utf-8")
        yield path


def take_turns(
    pipeline: JobController, plans: Mapping[str, Plan], found: dict[str, Turns], steps: int
) -> None:
    """Measure each plan once; again while an emulated device has always fallen behind its speed."""
    for name, plan in plans.items():
        turns = found.setdefault(name, Turns())
        for _ in range(TRIES):
            turns.trials.append(pipeline.try_out(plan, steps))
            if turns.overruns == 0:
                break
