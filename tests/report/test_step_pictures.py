"""Pictures of steps: what is read from traces, and what is drawn of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumix.report.step_picture import (
    ActivityBar,
    Panel,
    draw_panels,
    find_passes,
    make_panel,
    read_panel,
)
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.plan.step_trace import Span, Trace, make_wait_span, make_work_span
from helpers.errors import raises

FAST, SLOW = "localhost: a (fast, emulated)", "localhost: b (slow, emulated)"


def work(kind, stage: int, batch: int, start_s: float, end_s: float, process: str = FAST) -> Span:
    unit = f"stage {stage}"
    return make_work_span(
        kind, unit, process=process, start_s=start_s, end_s=end_s, micro_batches=(batch - 1,)
    )


SPANS = [
    make_wait_span("other stage", process=SLOW, start_s=0, end_s=2),
    work("forward", 2, 1, 2, 3, SLOW),
    make_wait_span("message", process=SLOW, start_s=3, end_s=4),
    work("forward", 2, 1, 4, 5, SLOW),
    work("backward", 2, 1, 5, 8, SLOW),
    work("forward", 1, 1, 0, 2),
    work("send", 1, 1, 2, 2.5),
    make_wait_span("other stage", process=FAST, start_s=2, end_s=6),
    make_work_span("optimizer", "(root)", process=FAST, start_s=6, end_s=8),
]


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "some.json"
    Trace.of(SPANS).save(path)
    return path


def test_devices_are_read_with_their_stages_in_order(trace):
    panel = read_panel(trace)
    assert panel.title == "some"
    assert list(panel.devices) == ["stage 1: a (fast)", "stage 2: b (slow)"]
    assert panel.devices["stage 1: a (fast)"] == [
        ActivityBar("forward", 0, 2, stage=1, micro_batch=1),
        ActivityBar("idle", 2, 6), ActivityBar("update", 6, 8),
    ]  # fmt: skip


def test_idle_is_what_is_not_computed(trace):
    # One device computes 4 of 8 seconds, the other 5.
    assert read_panel(trace).idle_share == pytest.approx(1 - 9 / 16)


def test_a_pass_that_communication_cuts_is_one(trace):
    assert list(find_passes(read_panel(trace).devices["stage 2: b (slow)"])) == [
        ActivityBar("forward", 2, 5, stage=2, micro_batch=1),
        ActivityBar("backward", 5, 8, stage=2, micro_batch=1),
    ]  # fmt: skip


def test_of_a_pass_that_waits_the_longest_part_counts():
    begun, rest = (
        ActivityBar("forward", a, b, stage=1, micro_batch=3) for a, b in ((0, 1), (4, 6))
    )
    assert list(find_passes([begun, ActivityBar("idle", 1, 4), rest])) == [rest]


def test_steps_are_drawn_below_each_other_on_one_scale(trace, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    one, both = read_panel(trace), tmp_path / "pictures" / "both.png"
    half = Panel("half as long", {"c": [ActivityBar("forward", 0, 4)]})
    draw_panels([one, half], both)
    picture = imread(both)
    assert picture.shape[1] == 1200
    blue = (abs(picture[:, :, :3] - (0x56 / 255, 0xB4 / 255, 0xE9 / 255)) < 0.01).all(axis=2)
    widths = sorted(row.sum() for row in blue if row.sum() > 100)
    # The shorter step's only bar is half of the width; forward passes of the other a fourth.
    assert widths[-1] == pytest.approx(2 * widths[0], rel=0.05)


def test_a_trace_that_is_no_file_gives_the_same(trace):
    assert make_panel(Trace.of(SPANS), "some") == read_panel(trace)


def test_a_format_that_there_is_not_is_told(trace, tmp_path):
    pytest.importorskip("matplotlib")
    for name, told in (
        ("step.words", {"code": "picture-ending-unknown", "what": ".words"}),
        ("step", {"code": "picture-ending-unknown"}),
    ):
        with raises(InputError, **told) as caught:
            draw_panels([read_panel(trace)], tmp_path / name)
        assert "name it .png or .svg" in caught.value.fix
    (tmp_path / "file").touch()
    with raises(MachineError, code="picture-not-writable"):
        draw_panels([read_panel(trace)], tmp_path / "file" / "step.png")


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": 3}', '{"traceEvents": []}'])
def test_what_is_no_trace_is_said(text, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json"):
        read_panel(path)
