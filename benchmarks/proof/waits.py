"""Where the host waits for the device while code runs, by the line of gpumix that makes it wait."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest import mock

import torch

from proof.bench import Bench

READS = ("item", "tolist", "__bool__", "__float__", "__int__")
SIGN = "synchroniz"  # in the words of torch's warning


@dataclass
class Waits:
    """How often each line made the host wait: lines of gpumix, and those that others made."""

    ours: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    def note(self) -> None:
        """The caller's caller makes the host wait: by its innermost line of gpumix, unless what
        waits is a library that this line called."""
        for frame in reversed(traceback.extract_stack(limit=60)[:-2]):
            name = frame.filename
            if "/gpumix/" in name:
                self.ours[f"{name.rsplit('/gpumix/', 1)[1]}:{frame.lineno} {frame.name}"] += 1
                return
            if "/transformers/" in name:
                line = f"{name.rsplit('/transformers/', 1)[1]}:{frame.lineno} {frame.name}"
                self.others[f"transformers/{line}"] += 1
                return
        self.others["elsewhere"] += 1


@contextmanager
def watched(bench: Bench) -> Iterator[Waits]:
    """Note each wait of the host. On the CPU, where nothing waits: each value that is read."""
    waits = Waits()
    if bench.on_cuda:
        with _by_warnings(waits):
            yield waits
    else:
        with _by_reads(waits):
            yield waits


@contextmanager
def _by_warnings(waits: Waits) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def showwarning(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if SIGN in str(message):
            waits.note()
        else:
            show(message, category, *rest, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = showwarning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _by_reads(waits: Waits) -> Iterator[None]:
    inside = threading.local()

    def noting(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        @wraps(plain)
        def read(self: torch.Tensor, *args: Any) -> Any:
            if getattr(inside, "reads", False):
                return plain(self, *args)
            inside.reads = True
            try:
                waits.note()
                return plain(self, *args)
            finally:
                inside.reads = False

        return read

    patches = [mock.patch.object(torch.Tensor, name, noting(name)) for name in READS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def tell(waits: Waits) -> None:
    """The lines, for the log."""
    for name, lines in (("gpumix", waits.ours), ("others", waits.others)):
        for line, times in lines.most_common():
            print(f"host waits, {name}: {times} x {line}", file=sys.stderr)
