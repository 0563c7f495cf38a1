"""The command of the proof: budget, limits, what is taken over, and lines whatever happens.

Stages are small scripts here, started as stages are whose processes cannot be forked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.waiting import wait_until
from proof.command import Proof, Wanted
from proof.entry import Task
from proof.lines import RESULTS, Bar, Lines, Stamp, append, ended_stages, flat, is_true, read
from proof.stages import STAGES, Stage
from proof.starter import Starter, members

STAMP = Stamp("cpu", "2.11.0", "abc")
WELL = """
print("all is well", flush=True)
Lines(Path(results), stamp).write(stage, "stage", {"speed": 2.0}, (Bar("speed", least=1.0),), s=0.1)
"""
MISSED = """
Lines(Path(results), stamp).write(stage, "stage", {"speed": 0.5}, (Bar("speed", least=1.0),), s=0.1)
"""
RAISES = "print('before it'); raise ValueError('a fault of the stage')"
SILENT = "pass"
HALF = """
Lines(Path(results), stamp).write(stage, "first part", {"speed": 3.0}, s=0.1)
raise SystemExit(3)
"""
# Ignores SIGTERM, and so does a process that it starts.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(600)"])
print("group", __import__("os").getpid(), flush=True)
time.sleep(600)
"""
# Ends well, and leaves a process behind.
LEAVES = (
    """
import subprocess, sys, os
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("group", os.getpid(), flush=True)
"""
    + WELL
)


class ScriptStarter(Starter):
    """Stages are scripts, by name."""

    def __init__(self, scripts: dict[str, str]) -> None:
        super().__init__("cpu", STAMP, forks=False)
        self.scripts = scripts
        self.began: list[str] = []

    def _started(self, task: Task):
        self.began.append(task.stage)
        names = {"stage": task.stage, "results": str(task.results), "stamp": vars(STAMP)}
        begin = f"""
import sys, json
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks")!r})
from pathlib import Path
from proof.lines import Bar, Lines, Stamp
globals().update(json.loads({json.dumps(names)!r}))
stamp = Stamp(**stamp)
"""
        with task.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", begin + self.scripts[task.stage]],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def prove(
    folder: Path,
    scripts: dict[str, str],
    *,
    limit_s: float = 20.0,
    least_s: float = 0.0,
    budget_s: float = 300.0,
    done: Path | None = None,
    place="gpu",
):
    """The figures, the lines by stage and measurement, and which stages began."""
    starter = ScriptStarter(scripts)
    stages = [Stage(name, limit_s, least_s) for name in scripts]
    wanted = Wanted(place, folder, done, budget_s, STAMP)
    figures = Proof(wanted, stages, starter).run()
    lines = {(one["stage"], one["what"]): one for one in read(folder / RESULTS)}
    return figures, lines, starter.began


def test_a_line_says_all_that_is_asked_for(tmp_path):
    lines = Lines(tmp_path / RESULTS, STAMP)
    nvml = {"sm_clock_mhz": [1, 2], "power_w": [3, 4], "temp_c": [5, 6]}
    lines.write("env", "stage", {"a": 1}, (Bar("a", least=1),), s=0.5, **nvml)
    (line,) = read(tmp_path / RESULTS)
    assert line.keys() == {
        *("stage", "what", "ok", "figures", "bar", "s", "device", "torch", "commit"),
        *("sm_clock_mhz", "power_w", "temp_c", "error"),
    }
    assert (line["ok"], line["bar"], line["error"]) == (True, {"a": ">= 1: met"}, "")


