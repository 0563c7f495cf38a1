"""A timeline of steps, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One shape for what is simulated and for what was measured, so that both can be laid side by side:

* a *span* is something that took time: on a `process` (one device, or devices that are alike), on
  one of its `thread`s (a stream: what runs there never overlaps), from `start_s`, counted from the
  beginning of the step, for `seconds`. `category` is its kind, `name` what a reader sees, `args`
  what is shown when it is clicked on.
* the file is the Trace Event Format's JSON object: a complete event (`ph` "X") per span, with `ts`
  and `dur` in microseconds, and metadata events (`ph` "M") that name and order processes and
  threads. Processes are numbered from 1, threads so that no number is used twice.

Times are whole microseconds, rounded at both ends of a span alike: neighbours that touch do not
overlap, which viewers would take for nesting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from gpumix.spec.base import Document, Value

Arg = str | int | float | bool | list[int]
Stream = Literal["compute", "communication", "host copies"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
THREADS = 100  # numbers kept for each process


@dataclass(frozen=True)
class Span:
    """Something that took time; see above."""

    name: str
    category: str
    process: str
    thread: Stream
    start_s: float
    seconds: float
    args: Mapping[str, Arg] = field(default_factory=dict)


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
    kind: Literal["trace"] = "trace"

    displayTimeUnit: Literal["ms", "ns"] = "ms"  # the format's own name
    traceEvents: tuple[Slice | Label, ...]  # the format's own name

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """A trace of `spans`; processes and threads appear in the order of their first spans."""
        threads: dict[str, dict[str, int]] = {}
        pids: dict[str, int] = {}
        slices = []
        for span in spans:
            pid = pids.setdefault(span.process, len(pids) + 1)
            there = threads.setdefault(span.process, {})
            thread = there.setdefault(span.thread, len(there))
            slices.append(_slice(span, pid, pid * THREADS + thread))
        return cls.model_construct(traceEvents=(*_labels(threads), *slices))


def _slice(span: Span, pid: int, tid: int) -> Slice:
    start, end = (round(1e6 * time) for time in (span.start_s, span.start_s + span.seconds))
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


def _labels(threads: Mapping[str, Mapping[str, int]]) -> Iterator[Label]:
    """Names and places of all processes and threads."""
    for number, (process, there) in enumerate(threads.items()):
        pid = number + 1
        yield Label(name="process_name", pid=pid, args={"name": process})
        yield Label(name="process_sort_index", pid=pid, args={"sort_index": number})
        for thread, place in there.items():
            tid = pid * THREADS + place
            yield Label(name="thread_name", pid=pid, tid=tid, args={"name": thread})
            yield Label(name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": place})
