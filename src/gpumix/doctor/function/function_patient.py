"""A training function as a patient: each window calls it in a fresh process, ended after some
steps; changes are applied from outside, and described in terms of code."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpumix.doctor.change import Changes
from gpumix.doctor.examine import TimedWindow
from gpumix.doctor.function.loss_comparison import describe_loss_difference
from gpumix.doctor.function.observations import Observations, WindowLength, WindowRequest
from gpumix.doctor.function.remarks import (
    remark_on_host_gap,
    remark_on_loops,
    remark_on_remade_optimizers,
    remark_on_steering_reads,
)
from gpumix.doctor.function.suspects import find_suspects
from gpumix.doctor.machine import (
    MachineObservations,
    remark_on_cores,
    remark_on_machine,
    remark_on_starvation,
    remark_on_unfused_attention,
    watch_machine,
)
from gpumix.doctor.report import Remark, Suspect
from gpumix.schema.errors import GpumixError, InputError, TrainingError
from gpumix.schema.files import make_scratch_folder, read_log, read_text

WARM_UP_STEPS = 4
PROFILED_STEPS = 4
LEAST_S = 1.0  # minimum of a window's steps; shorter windows drown in noise of the machine
PATIENCE_S = 300.0  # limit for the first steps, and again for the remaining window
GRACE_S = 3.0  # for a function to end after its last message
TOLD_LINES = 3  # lines of output quoted after a crash
PRELOAD = ("gpumix.doctor.function.preload",)


@dataclass
class FunctionPatient:
    """The function `reference`, in the form module:function, with some changes.

    Attributes:
        folder: search path of the module.
        scratch: folder for printed output.
        steps: of a window; more if steps take less than `least_s`.
        threads: torch's default number of threads.
        patience_s: see `PATIENCE_S`.
        first: observations of the first look, by an inspection that slows steps down.
        windows: observations of past windows; `machine` and `cpu_s` (of all processes) of the last.
        samples: per step, before any change.
    """

    reference: str
    folder: Path
    scratch: Path
    steps: int
    threads: int
    least_s: float = LEAST_S
    patience_s: float = PATIENCE_S
    debug: bool = False
    changes: Changes = field(default_factory=dict)
    first: Observations | None = None
    windows: list[Observations] = field(default_factory=list)
    machine: MachineObservations | None = None
    cpu_s: float = 0.0
    samples: float = 0.0

    def look(self) -> None:
        """Inspect the function before all windows: its operations, the lines of work between
        steps, and the GPU compute time.

        Raises:
            GpumixError: see `window`.
        """
        self.first = self._run(PROFILED_STEPS)
        # A function ending by itself has no more steps.
        self.steps = min(self.steps, self.first.steps)

    @property
    def kernels_share(self) -> float | None:
        """Fraction of a step in which a GPU computes; None: unknown."""
        if self.first is None or self.first.kernels_s is None:
            return None
        return self.first.kernels_s / self.first.step_s

    @property
    def operations(self) -> int | None:
        counts = None if self.first is None else self.first.operations
        return None if counts is None else counts.total

    def window(self) -> TimedWindow:
        """Run a window in a fresh process.

        Raises:
            InputError: the function does not exist, or takes no step within `patience_s`.
            TrainingError: the process died.
        """
        with watch_machine() as told:
            seen = self._run(0)
        self.machine = told()
        self.windows.append(seen)
        return TimedWindow(self._comparable_s(seen), seen.seconds, seen.input_share)

    def _comparable_s(self, seen: Observations) -> float:
        """Return seconds per step; after a batch change, per original number of samples."""
        if "batch_size" not in self.changes or not seen.samples or not self.samples:
            return seen.step_s
        return seen.step_s * self.samples / seen.samples

    def with_changes(self, changes: Changes) -> FunctionPatient:
        samples = self.samples or self.windows[-1].samples
        both = {**self.changes, **changes}
        return replace(self, changes=both, windows=[], machine=None, samples=samples)

    def suspects(self) -> list[Suspect]:
        """See `Patient`; settings found by measurement are not suspected again."""
        found = find_suspects(self.windows[-1], self.kernels_share)
        return [one for one in found if not one.changes.keys() <= self.changes.keys()]

    def unlike(self, before: FunctionPatient) -> str:
        added = self.changes.keys() - before.changes.keys()
        return describe_loss_difference(before.windows[-1].losses, self.windows[-1].losses, added)

    def remarks(self) -> Iterator[Remark]:
        seen, first = self.windows[-1], self.first or self.windows[-1]
        share = seen.input_share
        yield from remark_on_steering_reads(seen.syncs)
        yield from remark_on_unfused_attention(first.attention)
        own_s = seen.step_s * (1.0 - share) - seen.between_s / seen.steps
        yield from remark_on_loops(first.operations, own_s)
        yield from remark_on_remade_optimizers(seen)
        cpu_s = self.cpu_s / max(1, seen.steps)
        short = list(remark_on_cores(cpu_s, seen.step_s, seen.cores, share))
        yield from short or remark_on_starvation([share], [seen.limit])
        yield from remark_on_host_gap(seen, first.between, self.kernels_share)
        if self.machine is not None:
            yield from remark_on_machine(self.machine, input_share=share, retries=seen.retries)

    # -- its process -------------------------------------------------------------------------------

    def _run(self, profiled: int) -> Observations:
        order = WindowRequest(
            reference=self.reference,
            folder=str(self.folder),
            changes=self.changes,
            length=WindowLength(WARM_UP_STEPS, self.steps, profiled, self.least_s),
            threads=self.threads,
            debug=self.debug,
        )
        from gpumix.doctor.function.child import run_window

        log = self.scratch / "window.log"
        context = multiprocessing.get_context("forkserver")
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_window, args=(order, log, theirs), daemon=False)
        process.start()
        assert process.pid is not None, "it is started"
        theirs.close()
        try:
            self._answer(mine, process, log, "takes no step")
            begun_cpu_s = group_cpu_s(process.pid)
            seen: Observations = self._answer(mine, process, log, "does not finish its steps")
            self.cpu_s = group_cpu_s(process.pid) - begun_cpu_s
            process.join(GRACE_S)
            return seen
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            mine.close()

    def _answer(self, pipe: Any, process: Any, log: Path, lacking: str) -> Any:
        """Receive the process's next message; `lacking` describes the error after a timeout."""
        if not pipe.poll(self.patience_s):
            raise InputError(
                f"'{self.reference}' {lacking} within {self.patience_s:g} s",
                code="function-timeout",
                why=_last_words(log),
                fix="name a function that trains with an optimizer of torch, in this process",
            )
        try:
            kind, value = pipe.recv()
        except EOFError:
            process.join()
            raise TrainingError(
                f"the process of '{self.reference}' left with code {process.exitcode}",
                code="function-process-ended",
                why=_last_words(log),
            ) from None
        if kind == "error":
            assert isinstance(value, GpumixError)
            raise value
        return value


