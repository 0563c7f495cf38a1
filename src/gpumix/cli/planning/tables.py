"""Tables of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gpumix.schema.units import show_bytes, show_seconds
from gpumix.train.run_log.tables import add_notes, new_table

if TYPE_CHECKING:
    from gpumix.planner.cluster_change import ClusterForecast
    from gpumix.planner.compare import Comparison, StrategyRow


def outlook_table(found: Sequence[ClusterForecast]) -> RenderableType:
    """Return a table with a row per change, the present cluster first."""
    priced = any(o.price_per_hour is not None for o in found)
    columns = ["change", "devices", "step", "tokens/s", "worth"]
    columns += ["price per hour", "per billion tokens"] if priced else []
    table = new_table("what if", *columns)
    for outlook in found:
        cells = [
            outlook.change,
            ", ".join(f"{count} x {name}" for name, count in outlook.devices.items()),
            "does not fit" if outlook.step_s is None else show_seconds(outlook.step_s),
            "" if outlook.tokens_per_s is None else f"{outlook.tokens_per_s:.0f}",
            "" if outlook.worth is None else f"{outlook.worth:+.1%}",
        ]
        if priced:
            cells += [
                _format_price(outlook.price_per_hour),
                _format_price(outlook.price_per_billion_tokens),
            ]
        table.add_row(*cells)
    notes = [Text(f"{o.change}: {o.why}") for o in found if o.why]
    estimated = sorted({name for o in found for name in o.estimated})
    return Group(add_notes(table, any(o.emulated for o in found), estimated), *notes)


def comparison_table(found: Comparison) -> RenderableType:
    """Return a table with a row per strategy, and notes below on why each lost."""
    classes = sorted({room.device_class for row in found.rows for room in row.head_room})
    columns = ["strategy", "step", "tokens/s", "against the best", "ZeRO"]
    table = new_table("compare", *columns, *(f"free on {name}" for name in classes))
    fastest = next(row for row in found.rows if row.strategy == found.best).step_s
    for row in found.rows:
        table.add_row(
            row.strategy, *_format_figures(row, fastest), *_format_head_rooms(row, classes)
        )
    notes = [Text(f"{row.strategy}: {row.why}") for row in found.rows]
    return Group(add_notes(table, found.emulated, found.estimated), *notes)


def _format_figures(row: StrategyRow, fastest: float | None) -> list[str]:
    if row.step_s is None or row.tokens_per_s is None:
        return ["not possible", "", "", ""]
    times = row.step_s / fastest if fastest else 1.0
    return [
        show_seconds(row.step_s),
        f"{row.tokens_per_s:.0f}",
        f"{times:.2f} x",
        str(row.zero_stage),
    ]


def _format_head_rooms(row: StrategyRow, classes: Sequence[str]) -> list[str]:
    """Return the free memory by class, the least of its devices; empty for a class left out."""
    rooms = {room.device_class: room for room in row.head_room}
    return [
        f"{show_bytes(rooms[name].free_bytes)} ({rooms[name].part:.0%})" if name in rooms else ""
        for name in classes
    ]


def _format_price(price: float | None) -> str:
    return "" if price is None else f"{price:,.2f}"
