"""Picture of the plan: computing and storing by class, in a row per class and stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumix.report.draw import draw_bar, draw_picture, get_type_class
from gpumix.report.facts import DeviceGroup, RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_remark, render_section
from gpumix.schema.plan.stage import Stage
from gpumix.schema.units import format_count
from gpumix.train.console.tables import explain_plan
from gpumix.train.run_figures import words

MOST_SQUARES = 64  # squares drawn for devices; more are a number
SQUARE, GAP, GROUP_GAP, LINE = 9, 3, 6, 190  # pixels
STAGES = 24  # stages drawn; more are counted
STORED_TONE = 2  # of a GPU type's colour; the first is for computing


def render_plan(facts: RunFacts) -> Markup:
    plan = facts.run.plan
    shown = plan.stages[:STAGES]
    first, *rest = explain_plan(plan) or [""]
    return render_section(
        "plan",
        "What each GPU type computes and stores",
        el("div", _head(facts), class_="plan head", aria_hidden="true"),
        [_stage(facts, stage, number) for number, stage in enumerate(shown)],
        render_remark(f"{len(plan.stages) - STAGES} more pipeline stages are not shown.")
        if len(plan.stages) > STAGES
        else None,
        _left_out(facts),
        _render_split_note(facts),
        el("details", el("summary", "Why this plan"), el("ul", [el("li", line) for line in rest]))
        if rest
        else None,
        lead=f"{first[:1].upper()}{first[1:]}." if first else "",
    )


def _head(facts: RunFacts) -> list[Markup]:
    plan = facts.run.plan
    what = "training state" if len(plan.stages) == 1 else "its stage's training state"
    return [
        el("span", "GPUs"),
        el("span", "share of the samples computed", class_="to-left"),
        el("span", f"share of {what} stored" if plan.zero_stage else f"{what}, not sharded"),
    ]


def _stage(facts: RunFacts, stage: Stage, number: int) -> Markup:
    plan = facts.run.plan
    groups = [group for group in facts.groups if group.stage == number]
    rows = [_row(facts, group) for group in groups]
    if len(plan.stages) == 1:
        return el("div", rows, class_="stage")
    arrow = el("p", "↓ activations, gradients back ↑", class_="arrow") if number else None
    return el(
        "div", arrow, el("h3", _format_stage(facts, stage, number)), rows, class_="stage several"
    )


def _format_stage(facts: RunFacts, stage: Stage, number: int) -> str:
    """Format a stage's number and range of blocks."""
    units = stage.units
    names = units[0] if units[0] == units[-1] else f"{units[0]} to {units[-1]}"
    return f"Pipeline stage {number + 1}: {format_count(len(units), 'block')}, {names}"


def _row(facts: RunFacts, group: DeviceGroup) -> Markup:
    place = class_names(facts).index(group.device_class)
    each = _describe_device_work(group)
    computes = words.format_fraction(group.computed)
    stores = "all" if group.stored is None else words.format_fraction(group.stored)
    title = (
        f"{group.device_class}: computes {computes} of the samples, stores {stores} of the "
        "training state"
    )
    stored = 1.0 if group.stored is None else group.stored
    return el(
        "div",
        el("div", _render_devices(facts, group, place), class_="who"),
        _draw_half(title, group.computed, get_type_class(place), computes, left=True),
        _draw_half(title, stored, get_type_class(place, STORED_TONE), stores, left=False),
        el("p", each, class_="each"),
        class_="plan",
    )


def _draw_half(title: str, part: float, class_: str, told: str, *, left: bool) -> Markup:
    """Draw one side of a row; bars grow outward from the middle."""
    begin, end = (1 - part, 1.0) if left else (0.0, part)
    frame = draw_bar(0, 1, y=0, height=20, class_="track")
    drawn = draw_bar(begin, end, y=0, height=20, class_=class_, title=title)
    return el(
        "div",
        draw_picture(title, 20, frame, drawn),
        el("span", told, class_="told"),
        class_="half left" if left else "half",
    )


def _render_devices(facts: RunFacts, group: DeviceGroup, place: int) -> Iterator[Markup]:
    yield el("strong", group.device_class)
    yield _draw_device_squares(group, place)
    what = next((c.what for c in facts.classes if c.device_class == group.device_class), "")
    hosts = words.join_names(group.hosts, 3)
    size = group.tensor_parallel
    groups = f", tensor-parallel groups of {size}" if size > 1 else ""
    count = format_count(group.devices, "GPU")
    yield el("span", f"{count}{groups} on {hosts}{f': {what}' if what else ''}", class_="small")


def _draw_device_squares(group: DeviceGroup, place: int) -> Markup:
    """Draw a square per device, grouped by tensor-parallel group, up to `MOST_SQUARES` devices."""
    inside, between = (1, GROUP_GAP) if group.tensor_parallel > 1 else (GAP, GAP)
    spots: list[tuple[int, int]] = []
    x = y = 0
    for number in range(min(group.devices, MOST_SQUARES)):
        if (
            number % group.tensor_parallel == 0
            and x + group.tensor_parallel * (SQUARE + inside) > LINE
        ):
            x, y = 0, y + SQUARE + GAP
        spots.append((x, y))
        x += SQUARE + (between if (number + 1) % group.tensor_parallel == 0 else inside)
    squares = (
        el("rect", x=x, y=y, width=SQUARE, height=SQUARE, rx=2, class_=get_type_class(place))
        for x, y in spots
    )
    more = f"+{group.devices - len(spots)}" if group.devices > len(spots) else ""
    name = f"{group.devices:,} × {group.device_class}"
    return el(
        "svg",
        el("title", name),
        squares,
        el("text", more, x=x + 2, y=y + SQUARE) if more else None,
        role="img",
        width=max(x for x, _ in spots) + SQUARE,
        height=y + SQUARE + 1,
        class_="glyphs",
    )


def _describe_device_work(group: DeviceGroup) -> str:
    """Describe the work of one device."""
    if not group.samples:
        return "computes nothing: it only stores training state"
    samples = group.samples_each.format_with(words.format_number)
    each = f"each {samples} samples per step, in micro-batches of {group.micro_batch}"
    parts = [each, group.mode, group.compute_dtype]
    if group.devices > 1 and group.stored is not None:
        parts.insert(
            1, f"{group.stored_each.format_with(words.format_fraction)} of the training state"
        )
    if group.state_on == "host":
        parts.append("training state in host memory")
    return "; ".join(parts)


def class_names(facts: RunFacts) -> Sequence[str]:
    """Return class names in plan order, which determines colors."""
    return [one.device_class for one in facts.classes]


def _left_out(facts: RunFacts) -> Markup | None:
    if not facts.left_out:
        return None
    names = words.join_names(facts.left_out)
    return render_remark(f"Not used by the plan: {names}.")


def _render_split_note(facts: RunFacts) -> Markup | None:
    split = facts.figures.last_live_split
    if split is None:
        return None
    return render_remark(
        f"Rebalanced after step {split.step:,}: shares are those since then, predictions are of "
        "the plan that the run started with."
    )
