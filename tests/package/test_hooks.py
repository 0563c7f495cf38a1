"""Commits are looked at by the tools of `make lint`, and nothing is fetched for it."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))


def test_hooks_run_what_make_lint_runs():
    (repository,) = CONFIG["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2]
    wanted = [line.split("/", 1)[-1] for line in lint.split("\n\n")[0].splitlines()[1:]]
    tools = [" ".join(command.split()[:2]) for command in wanted]
    run = [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]]
    assert len(run) == len(tools) == 5
    for entry, tool in zip(run, tools):
        assert entry.startswith(tool.split(" src")[0])
