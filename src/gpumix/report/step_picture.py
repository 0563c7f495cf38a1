"""Picture of a step: computing, communication and waits of each device over time.

Draws traces, measured (`gpumix train --trace-step`) or simulated (`gpumix simulate`). Numbers in
bars are micro-batches, for plans with several stages; passes through a device's second stage are
paler. Needs matplotlib, which is imported for drawing only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumix.schema.errors import InputError, MachineError, format_install_command, get_first_line
from gpumix.schema.files import replace_atomically
from gpumix.schema.plan.step_trace import CompleteEvent, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colors, distinguishable for colorblind readers.
COLORS = {
    "forward": "#56B4E9",
    "head and loss": "#0072B2",
    "backward": "#E69F00",
    "gradients of weights": "#F0E442",
    "communication": "#009E73",
    "update": "#CC79A7",
    "idle": "#EDEDED",
}
WORK_LABELS = {
    "forward": "forward",
    "head": "head and loss",
    "backward": "backward",
    "weights": "gradients of weights",
    "optimizer": "update",
}
COMMUNICATION_CAUSES = {
    "gather",
    "reduction",
    "ends",
    "message",
    "tensor parallel",
    "host copies",
}  # causes of waits
EDGED_PART = 0.004  # fraction of the width; narrower bars have no edge, which would hide them
PALE_OPACITY = 0.6  # opacity of passes through further stages of a device
WIDTH_INCHES, DOTS_PER_INCH = 12.0, 100
ROW_INCHES, PANEL_INCHES, LEGEND_INCHES = 0.34, 0.62, 0.5
CHARACTER_PART, MARGIN_PART = 0.0055, 0.003  # fraction of the width taken by text


@dataclass(frozen=True)
class ActivityBar:
    """An activity of a device; passes have a stage and a micro-batch, numbered from 1."""

    what: str
    start_s: float
    end_s: float
    stage: int = 0
    micro_batch: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Panel:
    """One step: bars by device name, in order of time."""

    title: str
    devices: dict[str, list[ActivityBar]]

    @property
    def step_s(self) -> float:
        return max(bar.end_s for bars in self.devices.values() for bar in bars)

    @property
    def idle_share(self) -> float:
        """Mean fraction of the step without computation."""
        computed = (
            bar.seconds
            for bars in self.devices.values()
            for bar in bars
            if bar.what in WORK_LABELS.values()
        )
        return 1.0 - sum(computed) / (self.step_s * len(self.devices))

    def with_idle_share(self) -> Panel:
        """Return the panel with the idle share added to the title."""
        return replace(self, title=f"{self.title}: idle {self.idle_share:.0%}")


def read_panel(path: Path, title: str = "") -> Panel:
    """Read a step from a trace file.

    Raises:
        ValueError: the file is no trace of a step.
    """
    try:
        return make_panel(Trace.load(path), title or path.stem)
    except (InputError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no trace of a step: {error}") from error


def make_panel(trace: Trace, title: str) -> Panel:
    """Return a trace's step, with devices sorted by stage."""
    found = _bars(trace)
    if not any(found.values()):
        raise ValueError("no device does anything in it")
    stages = {name: sorted({bar.stage for bar in bars} - {0}) for name, bars in found.items()}
    devices = {
        _label(name, stages[name]): found[name] for name in sorted(found, key=stages.__getitem__)
    }
    return Panel(title, devices)


def _bars(trace: Trace) -> dict[str, list[ActivityBar]]:
    events = trace.traceEvents
    names = {one.pid: str(one.args["name"]) for one in events if one.name == "process_name"}
    found: dict[str, list[ActivityBar]] = {name: [] for name in names.values()}
    slices = (one for one in events if isinstance(one, CompleteEvent))
    for one in sorted(slices, key=lambda one: one.ts):
        if one.cat in WORK_LABELS or one.cat == "waiting":
            found[names[one.pid]].append(_bar(one))
    return found


