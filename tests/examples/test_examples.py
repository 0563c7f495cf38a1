"""Every example runs as its first lines say, and shows what they promise."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.util import find_spec

import pytest

from gpumix.report.step_picture import ActivityBar, Panel
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Trace
from gpumix.schema.reading.read import read_job
from helpers.scripts.example_runs import EXAMPLES, TORCHRUN, python
from helpers.training.staging import rows, staged_plan

sys.path.insert(0, str(EXAMPLES))

from four_strategies import STRATEGIES, row

pytestmark = pytest.mark.timeout(600)  # above the limits of the two runs that a test may start
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
JOBS = sorted(EXAMPLES.glob("*.yaml"))


def losses(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", out)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_opens_with_how_to_run_it(script):
    about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert about is not None
    assert f"    python examples/{script.name}" in about


@pytest.mark.parametrize("job", JOBS, ids=lambda p: p.stem)
def test_a_job_opens_with_how_to_run_it(job):
    text = job.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"gpumix train examples/{job.name}" in text
    assert read_job(job).data.text[0].is_dir()


@pytest.mark.extended
@pytest.mark.slow
def test_own_loop_has_the_same_losses_on_one_device_and_on_three(cache):
    alone = python("examples/own_loop.py", cache=cache)
    three = python(*TORCHRUN, "3", "examples/own_loop.py", cache=cache)
    assert "slow-1: " in three and "slow-1: " not in alone
    assert len(losses(alone)) == 3
    assert losses(three) == pytest.approx(losses(alone), abs=2e-3)
    assert losses(alone)[1] < losses(alone)[0]


@pytest.mark.extended
@pytest.mark.slow
def test_own_model_learns(cache):
    out = python("examples/own_model.py", cache=cache)
    errors = [float(found) for found in re.findall(r"error (\d+\.\d+)", out)]
    assert len(errors) == 3
    assert errors[-1] < errors[0] / 2


@pytest.mark.extended
@pytest.mark.slow
def test_compare_plans_shows_both_strategies_for_each_batch(cache):
    out = python("examples/compare_plans.py", cache=cache)
    found = re.findall(r"batch (\d+), (\w+): (\d+) ms a step", out)
    by_batch = {batch: {} for batch, _, _ in found}
    for batch, strategy, milliseconds in found:
        by_batch[batch][strategy] = float(milliseconds)
    assert list(by_batch) == ["8", "16", "32"]
    assert all(times["optimal"] < times["even"] for times in by_batch.values())


@pytest.mark.slow
@pytest.mark.extended
def test_resume_elsewhere_goes_on_with_the_losses(cache):
    """First it trains `gpt2-text.yaml`, as that says itself."""
    out = python("examples/resume_elsewhere.py", cache=cache)
    three, two = (
        [float(loss) for loss in re.findall(r"\d\.\d{4}", line)] for line in out.splitlines()
    )
    assert len(three) == len(two) == 3
    assert two[0] < three[-1]


def test_packing_saves_padding_and_gives_ranks_what_they_can_do(cache):
    out = python("examples/packing.py", cache=cache)
    padding = [float(found) for found in re.findall(r"([\d.]+)% padding", out)]
    assert len(padding) == 3 and padding[0] > 20 > 5 > max(padding[1:])
    assert all(0.97 < float(found) < 1.03 for found in re.findall(r"has ([\d.]+) times", out))


@pytest.mark.extended
@pytest.mark.slow
def test_four_strategies_come_to_one_loss_and_leave_traces_and_pictures(cache, tmp_path):
    """All six. Which is how fast is not compared: that is up to what else the machine does."""
    out = python("examples/four_strategies.py", "--out", tmp_path, cache=cache, timeout_s=280.0)
    assert "all strategies come to the same loss" in out
    rows = {cells[0]: cells for cells in rows_of(out)}
    assert list(rows) == [one.title for one in STRATEGIES]
    losses = [float(cells[-1]) for cells in rows.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    idle, peaks, sent = ({t: c[n] for t, c in rows.items()} for n in (3, 4, 5))
    percent = {title: int(cell.removesuffix("%")) for title, cell in idle.items()}
    # With one micro-batch one of four devices computes at a time.
    assert percent["model parallelism"] > percent["pipeline parallelism"]
    assert all(len(cell.replace("|", "").split()) == 4 for cell in peaks.values())
    # Messages are the same bytes in one micro-batch or in several, whole gradients are more.
    data, model, pipeline = (
        float(sent[f"{one} parallelism"]) for one in ("data", "model", "pipeline")
    )
    assert data > model == pytest.approx(pipeline, abs=0.11)
    plans = {one.name: Plan.load(tmp_path / f"{one.name}.json") for one in STRATEGIES}
    assert [[len(s.workers) for s in plans[name].stages] for name in ("data", "model")] == [
        [4], [1, 1, 1, 1]
    ]  # fmt: skip
    assert {w.micro_batch for w in plans["model"].workers} == {12}
    assert [stage.tensor for stage in plans["pipeline-tensor"].stages] == [2, 2]
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == ({*plans, "strategies"} if find_spec("matplotlib") else set())
    for name, plan in plans.items():
        passes = {e.name for e in Trace.load(tmp_path / name / "trace.json").traceEvents}
        assert len(plan.stages) == 1 or "forward stage 2" in passes


def test_peaks_stand_in_the_order_of_the_stages():
    """Whatever the order in which a run tells them, which is that of the cluster."""
    plan = staged_plan("gpt2", rows([6], [4, 2]))
    peaks = {"d1": 6, "d2": 7, "d0": 5}
    devices = [{"device": d, "peak_bytes": n << 20, "sent_bytes": 0} for d, n in peaks.items()]
    told = {"tokens_per_s": 1.0, "slower_than_planned": None, "devices": devices, "loss": 1.0}
    cells = row(
        STRATEGIES[0], plan, told, Panel("a step", {"d0": [ActivityBar("forward", 0.0, 1.0)]})
    )
    assert (cells[1], cells[4]) == ("d0 | d1 d2", "5 | 6 7")


def rows_of(printed: str) -> list[list[str]]:
    """The cells of a table's rows; a row goes on where its last cell is empty."""
    rows: list[list[str]] = []
    for line in printed.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[-1]:
                rows.append(cells)
            else:
                rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], cells)]
    return rows


@pytest.mark.extended
@pytest.mark.slow
def test_two_hosts_trains_under_torchrun(cache, tmp_path):
    """On one host, a smaller model on emulated devices: what it shows is the way to start it."""
    smaller = ("hidden_size=64", "intermediate_size=64", "num_hidden_layers=2")
    out = train(
        "two-hosts",
        *(f"model.config.{setting}" for setting in smaller),
        "model.config.num_attention_heads=2",
        "model.config.max_position_embeddings=64",
        "sequence_length=64",
        "global_batch_size=4",
        "precision=fp32",
        "cluster=[{class: any, emulate: 4 GFLOP/s, memory: 48 MiB, count: 2}]",
        "max_steps=2",
        f"output_dir={tmp_path}",
        cache=cache,
        launcher=(*TORCHRUN, "2"),
    )
    assert len(out["losses"]) == 2


def train(job, *settings, cache, launcher=()):
    """The summary that `gpumix train` prints as JSON; under torchrun one rank prints it."""
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ("-m", "gpumix", "train", f"examples/{job}.yaml", "--json", *sets)
    return json.loads(python(*launcher, *command, cache=cache))
