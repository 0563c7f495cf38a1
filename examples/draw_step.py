"""Draw a step as a picture: what each device computes, sends and waits for, and when.

    python examples/draw_step.py runs/first/trace.json --out step.png
    python examples/draw_step.py runs/first/trace.json simulated.json --out both.png

Traces come from `gpumix train --trace STEP` (what was measured) and `gpumix simulate --trace FILE`
(what was planned); several are drawn below each other on one scale of time. Numbers inside of bars
are those of micro-batches, where a plan has several stages. Needs matplotlib (`pip install
"gpumix[pictures]"`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart too.
COLOURS = {
    "forward": "#56B4E9",
    "head and loss": "#0072B2",
    "backward": "#E69F00",
    "gradients of weights": "#F0E442",
    "communication": "#009E73",
    "update": "#CC79A7",
    "idle": "#EDEDED",
}
WORK = {
    "forward": "forward",
    "head": "head and loss",
    "backward": "backward",
    "weights": "gradients of weights",
    "optimizer": "update",
}
COMMUNICATES = {"gather", "reduction", "ends", "message", "team", "host copies"}  # causes of waits
WIDTH_INCHES, DOTS_PER_INCH = 12.0, 100
ROW_INCHES, PANEL_INCHES, LEGEND_INCHES = 0.34, 0.62, 0.5
CHARACTER_PART = 0.0065  # of the width of the bars, that a character takes


@dataclass(frozen=True)
class Bar:
    """What a device does from `start_s` on; `text` may be shown inside."""

    what: str
    start_s: float
    seconds: float
    text: str = ""


@dataclass(frozen=True)
class Panel:
    """One step: the bars of each device, by its name."""

    title: str
    devices: dict[str, list[Bar]]

    @property
    def step_s(self) -> float:
        return max(bar.start_s + bar.seconds for bars in self.devices.values() for bar in bars)

    @property
    def idle_share(self) -> float:
        """The part of the step in which devices compute nothing, in the mean."""
        computed = (
            bar.seconds
            for bars in self.devices.values()
            for bar in bars
            if bar.what in WORK.values()
        )
        return 1.0 - sum(computed) / (self.step_s * len(self.devices))


def read(path: Path, title: str = "") -> Panel:
    """A step from a trace file, which is in the Trace Event Format."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    devices: dict[str, list[Bar]] = {name.split(": ")[-1]: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X" and (event["cat"] in WORK or event["cat"] == "waiting"):
            devices[names[event["pid"]].split(": ")[-1]].append(_bar(event))
    return Panel(title or path.stem, devices)


def _bar(event: dict[str, Any]) -> Bar:
    what = WORK.get(event["cat"], "communication" if event["name"] in COMMUNICATES else "idle")
    text = ""
    if event["args"].get("unit", "").startswith("stage "):
        (number,) = event["args"]["micro_batches"]
        text = str(number + 1)
    return Bar(what, event["ts"] / 1e6, event["dur"] / 1e6, text)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """All steps below each other, on one scale of time, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [PANEL_INCHES + ROW_INCHES * len(panel.devices) for panel in panels]
    figure = Figure(
        figsize=(WIDTH_INCHES, sum(heights) + LEGEND_INCHES),
        dpi=DOTS_PER_INCH,
        layout="constrained",
    )
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})
    longest_s = max(panel.step_s for panel in panels)
    for axes, panel in zip(grid[:, 0], panels):
        _draw_panel(axes, panel, longest_s)
    grid[-1, 0].set_xlabel("seconds since the step began")
    shown = {bar.what for panel in panels for bars in panel.devices.values() for bar in bars}
    patches = [Patch(color=c, label=what) for what, c in COLOURS.items() if what in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: Panel, longest_s: float) -> None:
    for row, bars in enumerate(panel.devices.values()):
        for what in dict.fromkeys(bar.what for bar in bars):
            spans = [(bar.start_s, bar.seconds) for bar in bars if bar.what == what]
            edge = {} if what == "idle" else {"edgecolor": "white", "linewidth": 0.4}
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolor=COLOURS[what], **edge)
        for bar in bars:
            if bar.text and bar.seconds > len(bar.text) * 1.6 * CHARACTER_PART * longest_s:
                middle = bar.start_s + bar.seconds / 2
                axes.text(middle, row, bar.text, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(panel.devices)), list(panel.devices), fontsize=8)
    axes.set_ylim(len(panel.devices) - 0.4, -0.6)
    axes.set_xlim(0, longest_s)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the steps of trace files as one picture.")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("step.png"))
    options = parser.parse_args()
    panels = [read(path) for path in options.traces]
    draw(
        [Panel(f"{p.title}: idle {p.idle_share:.0%}", p.devices) for p in panels],
        options.out,
    )


if __name__ == "__main__":
    main()
