"""The page of a cluster's devices, in 80 columns. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.units import format_count, show_bytes
from gpumix.train.console.tables import EMULATED
from gpumix.train.console.text_page import (
    COLUMNS,
    Line,
    align_rows,
    iterate_labelled,
    join_lines,
    wrap_line,
)

MOST_HOSTS = 3  # named in a row


def devices_page(found: Cluster) -> Text:
    """Return the page of a cluster: the number of devices, and a row for each type."""
    return join_lines(_iterate_devices(found))


def _iterate_devices(found: Cluster) -> Iterator[Line]:
    gpus = any(one.is_gpu for one in found.classes)
    count = format_count(len(found.devices), "GPU" if gpus else "device")
    hosts = format_count(len({device.host for device in found.devices}), "host")
    yield f"{count} of {format_count(len(found.classes), 'type')} on {hosts}", "bold"
    yield "", ""
    rows = [("type", "count", "memory", "what", "hosts")]
    for one in found.classes:
        members = found.members(one.name)
        names = sorted({device.host for device in members})
        told = ", ".join(names) if len(names) <= MOST_HOSTS else f"{len(names)} hosts"
        count, memory = str(len(members)), show_bytes(one.memory_bytes)
        rows.append((one.name, count, memory, one.describe(), told))
    fit = max(map(len, align_rows(rows))) <= COLUMNS
    shown = rows if fit else [(*row[:3], row[4]) for row in rows]
    lines = align_rows(shown, left=(0, 3, 4))
    yield from ((text, "") for text in lines)
    if not fit:
        yield "", ""
        for name, *_, what, _ in rows[1:]:
            yield from iterate_labelled(name, what, indent=len(name) + 2)
    if found.emulated:
        yield "", ""
        yield from ((text, "yellow") for text in wrap_line(EMULATED))