def _label(process: str, stages: Sequence[int]) -> str:
    """Format a device with class and stages, but without host."""
    device = process.split(": ")[-1].replace(", emulated", "")
    return f"stage {', '.join(map(str, stages))}: {device}" if stages else device


def _bar(done: CompleteEvent) -> ActivityBar:
    what = WORK_LABELS.get(
        done.cat, "communication" if done.name in COMMUNICATION_CAUSES else "idle"
    )
    start_s, end_s = done.ts / 1e6, (done.ts + done.dur) / 1e6
    unit, numbers = str(done.args.get("unit", "")), done.args.get("micro_batches")
    if not unit.startswith("stage "):
        return ActivityBar(what, start_s, end_s)
    if not isinstance(numbers, list):
        raise ValueError(f"{unit} computes no micro-batch")
    (number,) = numbers
    return ActivityBar(what, start_s, end_s, int(unit.removeprefix("stage ")), number + 1)


def find_passes(bars: Sequence[ActivityBar]) -> Iterator[ActivityBar]:
    """Yield passes of micro-batches through stages: for each, the longest part interrupted only by
    communication."""
    longest: dict[tuple[str, int, int], ActivityBar] = {}
    latest: ActivityBar | None = None
    for bar in bars:
        if bar.what == "communication":
            continue
        key = (bar.what, bar.stage, bar.micro_batch)
        if latest is not None and (latest.what, latest.stage, latest.micro_batch) == key:
            bar = replace(bar, start_s=latest.start_s)
        latest = bar
        if bar.stage and (key not in longest or bar.seconds > longest[key].seconds):
            longest[key] = bar
    yield from longest.values()


def draw_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw all steps, stacked on one time scale, in the format given by the file name.

    Raises:
        InputError: the file name has no supported format.
        MachineError: matplotlib is missing, or writing fails.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MachineError(
            "pictures need matplotlib, which is not installed",
            code="package-missing",
            fix=format_install_command("pictures"),
        ) from error

    ending = path.suffix.removeprefix(".").lower()
    formats = FigureCanvasBase.get_supported_filetypes()
    if ending not in formats:
        raise InputError(
            f"a picture's name cannot end with '{path.suffix}'" if ending else "it has no ending",
            code="picture-ending-unknown",
            where=str(path),
            fix=f"name it .png or .svg (or {', '.join(sorted(formats.keys() - {'png', 'svg'}))})",
        )
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
    patches = [Patch(color=c, label=what) for what, c in COLORS.items() if what in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".") or None)
    except OSError as error:
        raise MachineError(
            "the picture cannot be written",
            code="picture-not-writable",
            where=str(path),
            why=get_first_line(error),
        ) from error


def _draw_panel(axes: Axes, panel: Panel, longest_s: float) -> None:
    for row, bars in enumerate(panel.devices.values()):
        first = min((bar.stage for bar in bars if bar.stage), default=0)
        for what, stage in dict.fromkeys((bar.what, bar.stage) for bar in bars):
            same = [bar for bar in bars if (bar.what, bar.stage) == (what, stage)]
            axes.broken_barh(
                [(bar.start_s, bar.seconds) for bar in same],
                (row - 0.42, 0.84),
                facecolor=COLORS[what],
                edgecolor=COLORS["idle"] if what == "idle" else "white",
                linewidths=[0.4 if b.seconds > EDGED_PART * longest_s else 0.0 for b in same],
                alpha=1.0 if stage in (0, first) else PALE_OPACITY,
            )
        for bar in find_passes(bars):
            text = str(bar.micro_batch)
            if bar.seconds > (len(text) * CHARACTER_PART + MARGIN_PART) * longest_s:
                middle_s = (bar.start_s + bar.end_s) / 2
                axes.text(middle_s, row, text, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(panel.devices)), list(panel.devices), fontsize=8)
    axes.set_ylim(len(panel.devices) - 0.4, -0.6)
    axes.set_xlim(0, longest_s)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