@pytest.mark.parametrize(
    "bar, value, device, ok",
    [
        (Bar("x", most=1.0), 1.0, "cpu", True),
        (Bar("x", most=1.0), 1.1, "cpu", False),
        (Bar("x", most=1.0, judges="gpu"), 1.1, "cpu", True),
        (Bar("x", most=1.0, judges="gpu"), 1.1, "NVIDIA T4", False),
        (Bar("x", least=9, judges="hopper"), 1, "NVIDIA T4", True),
        (Bar("x", least=9, judges="hopper"), 1, "NVIDIA H100 80GB HBM3", False),
        (Bar("x", most=1.0), {"a": 0.5, "b": 2.0}, "cpu", False),
        (Bar("x", most=1.0), None, "cpu", True),
        (Bar("x", most=1.0), float("nan"), "cpu", False),
        (is_true("x"), False, "cpu", False),
        (is_true("x"), True, "cpu", True),
    ],
)
def test_a_bar_fails_where_it_judges(tmp_path, bar, value, device, ok):
    stamp = Stamp(device, "2.11.0", "abc")
    assert Lines(tmp_path / RESULTS, stamp).write("s", "w", {"x": value}, (bar,))["ok"] is ok


def test_figures_are_flat():
    lines = [
        {"stage": "speed", "what": "plain loop", "figures": {"tokens/s": 5.0, "names": ["a"]}},
        {"stage": "speed", "what": "stage", "figures": {"ratio": 2, "of": {"a": 1}, "no": None}},
    ]
    assert flat(lines) == {"speed_plain_loop_tokens_s": 5.0, "speed_ratio": 2}


def test_a_figure_that_the_stage_tells_again_is_there_once():
    lines = [
        {"stage": "env", "what": "fork", "figures": {"fork_ok": True, "s": 1.0}},
        {"stage": "env", "what": "stage", "figures": {"fork_ok": True, "s": 2.0}},
    ]
    assert flat(lines) == {"env_fork_ok": True, "env_fork_s": 1.0, "env_s": 2.0}


@pytest.mark.parametrize(
    "bars, said",
    [
        ((Bar("x", least=1.0), Bar("y", least=1.0)), "bars: 1 met, 1 not measured"),
        ((Bar("x", least=1.0), Bar("y", judges="gpu")), "bars: 1 met, 1 not tested here"),
        ((Bar("x", least=9, judges="gpu"), Bar("y", judges="gpu")), "not tested here"),
        ((Bar("x", least=9),), "stage x >= 9: missed"),
    ],
)
def test_what_a_device_cannot_test_is_no_bar_met(tmp_path, bars, said):
    words = [f"Bar({b.figure!r}, {b.least}, None, {b.judges!r})" for b in bars]
    script = f"""
Lines(Path(results), stamp).write(stage, "stage", {{"x": 2.0}}, [{", ".join(words)}], s=0.1)
"""
    figures, _, _ = prove(tmp_path, {"one": script})
    assert f" s, {said}\n" in (tmp_path / "log.txt").read_text()
    assert figures["not_tested"] == sum(bar.judges == "gpu" for bar in bars)


def test_each_stage_has_a_line_whatever_happens_to_it(tmp_path):
    scripts = {"well": WELL, "missed": MISSED, "raises": RAISES, "silent": SILENT, "half": HALF}
    figures, lines, began = prove(tmp_path, {**scripts, "last": WELL})
    assert began == [*scripts, "last"]
    ok = {stage: line["ok"] for (stage, what), line in lines.items() if what == "stage"}
    assert ok == {
        **dict.fromkeys(("well", "last"), True),
        **dict.fromkeys(("missed", "raises", "silent", "half"), False),
    }
    assert "a fault of the stage" in lines["raises", "stage"]["error"]
    assert "before it" in lines["raises", "stage"]["error"]
    assert lines["missed", "stage"]["error"] == ""
    assert "exit code 3" in lines["half", "stage"]["error"]
    assert lines["half", "first part"]["figures"] == {"speed": 3.0}
    assert (figures["stages"], figures["failed"], figures["skipped"]) == (6, 4, 0)
    assert figures["half_first_part_speed"] == 3.0
    assert "all is well" in (tmp_path / "log.txt").read_text()


def test_a_stage_at_its_limit_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("proof.starter.ENDS_S", 0.5)
    _, lines, began = prove(tmp_path, {"stubborn": STUBBORN, "next": WELL}, limit_s=2.0)
    assert began == ["stubborn", "next"]
    assert "ended at its limit of 2 s" in lines["stubborn", "stage"]["error"]
    assert lines["next", "stage"]["ok"]
    assert not list(members(_group_in(tmp_path)))


