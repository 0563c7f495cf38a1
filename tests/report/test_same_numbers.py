"""One number per fact: a trained run's live table, final summary, `top`, page, `--json`,
`progress.json` and trackers show the same figures, taken from their texts."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from gpumix.integrations.trackers.metric_names import convert_line
from gpumix.integrations.trackers.prometheus import labels_of, metric_of
from gpumix.integrations.trackers.tracker import Numbers
from gpumix.report.facts import RunFacts
from gpumix.report.live import render_frame
from gpumix.report.run import Run, read_run
from gpumix.train.run_figures import words
from gpumix.train.run_figures.display import Display
from gpumix.train.run_figures.figures import RunFigures
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log.metrics import RunEvent
from helpers.runs.folders import read
from helpers.runs.jobs import EMULATED, FEW_PLANS, gpumix, write_job

STEPS, WIDTH = 9, 200
SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Trained:
    """A run's folder, and what `gpumix train` printed."""

    folder: Path
    summary: dict
    printed: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("same")
    job = write_job(
        folder,
        cluster=EMULATED,
        max_steps=STEPS,
        logging_steps=3,
        eval_steps=4,
        eval_batches=1,
        techniques=FEW_PLANS,
        advanced={"profile_cache": "profiles", "profile_budget": 2},
    )
    done = gpumix("train", job, "--json", "--allow", "toys", folder=folder)
    assert done.code == 0, done.err
    return Trained(folder / "run", json.loads(done.out), done.err)


@pytest.fixture(scope="module")
def run(trained) -> Run:
    return read_run(trained.folder)


def frame(run: Run) -> str:
    screen = Console(file=io.StringIO(), width=WIDTH)
    screen.print(render_frame(RunFacts(run), width=WIDTH))
    return screen.file.getvalue()


def logged_again(run: Run, folder: Path, until: int) -> tuple[str, RunLog]:
    """Log the first steps of a run once more; return what the live table shows at their end."""
    screen = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system=None)
    windows = {one.step: list(one.classes) for one in run.history.windows}
    events = {one.step: one for one in run.history.events if one.event == "plan"}
    with pytest.raises(KeyboardInterrupt), RunLog(folder, run.plan, STEPS) as log:
        with Display(log, 1, "run", screen) as display:
            for record in run.history.steps[:until]:
                log.step(record)
                if record.step in windows:
                    log.classes(record.step, windows[record.step])
                if record.step in events:
                    log.tell(record.step, RunEvent("plan", dict(events[record.step].told), ""))
                display.step(record)
        raise KeyboardInterrupt  # the run is not over
    return screen.file.getvalue().rpartition("run\n")[2], log


def page_of(run: Run) -> str:
    return SPACE.sub(" ", read(run).text)


def speed_texts(figures: RunFigures) -> list[str]:
    assert figures.tokens_per_s and figures.slower_than_planned is not None
    return [
        words.format_token_rate(figures.tokens_per_s),
        f"{words.format_seconds(figures.step_s)} a step",
        words.describe_gap(figures.slower_than_planned),
    ]


def test_speed_is_the_same_in_all_texts(trained, run, tmp_path):
    live, _ = logged_again(run, tmp_path / "again", STEPS)
    final = trained.printed.partition(f"after {STEPS} steps")[0].splitlines()[-1]
    last_line = [line for line in trained.printed.splitlines() if line.startswith("step 9/9")][-1]
    for text in (live, final, frame(run), page_of(run)):
        for said in speed_texts(run.figures):
            assert said in text, said
    assert speed_texts(run.figures)[0] in last_line
    others = re.findall(r"[\d.,]+ tokens/s", frame(run))
    assert set(others) == {speed_texts(run.figures)[0]}  # and no other speed of this run


def rows_of(text: str, names: list[str]) -> dict[str, list[str]]:
    """The cells of each GPU type in the last table of a text."""
    found = {}
    for line in text.splitlines():
        for name in names:
            if re.match(rf"\s*\d+ × {name} ", line):
                found[name] = re.split(r"\s{2,}", line.strip())
    return found


