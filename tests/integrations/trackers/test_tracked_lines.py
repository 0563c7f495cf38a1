"""What the lines of a run are called in trackers."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from gpumix.integrations.trackers import metric_names
from gpumix.integrations.trackers.metric_names import convert_line
from gpumix.integrations.trackers.tracker import Numbers, TrackedEvent, strip_secrets
from gpumix.train.monitor.step_timer import TimeShares
from gpumix.train.run_log.metrics import ClassRecord, RankRecord, StepRecord

SHARES = TimeShares(compute=0.6, input=0.1, communication=0.2, copies=0.05, other=0.05)
STEP = StepRecord(
    step=3,
    loss=2.5,
    learning_rate=1e-3,
    gradient_norm=0.7,
    step_s=0.5,
    tokens_per_s=128.0,
    tokens=192,
    shares=SHARES,
)
RANK = RankRecord(
    device="fast/0",
    device_class="fast",
    busy_share=0.9,
    peak_bytes=1000,
    overruns=0,
    sent_bytes=5.0,
    shares=SHARES,
    tokens_per_s=64.0,
    mfu=0.4,
    hfu=0.5,
)


def line(event: str, **of_event):
    return {"event": event, "time": 7.0, "step": 3, **of_event}


def only(found) -> Numbers:
    [numbers] = found
    assert isinstance(numbers, Numbers)
    assert (numbers.step, numbers.time_s) == (3, 7.0)
    return numbers


def test_a_step():
    assert only(convert_line(line("step", **asdict(STEP)))).by_name() == {
        "train/loss": 2.5,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 0.7,
        "train/step_s": 0.5,
        "train/tokens_per_s": 128.0,
        "train/tokens": 192,
        "train/share/compute": 0.6,
        "train/share/input": 0.1,
        "train/share/communication": 0.2,
        "train/share/copies": 0.05,
        "train/share/other": 0.05,
    }


def test_each_device():
    found = only(convert_line(line("ranks", ranks=[asdict(RANK)]))).by_name()
    assert found["device/fast/0/busy"] == 0.9
    assert found["device/fast/0/mfu"] == 0.4
    assert found["device/fast/0/peak_bytes"] == 1000
    assert found["device/fast/0/share/input"] == 0.1


def test_what_is_not_known_is_left_out():
    unknown = asdict(RANK) | {"mfu": None, "hfu": None, "peak_bytes": None, "shares": None}
    found = only(convert_line(line("ranks", ranks=[unknown]))).by_name()
    assert set(found) == {
        f"device/fast/0/{what}" for what in ("busy", "tokens_per_s", "retries", "sent_bytes")
    }


def test_of_very_many_devices_only_classes_are_told():
    ranks = [asdict(RANK) | {"device": str(n)} for n in range(metric_names.MAX_DEVICES + 1)]
    assert list(convert_line(line("ranks", ranks=ranks))) == []
    assert only(convert_line(line("ranks", ranks=ranks[1:])))


def test_each_class_and_evaluations():
    of_class = ClassRecord("fast", 2, 6, 0.8, 10, 12, 0, shares=SHARES, mfu=0.3)
    found = only(convert_line(line("classes", classes=[asdict(of_class)]))).by_name()
    assert found["class/fast/busy"] == 0.8
    assert found["class/fast/planned_peak_bytes"] == 12
    assert only(convert_line(line("evaluation", loss=2.0))).by_name() == {"eval/loss": 2.0}


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (StepRecord, metric_names.STEP_NAMES),
        (ClassRecord, metric_names.CLASS_NAMES),
        (RankRecord, metric_names.DEVICE_NAMES),
    ],
)
def test_what_is_looked_for_is_what_records_have(record, names):
    assert set(names) <= {field.name for field in fields(record)}


@pytest.mark.parametrize(
    ("happened", "text"),
    [
        (
            line("restart", resumed_from=2, why="rank 1 was killed", seconds=4.0),
            "training again after 4.00 s, from step 2: rank 1 was killed",
        ),
        (
            line("restart", resumed_from=2, why="memory", decided="planning again", seconds=4.0),
            "training again after 4.00 s, from step 2: memory; planning again",
        ),
        (
            line("input-bound", ranks=[{"device": "a", "share": 0.3, "limit": "cores"}]),
            "GPUs wait for data, in parts of each step: a 30% (cores)",
        ),
        (
            line(
                "plan",
                why="device 'b' is left out",
                live=False,
                samples={"a": 8},
                samples_before={"a": 6, "b": 2},
                shares={"a": 1.0},
                shares_before={"a": 0.75, "b": 0.25},
            ),
            "device 'b' is left out; samples: a 6 to 8, b 2 to none; of the state: a 75.0% to "
            "100.0%, b 25.0% to none",
        ),
        (line("rebalanced", step_s=1.0, step_before_s=2.0), "step s 1.0, step before s 2.0"),
    ],
)
def test_events_are_told_in_words(happened, text):
    [event] = convert_line(happened)
    assert isinstance(event, TrackedEvent)
    assert (event.kind, event.text) == (happened["event"], text)


def test_a_checkpoint_is_an_event_with_numbers():
    numbers, event = convert_line(line("checkpoint", path="/x", seconds=1.0, stalled_s=0.5))
    assert numbers.by_name() == {"checkpoint/seconds": 1.0, "checkpoint/stalled_s": 0.5}
    assert event.kind == "checkpoint"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:secret@host:5000/path", "http://host:5000/path"),
        ("http://127.0.0.1:7860?write_token=secret", "http://127.0.0.1:7860"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("postgresql://me:secret@db/mlflow", "postgresql://db/mlflow"),
    ],
)
def test_addresses_are_shown_without_what_is_secret(address, shown):
    assert strip_secrets(address) == shown
