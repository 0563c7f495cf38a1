"""Comparisons as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpumix.spec.units import show_seconds

if TYPE_CHECKING:
    from gpumix.planner.change import Outlook


def outlook_table(found: Sequence[Outlook]) -> RenderableType:
    """One row per change, the cluster of today first."""
    priced = any(o.price_per_hour is not None for o in found)
    columns = ["change", "devices", "step", "tokens/s", "worth"]
    columns += ["price per hour", "per billion tokens"] if priced else []
    table = Table(title="what if", title_justify="left", title_style="bold", expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=number == 0)
    for outlook in found:
        cells = [
            outlook.change,
            ", ".join(f"{count} x {name}" for name, count in outlook.devices.items()),
            "does not fit" if outlook.step_s is None else show_seconds(outlook.step_s),
            "" if outlook.tokens_per_s is None else f"{outlook.tokens_per_s:.0f}",
            "" if outlook.worth is None else f"{outlook.worth:+.1%}",
        ]
        if priced:
            cells += [_amount(outlook.price_per_hour), _amount(outlook.price_per_billion_tokens)]
        table.add_row(*cells)
    notes = [Text(f"{o.change}: {o.why}") for o in found if o.why]
    return Group(table, *notes)


def _amount(price: float | None) -> str:
    return "" if price is None else f"{price:,.2f}"
