"""Each line of a run is told once, whatever becomes of the run and of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpumix.integrations.trackers.follower import Follower, TrackerPosition, lock_position
from gpumix.train.run_log.progress import write_text_atomically


def line(event: str, step: int, time: float = 1.0, **fields: Any) -> str:
    return json.dumps({"event": event, "step": step, "time": time, **fields}) + "\n"


def told(follower: Follower, marks: TrackerPosition) -> list[tuple[str, int]]:
    return [(one["event"], one["step"]) for one in follower.lines() if marks.passes(one)]


class Running:
    """A run that writes its file as `RunLog` does, and starts again where it did not save."""

    def __init__(self, path: Path) -> None:
        self.path, self.step, self.clock = path, 0, 10.0
        self.lines: list[str] = []
        self.events: list[tuple[str, int]] = []

    def does_a_step(self, saves: bool) -> None:
        self.step += 1
        self.clock += 1.0
        self.writes(line("step", self.step, self.clock, loss=1.0))
        if saves:
            self.happens("checkpoint")

    def happens(self, kind: str) -> None:
        self.clock += 0.1
        self.events.append((kind, self.step))
        self.writes(line(kind, self.step, self.clock))

    def writes(self, text: str) -> None:
        self.lines.append(text)
        with self.path.open("a") as file:
            file.write(text)

    def starts_again(self, lost: int) -> None:
        self.step = max(0, self.step - lost)
        self.lines = [one for one in self.lines if json.loads(one)["step"] <= self.step]
        write_text_atomically(self.path, "".join(self.lines))
        self.does_a_step(saves=False)
        self.happens("restart")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.booleans()),
            st.tuples(st.just("again"), st.integers(0, 5)),
            st.tuples(st.sampled_from(["look", "leave"]), st.none()),
        ),
        max_size=40,
    )
)
def test_no_step_and_no_event_is_told_twice_or_left_out(tmp_path_factory, happened):
    """The one who follows looks when it likes, and may be another one each time it looks."""
    folder = tmp_path_factory.mktemp("run")
    run = Running(folder / "metrics.jsonl")
    follower, marks, found = Follower(run.path), TrackerPosition(since=5.0), []
    for what, how in [*happened, ("look", None)]:
        if what == "step":
            run.does_a_step(how)
        elif what == "again":
            found += told(follower, marks)
            run.starts_again(how)
        elif what == "look":
            found += told(follower, marks)
        else:
            marks.save(folder / "marks")
            follower.close()
            follower, marks = Follower(run.path), TrackerPosition.load(folder / "marks")
    follower.close()
    steps = [step for event, step in found if event == "step"]
    assert steps == list(range(1, max([*steps, run.step]) + 1))
    assert [one for one in found if one[0] != "step"] == run.events


def test_half_a_line_is_told_when_it_is_whole(tmp_path):
    path, marks = tmp_path / "metrics.jsonl", TrackerPosition()
    follower = Follower(path)
    assert told(follower, marks) == []
    whole = line("step", 1)
    path.write_text(whole[:10])
    assert told(follower, marks) == []
    with path.open("a") as file:
        file.write(whole[10:] + "no json\n" + '{"event": "step"}\n')
    assert told(follower, marks) == [("step", 1)]
    follower.close()


def test_what_another_run_left_in_the_folder_is_not_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line("step", 1, 1.0) + line("restart", 1, 1.5))
    follower, marks = Follower(path), TrackerPosition(since=2.0)
    assert told(follower, marks) == []
    write_text_atomically(path, line("step", 1, 3.0))
    assert told(follower, marks) == [("step", 1)]
    follower.close()


def test_a_tracker_that_is_new_to_a_run_is_told_all_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line("step", 1) + line("evaluation", 1) + line("step", 2))
    with lock_position(tmp_path, "tensorboard", since=0.0) as (marks, _):
        follower = Follower(path)
        assert told(follower, marks) == [("step", 1), ("evaluation", 1), ("step", 2)]
        follower.close()


def test_marks_are_kept_for_a_run_that_goes_on_only(tmp_path):
    with lock_position(tmp_path, "wandb", since=7.0) as (marks, path):
        marks.run, marks.steps = "abc", {"step": 5}
        marks.save(path)
    with lock_position(tmp_path, "wandb", since=0.0) as (marks, _):
        assert (marks.run, marks.done) == ("abc", 5)
    with lock_position(tmp_path, "wandb", since=9.0) as (marks, _):
        assert (marks.run, marks.done) == (None, 0)
