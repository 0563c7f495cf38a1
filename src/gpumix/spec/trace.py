"""A step, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One shape and one vocabulary for a step that is simulated and for one that was measured, so that
both can be laid side by side:

* a *span* is something that took time: on a `process` (one device, or devices that are alike), on
  one of its `thread`s (a stream: what runs there never overlaps), from `start_s` to `end_s`,
  counted from the beginning of the step. `category` is its kind, `name` what a reader sees, `args`
  what is shown when it is clicked on.
* at any moment a device either computes, or waits and has a cause for it.
* the file is the Trace Event Format's JSON object: a complete event (`ph` "X") per span, with `ts`
  and `dur` in microseconds, and metadata events (`ph` "M") that name and order processes and
  threads. Processes are numbered from 1, threads so that no number is used twice.

Times are whole microseconds, rounded at both ends of a span alike: neighbours that touch do not
overlap, which viewers would take for nesting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar, Literal, get_args

from gpumix.spec.base import Document, Value
from gpumix.spec.stage import Worker

Work = Literal["forward", "head", "backward", "weights", "optimizer"]
Move = Literal[
    "gather", "regather", "reduce", "meet", "send"
]  # where ranks meet nothing else moves
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
    "team",
    "overhead",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Why a rank computes nothing.

`gather` and `reduction`: such a collective runs, and the rank needs it or one after it. `ends`: the
root's gather or the last two reductions, beside which nothing is computed. `slower rank`: what it
needs waits for another rank. `other stage`: what it needs is not computed yet; `message`: it is on
its way. `team`: sums with the ranks that compute the same unit together; predicted times of passes
hold them. `host copies`: its own copies to or from the host are not done.
`overhead`: of every step, neither computing nor communication.
"""

Stream = Literal["compute", "waiting", "communication", "host copies"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
THREADS = 100  # numbers kept for each process

Arg = str | int | float | bool | list[int]


@dataclass(frozen=True)
class Span:
    """Something that took time; see above."""

    name: str
    category: str
    process: str
    thread: Stream
    start_s: float
    end_s: float
    args: Mapping[str, Arg] = field(default_factory=dict)


def event(
    kind: Kind,
    unit: str,
    *,
    process: str,
    start_s: float,
    end_s: float,
    micro_batches: tuple[int, ...] = (),
    **args: Arg,
) -> Span:
    """What a device does with a unit, named and placed as in every trace."""
    stream: Stream = "compute"
    if kind in get_args(Move):
        stream = "communication"
    elif kind in get_args(Copy):
        stream = "host copies"
    name = kind if kind == "optimizer" else f"{kind} {unit}"
    told = {"unit": unit, "micro_batches": list(micro_batches), **args}
    return Span(name, kind, process, stream, start_s, end_s, told)


def wait(cause: Cause, *, process: str, start_s: float, end_s: float, **args: Arg) -> Span:
    """Why a device computes nothing, named and placed as in every trace."""
    return Span(cause, "waiting", process, "waiting", start_s, end_s, args)


def stage_name(number: int) -> str:
    """The unit of what a device does with a whole stage."""
    return f"stage {number + 1}"


def cause_of(move: Move, *, exposed: bool) -> Cause:
    """Why a rank waits for a collective that runs. Beside `exposed` ones nothing is computed."""
    if exposed:
        return "ends"
    return "reduction" if move == "reduce" else "gather"


def process_of(worker: Worker, *, emulated: bool) -> str:
    """The name of a device."""
    label = ", emulated" if emulated else ""
    return f"{worker.host}: {worker.device} ({worker.device_class}{label})"


class Slice(Value):
    """A span: a complete event of the format."""

    ph: Literal["X"] = "X"
    name: str
    cat: str
    pid: int
    tid: int
    ts: int
    dur: int
    args: dict[str, Arg]


class Label(Value):
    """The name or the place of a process or a thread: a metadata event of the format."""

    ph: Literal["M"] = "M"
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    pid: int
    tid: int = 0
    args: dict[str, str | int]


class Trace(Document):
    """The file. What is not of the format, such as `kind`, viewers pass over."""

    KIND: ClassVar[str] = "trace"
    MADE_BY: ClassVar[str] = "gpumix train JOB.yaml --trace STEP"
    kind: Literal["trace"] = "trace"

    displayTimeUnit: Literal["ms", "ns"] = "ms"  # the format's own name
    traceEvents: tuple[Slice | Label, ...]  # the format's own name

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """A trace of `spans`, by process, stream and time; processes appear in the order of their
        first spans."""
        pids: dict[str, int] = {}
        threads: dict[tuple[str, Stream], int] = {}
        slices = []
        for span in spans:
            pid = pids.setdefault(span.process, len(pids) + 1)
            tid = threads.setdefault(
                (span.process, span.thread), pid * THREADS + STREAMS.index(span.thread)
            )
            slices.append(_slice(span, pid, tid))
        slices.sort(key=lambda found: (found.tid, found.ts))
        return cls.model_construct(traceEvents=(*_labels(pids, threads), *slices))


def _slice(span: Span, pid: int, tid: int) -> Slice:
    start, end = (round(1e6 * time) for time in (span.start_s, span.end_s))
    return Slice.model_construct(  # for there may be very many
        ph="X",
        name=span.name,
        cat=span.category,
        pid=pid,
        tid=tid,
        ts=start,
        dur=end - start,
        args=dict(span.args),
    )


def _labels(pids: Mapping[str, int], threads: Mapping[tuple[str, Stream], int]) -> Iterator[Label]:
    """Names and places of all processes and threads."""
    for process, pid in pids.items():
        yield Label(name="process_name", pid=pid, args={"name": process})
        yield Label(name="process_sort_index", pid=pid, args={"sort_index": pid})
    for (process, thread), tid in sorted(threads.items(), key=itemgetter(1)):
        pid, place = pids[process], STREAMS.index(thread)
        yield Label(name="thread_name", pid=pid, tid=tid, args={"name": thread})
        yield Label(name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": place})
