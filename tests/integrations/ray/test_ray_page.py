"""The lines of Ray's page run on a real Ray of this machine, with the workers that it has.

`make test-extras` installs Ray and runs them; `test_page_snippets.py` binds their calls.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from gpumix.report.run import read_run
from helpers.pages import replaced, shown, with_change

pytest.importorskip("ray")

from test_ray import (
    WORKERS,
    _sums,
    cluster,  # noqa: F401 - a fixture, as the others are
    folder,  # noqa: F401
    there,  # noqa: F401
    trained,  # noqa: F401
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run_lines(lines: str, **names: Any) -> dict[str, Any]:
    """What they leave, of what they do not say themselves."""
    exec(compile(lines, "lines", "exec"), names)
    return names


def test_the_line_for_a_job_trains_it(trained, folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("GPUMIX_ALLOW", "toys")
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "job.yaml", tmp_path)
    shutil.copytree(folder / "profiles", tmp_path / "profiles")
    lines = replaced(
        with_change(shown("ray.md", "diff", "gpumix train")), {'{"A100": 2, "T4": 4}': "WORKERS"}
    )
    run_lines(lines, WORKERS=WORKERS)
    assert [one.step for one in read_run(tmp_path / "run").history.steps] == [1, 2, 3, 4]


def test_workers_of_other_labels_and_resources_go_on_with_it(trained, there, monkeypatch):  # noqa: F811
    monkeypatch.setenv("GPUMIX_ALLOW", "toys")
    lines = replaced(
        shown("ray.md", "python", "Workers("),
        {
            "Workers(2": "Workers(1",
            '{"GPU": 1, "CPU": 8}': '{"fast": 1, "CPU": 1}',
            "Workers(4": "Workers(2",
            '{"GPU": 1, "CPU": 2}': '{"slow": 1, "CPU": 1}',
            "in(b, c)": "in(a, c)",
            "max_steps=1000": "max_steps=6",
        },
    )
    summary = run_lines(lines)["summary"]
    assert (summary["steps"], len(summary["losses"])) == (6, 2)


def test_the_line_for_a_function_calls_it_on_each_worker(cluster):  # noqa: F811
    lines = replaced(
        with_change(shown("ray.md", "diff", "torchrun")), {'{"A100": 2, "T4": 2}': "WORKERS"}
    )
    losses = run_lines(lines, WORKERS=WORKERS, main=_sums, config=1.0)["losses"]
    assert losses == [(str(rank), "3", 6.0) for rank in range(3)]
