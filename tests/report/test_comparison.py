"""Two runs side by side."""

from __future__ import annotations

import pytest

from gpumix.report.comparison import RunComparison, compare_runs
from gpumix.report.comparison_page import render_comparison
from gpumix.report.run import Run
from helpers.runs.folders import (
    BATCH,
    STEP_S,
    check_alone,
    event_line,
    planned,
    read,
    run_of,
    step_line,
)


def peaks(step: int, peak_bytes: int) -> str:
    name = planned().workers[0].device_class
    return event_line("classes", step, classes=[{"device_class": name, "peak_bytes": peak_bytes}])


@pytest.fixture
def both(tmp_path) -> tuple[Run, Run]:
    """The second takes half the time, has a lower loss, and ends earlier."""
    first = [step_line(n, loss=5.0 / n) for n in range(1, 9)]
    second = [step_line(n, loss=4.0 / n, step_s=STEP_S / 2) for n in range(1, 7)]
    other = planned().model_copy(update={"strategy": "even"})
    return (
        run_of(tmp_path / "slow", [*first, peaks(8, 4 * 2**20)], state="finished"),
        run_of(tmp_path / "fast", [*second, peaks(6, 6 * 2**20)], state="finished", plan=other),
    )


@pytest.fixture
def found(both) -> RunComparison:
    return compare_runs(*both)


def test_the_verdict_is_of_speed_and_of_loss_at_a_common_step(found):
    assert found.verdict == (
        "fast is 2.00× as fast as slow; loss at step 6: 0.8333 in slow, 0.6667 in fast"
    )


def test_a_run_is_like_itself(both):
    found = compare_runs(both[0], both[0])
    assert found.verdict == "both runs are equally fast; the same loss at step 8 (0.6250)"
    assert (found.plans, found.jobs) == ((), ())
    assert found.names == (str(both[0].folder), str(both[0].folder))


def test_plans_without_steps_are_compared_by_predictions(tmp_path):
    found = compare_runs(run_of(tmp_path / "one"), run_of(tmp_path / "two"))
    assert found.verdict == "both runs are equally fast (predicted)"
    read_of(found)


def test_a_run_without_a_speed(tmp_path):
    bare = planned().model_copy(update={"prediction": None, "reasons": None})
    found = compare_runs(run_of(tmp_path / "one"), run_of(tmp_path / "two", plan=bare))
    assert found.verdict == "the speed of one run is unknown"
    read_of(found)


def test_lines_are_what_differs(found):
    verdict, head, *rows = found.lines()
    assert verdict == found.verdict
    assert head.split() == ["slow", "fast"]
    cells = {row[:30].strip(): row[30:].split() for row in rows}
    tokens = BATCH * planned().sequence_length
    rate = tokens / STEP_S
    by_name = {row.partition("  ")[0]: row.split("  ") for row in rows}
    texts = [text.strip() for text in by_name["tokens/s"] if text.strip()]
    assert texts == ["tokens/s", f"{rate:,.0f}", f"{2 * rate:,.0f}", "+100%"]
    assert [t.strip() for t in by_name["strategy"] if t.strip()] == ["strategy", "optimal", "even"]
    assert "ZeRO stage" not in by_name and cells
    name = planned().workers[0].device_class
    (memory,) = (row for row in rows if row.startswith(f"{name}: memory"))
    assert "4.0 MiB" in memory and "6.0 MiB" in memory and memory.endswith("+50%")


def read_of(found: RunComparison):
    from helpers.runs.folders import Read

    page = Read()
    page.feed(render_comparison(found))
    page.close()
    assert (page.wrong, page.open) == ([], [])
    check_alone(page)
    return page


def test_the_page_has_both_runs(found):
    page = read_of(found)
    assert [a["id"] for a in page.named("section")] == [
        "answer", "curves", "memory", "figures", "plans", "jobs",
    ]  # fmt: skip
    assert found.verdict in page.text
    for name, loss in (("slow", "0.6250 at step 8"), ("fast", "0.6667 at step 6")):
        assert f"{name}, {loss}" in page.text  # of the curves, one over the other
    assert "at least one of the runs has no job" in page.text
    lines = [a for a in page.named("polyline") if a["class"] in ("line-measured", "line-b")]
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["</p><script>alert(1)</script>", '"><img src=x onerror=a()>'])
def test_names_of_runs_are_text(tmp_path, name):
    lines = [step_line(n) for n in range(1, 5)]
    one = run_of(tmp_path / name.replace("/", ""), lines, state="finished")
    page = read_of(compare_runs(one, run_of(tmp_path / "two", lines, state="finished")))
    assert name.replace("/", "") in page.text


def test_numbers_are_those_of_the_single_pages(both, found):
    """Of each run, as on its own page."""
    page = read_of(found).text
    for run in both:
        own = read(run).text
        rate = f"{run.figures.tokens_per_s:,.0f}"
        assert rate in own and rate in page
