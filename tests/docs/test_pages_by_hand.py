"""Pages by hand name all that there is: parts of a plan, suspects of the doctor, strategies."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from gpumix.doctor.function.suspects import NAMES as OF_FUNCTIONS
from gpumix.doctor.report import RemarkName
from gpumix.doctor.suspects import NAMES as OF_JOBS
from gpumix.integrations.trackers.metric_names import (
    CHECKPOINT_NAMES,
    CLASS_NAMES,
    DEVICE_NAMES,
    STEP_NAMES,
)
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.cluster.kernels import EfficiencySpec
from gpumix.schema.job.search_space import Space
from gpumix.schema.job.trackers import Trackers
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.plan.stage import Mode, Stage, StageInput, Worker
from helpers.pages import ROOT

COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
TRACKERS = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", [Plan, Stage, Worker, StageInput, Mode, Collectives])
def test_every_field_is_there(part):
    missing = [name for name in part.model_fields if f"`{name}`" not in PAGE]
    assert not missing


def test_every_suspect_is_there():
    """Those of jobs that are keys of a section go by its name."""
    keys = {*Space.model_fields, *EfficiencySpec.model_fields}
    missing = {name for name in {*OF_FUNCTIONS, *OF_JOBS} - keys if f"`{name}`" not in COMMANDS}
    assert not missing


def test_every_remark_is_there():
    assert not [name for name in get_args(RemarkName) if f"`{name}`" not in COMMANDS]


def test_every_strategy_is_there():
    lines = [line for line in COMMANDS.splitlines() if line.startswith("| `--strategy")]
    assert len(lines) == 2  # of `plan` and of `train`
    assert not [name for name in STRATEGIES for line in lines if name not in line]


def test_every_tracker_is_there_and_every_name_that_it_gets():
    assert not [
        name for name in Trackers.model_fields if f"| `{name}` | `pip install" not in TRACKERS
    ]
    groups = {"train": STEP_NAMES, "device/ID": DEVICE_NAMES, "checkpoint": CHECKPOINT_NAMES}
    names = [f"{group}/{what}" for group, of in groups.items() for what in of.values()]
    assert not [name for name in names if f"`{name}`" not in TRACKERS]
    assert not [what for what in CLASS_NAMES.values() if f"/{what}`" not in TRACKERS]


def test_every_concept_says_where_it_is_from():
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    _, *concepts, sources = page.split("\n## ")
    assert not [one.partition("\n")[0] for one in concepts if "*From:*" not in one]
    listed = set(re.findall(r"(?m)^(\d+)\. ", sources))
    cited = {number for one in concepts for number in re.findall(r"\[(\d+)\](?!\()", one)}
    assert cited == listed


def test_every_benchmark_and_all_results_are_listed():
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in folder.glob("*.py") if path.name != "common.py"]
    assert not [name for name in scripts if f"| `{name}` |" not in page]
    results = [path.name for path in (folder / "results").glob("*.md")]
    assert results and not [name for name in results if f"(results/{name})" not in page]


def test_every_package_is_in_the_house():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    packages = [f.parent.name for f in (ROOT / "src" / "gpumix").glob("*/__init__.py")]
    assert not [name for name in packages if f"\n      {name}/ " not in page]