def test_gpu_types_have_the_same_cells_in_all_tables(trained, run, tmp_path):
    live, _ = logged_again(run, tmp_path / "again", STEPS)
    names = [one.device_class for one in run.figures.classes]
    shown = [rows_of(text, names) for text in (live, trained.printed, frame(run))]
    assert shown[0] == shown[1] == shown[2]
    assert set(shown[0]) == set(names)
    page = page_of(run)
    for one in run.figures.classes:
        assert one.mfu is not None and one.peak_bytes and one.shares
        busy, mfu = words.format_fraction(one.busy_share), words.format_fraction(one.mfu)
        peak = words.format_bytes(one.peak_bytes)
        waits = words.format_fraction(one.shares.communication)
        assert {busy, mfu, peak, waits} <= set(shown[0][one.device_class])
        assert f"{busy} computing" in page and f"{waits} waiting for other GPUs" in page
        assert f"{one.device_class}: busy {busy}" in page
        assert f"{one.device_class}: MFU {mfu}" in page
        assert f"measured {peak}" in page
        assert f"{one.device_class}, {busy} over the run" in page  # the curve


def test_busy_is_the_time_spent_computing(run):
    for one in run.figures.classes:
        assert one.shares is not None and one.busy_share == pytest.approx(one.shares.compute)


def test_json_and_files_have_the_same_numbers(trained, run):
    figures = run.figures.as_dict()
    progress = json.loads((trained.folder / "progress.json").read_text())
    assert {name: progress[name] for name in figures} == figures
    told = json.loads(gpumix("report", trained.folder, "--json", folder=trained.folder).out)
    assert told["figures"] == figures
    again = json.loads(gpumix("top", trained.folder, "--json", folder=trained.folder).out)
    assert again["figures"] == figures
    assert again["classes"] == told["classes"]
    summary = trained.summary
    for name in ("tokens_per_s", "step_s", "predicted_step_s", "slower_than_planned"):
        assert summary[name] == figures[name]
    for of_class, shown in zip(summary["classes"], told["classes"], strict=True):
        for name in ("busy_share", "mfu", "hfu", "tokens_per_s", "peak_bytes", "shares"):
            assert of_class[name] == shown[name], name


def test_trackers_are_told_the_same_numbers(trained, run):
    """By names of Prometheus."""
    values: dict[str, float] = {}
    for line in (trained.folder / "metrics.jsonl").read_text().splitlines():
        for told in convert_line(json.loads(line)):
            if isinstance(told, Numbers):
                values |= {
                    metric_of(series): value
                    for series, value in told.values.items()
                    if not labels_of(series)
                }
    figures = run.figures
    assert values["run_tokens_per_second"] == figures.tokens_per_s
    assert values["run_step_seconds"] == figures.step_s
    assert values["run_slower_than_planned_ratio"] == figures.slower_than_planned
    assert values["run_remaining_seconds"] == figures.remaining_s == 0


@pytest.mark.parametrize("until", [4, 7])
def test_the_time_left_is_the_same_in_all_views(run, tmp_path, until):
    folder = tmp_path / "again"
    live, log = logged_again(run, folder, until)
    (folder / "plan.json").write_bytes((run.folder / "plan.json").read_bytes())
    log.progress("training")
    now = read_run(folder)
    left = words.format_remaining((STEPS - until) * (now.figures.step_s or 0.0))
    assert left
    for text in (live, frame(now), page_of(now)):
        assert left in text
    assert json.loads((folder / "progress.json").read_text())["remaining_s"] == pytest.approx(
        now.figures.remaining_s
    )


def test_what_to_do_is_the_same_in_all_views(trained, run):
    advice = run.advice
    assert advice
    printed, page, top = (
        SPACE.sub(" ", text) for text in (trained.printed, page_of(run), frame(run))
    )
    for one in advice[:3]:
        for text in (printed, page, top):
            assert f"{one.what}: {one.why}" in re.sub(" : ", ": ", text), one.what
