"""Traces of a step as a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

Simulated and measured steps use the same structure and vocabulary, so that both can be compared
side by side:

* a *span* is something that took time: on a `process` (one device, or identical devices), on one of
  its `thread`s (a stream: spans there never overlap), from `start_s` to `end_s`, counted from the
  start of the step. `category` is its type, `name` the displayed text, `args` the details shown on
  a click.
* at any moment a device either computes, or waits for a known cause.
* the file is the Trace Event Format's JSON object: a complete event (`ph` "X") per span, with `ts`
  and `dur` in microseconds, and metadata events (`ph` "M") that name and order processes and
  threads. Processes are numbered from 1, thread numbers are unique across processes.

Times are whole microseconds, and both ends of a span are rounded alike: adjacent spans do not
overlap, which viewers would show as nesting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar, Literal, get_args

from gpumix.schema.plan.stage import Worker
from gpumix.schema.value import Document, Value

Work = Literal["forward", "head", "backward", "weights", "optimizer"]
Move = Literal[
    "gather", "regather", "reduce", "meet", "send"
]  # "meet": a barrier, nothing else moves
Copy = Literal["copy to host", "copy from host"]
Kind = Literal[Work, Move, Copy]

Cause = Literal[
    "gather",
    "reduction",
    "slower rank",
    "host copies",
    "ends",
    "other stage",
    "message",
    "tensor parallel",
    "overhead",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Reason why a rank is not computing.

`gather` and `reduction`: the collective runs, and the rank needs it or a later one. `ends`: the
root's gather or the last two reductions, which nothing overlaps. `slower rank`: the input waits for
another rank (straggler). `other stage`: the input is not computed yet; `message`: it is in transit.
`tensor parallel`: collectives of the tensor-parallel group; predicted pass times include them.
`host copies`: the rank's own copies to or from the host are not done. `overhead`: part of every
step, neither compute nor communication.
"""

Stream = Literal["compute", "waiting", "communication", "host copies"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
THREADS = 100  # numbers reserved for each process

Arg = str | int | float | bool | list[int]


@dataclass(frozen=True)
class Span:
    """A time interval of a device; see the module docstring."""

    name: str
    category: str
    process: str
    thread: Stream
    start_s: float
    end_s: float
    args: Mapping[str, Arg] = field(default_factory=dict)


def make_work_span(
    kind: Kind,
    unit: str,
    *,
    process: str,
    start_s: float,
    end_s: float,
    micro_batches: tuple[int, ...] = (),
    **args: Arg,
) -> Span:
    """Build the span of a device's operation on a unit, with the standard name and stream."""
    stream: Stream = "compute"
    if kind in get_args(Move):
        stream = "communication"
    elif kind in get_args(Copy):
        stream = "host copies"
    name = kind if kind == "optimizer" else f"{kind} {unit}"
    told = {"unit": unit, "micro_batches": list(micro_batches), **args}
    return Span(name, kind, process, stream, start_s, end_s, told)


def make_wait_span(
    cause: Cause, *, process: str, start_s: float, end_s: float, **args: Arg
) -> Span:
    """Build the span of a device's wait, with the standard name and stream."""
    return Span(cause, "waiting", process, "waiting", start_s, end_s, args)


def stage_name(number: int) -> str:
    """Return the unit name for operations on a whole stage."""
    return f"stage {number + 1}"


def get_wait_cause(move: Move, *, exposed: bool) -> Cause:
    """Return the cause of waiting for a running collective; nothing overlaps an `exposed` one."""
    if exposed:
        return "ends"
    return "reduction" if move == "reduce" else "gather"


def format_process_name(worker: Worker, *, emulated: bool) -> str:
    """Return the process name of a device."""
    label = ", emulated" if emulated else ""
    return f"{worker.host}: {worker.device} ({worker.device_class}{label})"


class CompleteEvent(Value):
    """A span: a complete event of the format."""

    ph: Literal["X"] = "X"
    name: str
    cat: str
    pid: int
    tid: int
    ts: int
    dur: int
    args: dict[str, Arg]


class MetadataEvent(Value):
    """Name or sort position of a process or thread: a metadata event of the format."""

    ph: Literal["M"] = "M"
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    pid: int
    tid: int = 0
    args: dict[str, str | int]


class Trace(Document):
    """A trace file. Viewers ignore keys outside the format, such as `kind`."""

    MADE_BY: ClassVar[str] = "gpumix train JOB.yaml --trace-step STEP"
    kind: Literal["trace"] = "trace"

    displayTimeUnit: Literal["ms", "ns"] = "ms"  # name given by the format
    traceEvents: tuple[CompleteEvent | MetadataEvent, ...]  # name given by the format

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """Build a trace of `spans`, sorted by process, stream and time; processes are ordered by
        first span."""
        pids: dict[str, int] = {}
        threads: dict[tuple[str, Stream], int] = {}
        slices = []
        for span in spans:
            pid = pids.setdefault(span.process, len(pids) + 1)
            tid = threads.setdefault(
                (span.process, span.thread), pid * THREADS + STREAMS.index(span.thread)
            )
            slices.append(_make_complete_event(span, pid, tid))
        slices.sort(key=lambda found: (found.tid, found.ts))
        return cls.model_construct(traceEvents=(*_make_metadata_events(pids, threads), *slices))


def _make_complete_event(span: Span, pid: int, tid: int) -> CompleteEvent:
    start, end = (round(1e6 * time) for time in (span.start_s, span.end_s))
    return CompleteEvent.model_construct(  # unvalidated: there may be very many
        ph="X",
        name=span.name,
        cat=span.category,
        pid=pid,
        tid=tid,
        ts=start,
        dur=end - start,
        args=dict(span.args),
    )


def _make_metadata_events(
    pids: Mapping[str, int], threads: Mapping[tuple[str, Stream], int]
) -> Iterator[MetadataEvent]:
    """Yield names and sort positions of all processes and threads."""
    for process, pid in pids.items():
        yield MetadataEvent(name="process_name", pid=pid, args={"name": process})
        yield MetadataEvent(name="process_sort_index", pid=pid, args={"sort_index": pid})
    for (process, thread), tid in sorted(threads.items(), key=itemgetter(1)):
        pid, place = pids[process], STREAMS.index(thread)
        yield MetadataEvent(name="thread_name", pid=pid, tid=tid, args={"name": thread})
        yield MetadataEvent(name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": place})
