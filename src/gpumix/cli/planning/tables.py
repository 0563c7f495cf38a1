"""Pages of comparisons: strategies and changed clusters. The answer first, in 80 columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from gpumix.hardware.estimates.gpu_catalogue import shorten_product
from gpumix.schema.units import hide_exact_bytes
from gpumix.train.console.plan_page import describe_source
from gpumix.train.console.tables import EMULATED, describe_estimates
from gpumix.train.console.text_page import (
    COLUMNS,
    Line,
    align_rows,
    iterate_labelled,
    join_lines,
    place_at_ends,
    round_estimate,
    round_seconds,
    wrap_line,
)

if TYPE_CHECKING:
    from gpumix.planner.cluster_change import ClusterForecast
    from gpumix.planner.compare import Comparison, StrategyRow

WORTH_TELLING = 0.01  # a smaller gain is told as none
COMPARED_DIGITS = 3  # of speeds that differ by little
BEHIND_STRATEGY = 14  # columns of the longest name, and a gap


# -- strategies ------------------------------------------------------------------------------------


def comparison_page(found: Comparison, assumed: str = "") -> Text:
    """Return the page of a comparison: the fastest, a row for each strategy, and why each lost."""
    return join_lines(_iterate_comparison(found, assumed))


def _iterate_comparison(found: Comparison, assumed: str) -> Iterator[Line]:
    best = next(row for row in found.rows if row.strategy == found.best)
    assert best.step_s is not None and best.tokens_per_s is not None, "the best has a plan"
    answer = f"{best.strategy} is fastest: {_show_speed(best.tokens_per_s, best.step_s)}"
    for text in place_at_ends(answer, describe_source(found.estimated)):
        yield text, "bold green"
    yield "", ""
    head = ("strategy", "tokens/s", "step", "times the best", "ZeRO", "least free memory")
    rows = [head, *(_strategy_cells(row, best.step_s) for row in found.rows)]
    yield from ((text, "") for text in align_rows(rows, left=(0, len(head) - 1)))
    yield "", ""
    for row in found.rows:
        yield from iterate_labelled(row.strategy, hide_exact_bytes(row.why), indent=BEHIND_STRATEGY)
    there = {room.device_class for row in found.rows for room in row.head_room}
    yield from _iterate_notes(found.emulated, assumed, found.estimated, there)


def _show_speed(tokens_per_s: float, step_s: float) -> str:
    return f"~{round_estimate(tokens_per_s)} tokens/s, {round_seconds(step_s)} per step"


def _strategy_cells(row: StrategyRow, fastest_s: float) -> tuple[str, ...]:
    if row.step_s is None or row.tokens_per_s is None:
        return (row.strategy, "no plan", "", "", "", "")
    times = row.step_s / fastest_s if fastest_s else 1.0
    tightest = min(row.head_room, key=lambda room: room.part, default=None)
    room = ""
    if tightest is not None:
        room = f"{tightest.part:.0%} on {shorten_product(tightest.device_class)}"
    return (
        row.strategy,
        round_estimate(row.tokens_per_s, COMPARED_DIGITS),
        round_seconds(row.step_s, COMPARED_DIGITS),
        f"{times:.2f}x",
        str(row.zero_stage),
        room,
    )


# -- changed clusters ------------------------------------------------------------------------------


def outlook_page(found: Sequence[ClusterForecast], assumed: str = "") -> Text:
    """Return the page of changed clusters: the best change, and a row for each, the present cluster
    first."""
    return join_lines(_iterate_outlook(found, assumed))


def _iterate_outlook(found: Sequence[ClusterForecast], assumed: str) -> Iterator[Line]:
    answer, style = _judge_changes(found)
    estimated = sorted({name for one in found for name in one.estimated})
    for text in place_at_ends(answer, describe_source(estimated)):
        yield text, style
    yield "", ""
    columns = _change_columns(found)
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    while "GPUs" in columns and max(map(len, align_rows(rows))) > COLUMNS:
        del columns["GPUs"]  # told by the change
        rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    yield from ((text, "") for text in align_rows(rows, left=(0, 1) if "GPUs" in columns else (0,)))
    notes = [one for one in found if one.why]
    if notes:
        yield "", ""
    for one in notes:
        told = f"{one.change}: {hide_exact_bytes(one.why)}"
        yield from ((text, "") for text in wrap_line(told, 2))
    there = {name for one in found for name in one.devices}
    yield from _iterate_notes(any(one.emulated for one in found), assumed, estimated, there)


def _judge_changes(found: Sequence[ClusterForecast]) -> Line:
    """Return the answer: the change that gives most, and its colour."""
    best = max(found[1:], key=lambda one: one.tokens_per_s or 0.0)
    if best.tokens_per_s is None or best.step_s is None:
        return "Nothing here makes it fit.", "bold red"
    speed = _show_speed(best.tokens_per_s, best.step_s)
    if best.worth is None:
        return f"Fits with '{best.change}': {speed}.", "bold green"
    if best.worth < WORTH_TELLING:
        return "No change here makes training faster.", "bold yellow"
    gain = f"{best.worth:+.0%}"
    return f"'{best.change}' gives {gain}: {speed}.", "bold green"


def _change_columns(found: Sequence[ClusterForecast]) -> dict[str, list[str]]:
    columns = {
        "change": [one.change for one in found],
        "GPUs": [
            ", ".join(f"{n}x {shorten_product(name)}" for name, n in one.devices.items())
            for one in found
        ],
        "tokens/s": [
            "no plan" if one.tokens_per_s is None else round_estimate(one.tokens_per_s)
            for one in found
        ],
        "step": ["" if one.step_s is None else round_seconds(one.step_s) for one in found],
        "gain": ["" if one.worth is None else f"{one.worth:+.1%}" for one in found],
    }
    if any(one.price_per_hour is not None for one in found):
        columns["price/hour"] = [_format_price(one.price_per_hour) for one in found]
        columns["price/1e9 tokens"] = [_format_price(one.price_per_billion_tokens) for one in found]
    return columns


def _format_price(price: float | None) -> str:
    return "" if price is None else f"{price:,.2f}"


# -- notes ---------------------------------------------------------------------------------------


def _iterate_notes(
    emulated: bool, assumed: str = "", estimated: Sequence[str] = (), there: Collection[str] = ()
) -> Iterator[Line]:
    """Yield notes on the numbers behind an empty line: on emulation, on GPU types that are
    estimated among others `there` that were measured, and on assumptions."""
    notes = [EMULATED] if emulated else []
    if estimated and not set(there) <= set(estimated):
        notes.append(describe_estimates(estimated))
    if notes or assumed:
        yield "", ""
    for note in notes:
        yield from ((text, "yellow") for text in wrap_line(note))
    if assumed:
        yield from iterate_labelled("Assumed", assumed, "dim")
