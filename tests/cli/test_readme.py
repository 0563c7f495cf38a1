"""The README's job and commands, run one after the other, on a smaller model and tiny devices.

In this process: what commands are as processes is the subject of `test_documents_on_stdout.py`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from jobs import checkpoints
from transformers import AutoModelForCausalLM
from verbs import gpumix

from gpumix.schema.profile.profile import Profile

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SMALLER = [
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.intermediate_size=48",
    "sequence_length=16",
    "global_batch_size=8",
    "eval_steps=2",
    "cluster=cluster.yaml",
    "advanced.profile_cache=profiles",
]


def block_after(words: str) -> str:
    """The indented block that follows a sentence of the README."""
    after = README.split(words, 1)[1]
    found = re.search(r"\n((?:    .*\n|\n)+)", after)
    assert found is not None, words
    return re.sub(r"^    ", "", found.group(1), flags=re.MULTILINE)


def commands() -> list[list[str]]:
    block = block_after("\nThen, with the same ")
    lines = (line.partition("#")[0].strip() for line in block.splitlines())
    return [shlex.split(line)[1:] for line in lines if line]


# Its commands are run by `tests/docs/test_commands_run.py`, too.
@pytest.mark.extended
@pytest.mark.slow
def test_the_job_of_the_readme_goes_its_whole_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(block_after("A job is one YAML file"), encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(block_after("a file `cluster.yaml`"), encoding="utf-8")
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "one.txt").write_text(README * 4, encoding="utf-8")
    steps = {"train": ["max_steps=3"], "resume": ["max_steps=5"]}
    ran = []
    for words in commands():
        part = "resume" if "--resume" in words else words[0]
        sets = [*SMALLER, *steps.get(part, ["max_steps=3"])] if "job.yaml" in words else []
        given = [word for word in words if not word.startswith("max_steps=") and word != "--set"]
        done = gpumix(*given, *(w for s in sets for w in ("--set", s)))
        assert done.exit_code == 0, f"{words}: {done.stderr}"
        ran.append(part)
    assert ran == [
        "devices", "plan", "train", "resume", "simulate", "top", "report", "export", "inspect",
    ]  # fmt: skip
    profile = Profile.load(tmp_path / "runs" / "first" / "profile.json")
    assert [one.name for one in profile.cluster.classes] == ["big", "small"]
    assert checkpoints(tmp_path / "runs" / "first")[-1] == "step-00000005"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    assert model.config.hidden_size == 32
