"""The tutorial's own job goes the way that it says, on its two emulated classes; smaller."""

from __future__ import annotations

import pytest

from helpers.pages import ROOT, Block, blocks, commands
from helpers.runs.verbs import gpumix

TUTORIAL = ROOT / "docs" / "tutorial.md"
SECTION = "## A job of your own"
SMALLER = [
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.intermediate_size=48",
    "sequence_length=16",
    "global_batch_size=8",
    "max_steps=3",
    "eval_steps=2",
    "lr_scheduler.warmup_steps=1",
    "cluster=cluster.yaml",
    "advanced.profile_cache=profiles",
    "advanced.profile_budget=5",
]


def section() -> list[Block]:
    """The code blocks of the section."""
    lines = TUTORIAL.read_text(encoding="utf-8").splitlines()
    begin = lines.index(SECTION)
    end = next(n for n in range(begin + 1, len(lines)) if lines[n].startswith("## "))
    return [block for block in blocks(TUTORIAL) if begin < block.line <= end]


@pytest.mark.extended
@pytest.mark.slow
def test_the_job_of_the_tutorial_goes_its_whole_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = section()
    (job,) = [block for block in found if block.text.startswith("model:")]
    (cluster,) = [block for block in found if block.text.startswith("- {class")]
    (tmp_path / "job.yaml").write_text(job.text, encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(cluster.text, encoding="utf-8")
    (tmp_path / "my-texts").mkdir()
    text = TUTORIAL.read_text(encoding="utf-8")
    (tmp_path / "my-texts" / "one.txt").write_text(text * 2, encoding="utf-8")
    ran = []
    for words in (words for block in found for words in commands(block)):
        sets = [w for key in SMALLER for w in ("--set", key)] if "job.yaml" in words else []
        done = gpumix(*(word for word in words[1:] if word != "--open"), *sets)
        assert done.exit_code == 0, f"{words}: {done.stderr}"
        ran.append(words[1])
    verbs = "plan plan train train top report simulate inspect export"
    assert ran == verbs.split()
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert (tmp_path / "my-model" / "config.json").exists()
