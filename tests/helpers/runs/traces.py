"""What a trace file says, for tests."""

from __future__ import annotations

import json
from typing import Any

from gpumix.schema.plan.step_trace import Trace


def slices(trace: Trace) -> dict[str, dict[str, list[Any]]]:
    """The spans of a trace by process and thread, in the order of time."""
    events = json.loads(trace.model_dump_json())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[str, list[Any]]] = {process: {} for process in processes.values()}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[processes[e["pid"]]].setdefault(threads[e["tid"]], []).append(e)
    return found


def told(spans: list[Any]) -> list[Any]:
    """What spans say, whenever they were and whatever binds."""
    return [(e["name"], e["cat"], e["args"]["unit"], e["args"]["micro_batches"]) for e in spans]
