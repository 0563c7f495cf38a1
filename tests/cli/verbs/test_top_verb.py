"""`gpumix top`: one frame, and frames until a run ends."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from rich.console import Console

from gpumix.cli.verbs import top
from gpumix.report.run import read_run
from gpumix.train.checks.output_folder import lock_output
from gpumix.train.run_figures import words
from helpers.runs.verbs import gpumix
from helpers.training.staging import rows, staged_plan


def tell(folder, state: str, **changes) -> None:
    told = {"state": state, "why": "", "step": 5, "steps": 20, "loss": 0.6}
    told |= {"time": time.time()}
    (folder / "progress.json").write_text(json.dumps(told | changes))


def happens(folder, event: str, step: int, **told) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "step": step, **told}) + "\n")


def classes(folder) -> None:
    names = {"quick": 2, "tardy": 1}
    told = [
        {"device_class": name, "devices": n, "busy_share": 0.875, "mfu": 0.25, "hfu": 0.3,
         "peak_bytes": 3 * 2**20, "tokens_per_s": 512.0}
        for name, n in names.items()
    ]  # fmt: skip
    happens(folder, "classes", 5, classes=told)
    ranks = [
        {"device": f"quick-{n}", "device_class": "quick", "busy_share": 0.5} for n in range(20)
    ]
    happens(folder, "ranks", 5, ranks=ranks)


def test_a_run_without_a_plan_is_being_measured_or_is_none(run):
    later = (run / "plan.json").rename(run / "later.json")
    with lock_output(run, fresh=True):
        done = gpumix("top", run)
        assert (done.exit_code, done.stdout) == (0, f"{top.MEASURING}\n")
        made = threading.Timer(0.3, later.rename, [run / "plan.json"])
        made.start()
        top._wait_for_plan(run, every_s=0.05)
        made.join()
        assert (run / "plan.json").exists()
        assert "450K parameters" in gpumix("top", run).stdout
    (run / "plan.json").unlink()
    done = gpumix("top", run)
    assert done.exit_code == 2
    assert "this is no run" in done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_has_all_that_one_looks_for(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    tell(run, "training")
    classes(run)
    happens(run, "restart", 4, resumed_from=3, why="rank 1 died", seconds=2.0)
    done = gpumix("top", run)  # stdout is no terminal
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width
    for said in (
        "running", "step 5 of 20, 8 s left", "loss 0.6000", "2,048 tokens/s", "500 ms a step",
        "an even split", "plan optimal", "87.5%", "25.0%", "3.0 MiB", "quick-15",
        "and 4 more GPUs", "Restarted from step 3",
    ):  # fmt: skip
        assert said in " ".join(done.stdout.split()), said
    assert any("30.0%" in line for line in lines) == (width == 120)


def test_the_course_of_a_run_is_one_line(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    tell(run, "training")
    losses = (5.0, 4.0, 3.0, 2.0, 1.0)
    for step, loss in enumerate(losses, 1):
        told = {"loss": loss, "step_s": 0.5, "tokens_per_s": 100.0}
        happens(run, "step", step, **told)
    (line,) = [one for one in gpumix("top", run).stdout.splitlines() if one.startswith("loss █")]
    assert line.split()[1] == "█▆▅▃▁"


@pytest.mark.parametrize(
    ("used", "expected", "shown"),
    [(6, 9, "██████░░░┃░░"), (12, 12, "███████████┃"), (0, None, "░░░░░░░░░░░░"), (None, 3, "–")],
)
def test_memory_is_a_bar_with_what_was_planned(used, expected, shown):
    assert words.draw_gauge(used, expected, 12) == shown


def test_many_steps_are_as_wide_as_few():
    assert words.draw_sparkline([float(n) for n in range(960)]) == words.draw_sparkline(
        list(map(float, range(24)))
    )
    assert words.draw_sparkline([]) == "" and words.draw_sparkline([2.0, 2.0]) == "▁▁"


def test_samples_of_stages_are_not_added_up(run):
    """Each stage computes a part of the units, of all samples."""
    plan = staged_plan("llama", rows([12], [8, 4]))
    plan.save(run / "plan.json")
    tell(run, "training")
    (name,) = {worker.device_class for worker in plan.workers}
    told = {"device_class": name, "devices": 3, "busy_share": 0.5}
    happens(run, "classes", 5, classes=[told])
    lines = gpumix("top", run).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith(f"3 × {name} "))
    assert row.split()[:4] == ["3", "×", name, "12"]


@pytest.mark.parametrize("state", [None, "finished", "failed", "interrupted", "restarting"])
def test_every_state_has_a_frame(run, state):
    if state is not None:
        tell(run, state, why="the disk is full")
    done = gpumix("top", run, "--once")
    assert done.exit_code == 0
    assert ("the disk is full" in done.stdout) == (state not in (None, "finished"))


def test_json_is_one_object(run):
    tell(run, "training")
    found = json.loads(gpumix("top", run, "--json").stdout)
    assert found["progress"]["step"] == 5
    assert found["answer"]["measured"]["tokens_per_s"] == pytest.approx(2048.0)


def follow(folder, then: list) -> str:
    """What `top` shows on a terminal while `then` happens, one thing each time it waits."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False)

    sleep, own = top.time.sleep, threading.current_thread()

    def wait(seconds: float) -> None:
        if threading.current_thread() is own:
            then.pop(0)()
        else:  # of another test
            sleep(seconds)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(top.time, "sleep", wait)
        top._follow(folder, screen, 1.0)
    assert not then
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_it_ends_with_the_run(run):
    tell(run, "training")
    shown = follow(
        run, [lambda: tell(run, "training", step=6), lambda: tell(run, "finished", step=20)]
    )
    assert "step 6 of 20" in shown
    assert "finished" in shown


def test_a_run_that_starts_again_is_followed(run):
    """For a moment it has failed."""
    tell(run, "training")
    then = ["failed", "restarting", "training", "interrupted", "restarting", "failed", "failed"]
    follow(run, [lambda state=state: tell(run, state) for state in then])


def test_ctrl_c_ends_it(run):
    def interrupt() -> None:
        raise KeyboardInterrupt

    tell(run, "training")
    follow(run, [interrupt])


@pytest.mark.parametrize(("silent_s", "over"), [(10, False), (500, False), (700, True)])
def test_a_run_that_is_silent_for_long_is_over(run, silent_s, over):
    tell(run, "training", time=time.time() - silent_s)
    assert top.has_ended(read_run(run)) is over


def test_long_steps_are_waited_for(run):
    happens(run, "step", 6, loss=1.0, step_s=60.0, tokens_per_s=17.0)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[-1] + "\n")
    tell(run, "training", time=time.time() - 700)
    assert not top.has_ended(read_run(run))