@contextmanager
def open_function_patient(
    reference: str,
    folder: Path,
    *,
    steps: int,
    patience_s: float = PATIENCE_S,
    debug: bool = False,
) -> Iterator[FunctionPatient]:
    """Provide the function `reference` from a module in `folder`, after one look.

    Raises:
        GpumixError: see `FunctionPatient.window`.
    """
    _warm_up(reference, folder)
    import torch

    with make_scratch_folder() as scratch:
        patient = FunctionPatient(
            reference=reference,
            folder=folder,
            scratch=scratch,
            steps=steps,
            threads=torch.get_num_threads(),
            patience_s=patience_s,
            debug=debug,
        )
        patient.look()
        yield patient


def _warm_up(reference: str, folder: Path) -> None:
    """Start the fork server and preload the module's known imports, if free of side effects, to
    avoid an import per window."""
    from gpumix.train.controller import TRANSFORMERS
    from gpumix.train.processes.local_launcher import warm_up

    file = folder / f"{reference.partition(':')[0].replace('.', '/')}.py"
    try:
        names = list_imports(read_text(file))
    except (OSError, SyntaxError, UnicodeDecodeError):  # reported by the import
        names = set()
    warm_up([*PRELOAD, *(TRANSFORMERS if "transformers" in names else ())])


def list_imports(source: str) -> set[str]:
    """Return the packages named in a module's imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def group_cpu_s(group: int) -> float:
    """Return the CPU seconds of a process group, including children reaped by living members; 0
    where unavailable."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # A process name, in parentheses, may contain any character.
            fields = read_log(file).rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _last_words(log: Path) -> str:
    with suppress(OSError):
        lines = read_log(log).splitlines()[-TOLD_LINES:]
        return "its last words: " + " / ".join(lines) if lines else ""
    return ""