def test_what_a_stage_leaves_behind_is_ended(tmp_path):
    _, lines, _ = prove(tmp_path, {"leaves": LEAVES})
    assert lines["leaves", "stage"]["ok"]
    assert not list(members(_group_in(tmp_path)))


def _group_in(folder: Path) -> int:
    words = (folder / "log.txt").read_text().split()
    return int(words[words.index("group") + 1])


def test_a_stage_that_does_not_fit_is_skipped_and_said_to_be(tmp_path):
    figures, lines, began = prove(tmp_path, {"long": WELL}, least_s=50.0, budget_s=30.0)
    assert began == []
    assert lines["long", "skipped"]["ok"] is None
    assert (figures["skipped"], figures["failed"]) == (1, 0)


@pytest.mark.extended
def test_stages_get_no_more_than_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("proof.starter.ENDS_S", 0.5)
    monkeypatch.setattr("proof.command.RESERVE_S", 1.0)
    _, lines, _ = prove(tmp_path, {"first": STUBBORN, "second": WELL}, budget_s=4.0, least_s=2.5)
    assert "at its limit of 3 s" in lines["first", "stage"]["error"]
    assert ("second", "skipped") in lines


def test_a_call_goes_on_where_an_earlier_one_was(tmp_path):
    """What ended is left out, well or not; what had an error, was skipped or half done is not."""
    scripts = {"well": WELL, "missed": MISSED, "raises": RAISES, "half": HALF, "new": WELL}
    first = dict(list(scripts.items())[:4])
    prove(tmp_path / "first", first)
    done = tmp_path / "done.jsonl"
    done.write_text((tmp_path / "first" / RESULTS).read_text() + '{"stage": "cut o')
    mended = {**scripts, "raises": WELL, "half": WELL}
    figures, lines, began = prove(tmp_path / "second", mended, done=done)
    assert began == ["raises", "half", "new"]
    assert figures["failed"] == 1  # the one that missed its bar
    assert lines["missed", "stage"]["figures"] == {"speed": 0.5}
    again, _, none = prove(tmp_path / "third", mended, done=tmp_path / "second" / RESULTS)
    assert none == []
    assert again["stages"] == 5
    same, _, none = prove(tmp_path / "third", mended, done=tmp_path / "third" / RESULTS)
    assert none == []
    assert same["stages"] == 5


def test_another_commit_counts_for_nothing(tmp_path):
    prove(tmp_path, {"well": WELL})
    assert ended_stages(tmp_path / RESULTS, "abc").keys() == {"well"}
    assert not ended_stages(tmp_path / RESULTS, "def")
    assert not ended_stages(tmp_path / "nothing.jsonl", "abc")


def test_only_the_lines_of_the_call_that_ended_are_taken_over(tmp_path):
    """A stage that was cut off once leaves lines of measurements, which no later call has made."""
    cut_off = {"stage": "speed", "what": "plain", "ok": True, "figures": {"x": 1}, "commit": "abc"}
    ended = {**cut_off, "what": "stage", "error": "killed"}
    again = [{**cut_off, "figures": {"x": 2}}, {**ended, "error": ""}]
    append(tmp_path / RESULTS, [cut_off, ended, *again])
    assert ended_stages(tmp_path / RESULTS, "abc") == {"speed": again}


def test_limits_fit_a_budget_of_seven_minutes():
    assert sum(stage.limit_s or 0 for stage in STAGES) <= 420
    assert all(stage.limit_s is None or stage.least_s <= stage.limit_s for stage in STAGES)


def test_members_of_a_group_are_found():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert list(members(process.pid)) == [process.pid]
    finally:
        process.kill()
        # It has ended, though nobody has asked for it yet.
        wait_until(lambda: not list(members(process.pid)), 10)
        process.wait()
    assert os.getpid() in list(members(os.getpgrp()))
