"""Child process of one window: runs the user's function like its own script, watched and with
changes, and sends the observations.

The process is forked from a process with torch imported, and leads its own process group, so that
all its descendants can be killed together. Output of the function goes to a file.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumix.data.core.factory import call_factory
from gpumix.doctor.function.changing import apply_changes
from gpumix.doctor.function.observations import Observations, WindowRequest
from gpumix.doctor.function.patches import Patches
from gpumix.doctor.function.watching.attention import UnfusedAttentionFinder
from gpumix.doctor.function.watching.kernels import KernelProfile
from gpumix.doctor.function.watching.loops import OperationCounter
from gpumix.doctor.function.watching.operations import OperationInspector
from gpumix.doctor.function.watching.roots import RootModules
from gpumix.doctor.function.watching.steps import LEAST_STEPS, StepCounter, WindowDone
from gpumix.doctor.function.watching.watch import FunctionWatch
from gpumix.hardware.runtime import device_count
from gpumix.schema.errors import InputError
from gpumix.schema.files import open_log
from gpumix.schema.units import format_count
from gpumix.train.processes.error_translation import translate_error


def run_window(order: WindowRequest, log: Path, pipe: Connection) -> None:
    """Run the child process from start to exit. Messages to the parent are pairs: "begun", then
    "seen" with `Observations`, or "error" with an error."""
    os.setsid()
    threading.Thread(target=_end_with_parent, name="gpumix-orphan", daemon=True).start()
    talk = _redirect_output(log)
    try:
        with Patches() as patches:
            watch_function(order, patches, pipe.send)
    except BaseException as error:
        if order.debug:
            traceback.print_exception(error, file=talk)
        pipe.send(("error", translate_error(error, order.reference)))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


def watch_function(order: WindowRequest, patches: Patches, send: Any) -> None:
    """Call the function, and send observations of its steps.

    Raises:
        InputError: the function does not exist, or took too few steps.
        Exception: raised by the function.
    """
    _reset_process_state(order.threads)
    gpu = device_count() > 0
    roots = RootModules(apply_changes(order.changes, patches))
    watch = FunctionWatch(roots, samples=order.length.profiled > 0)
    watch.install(patches, gpu=gpu)
    kernels, attention, counter = KernelProfile(), UnfusedAttentionFinder(), OperationCounter()
    inspector = OperationInspector(attention, counter)
    found: list[Observations] = []
    measured = 0  # steps before the profiled ones

    def begins() -> None:
        inspector.end()
        roots.found()
        watch.begin()
        send(("begun", None))

    def ends() -> None:
        nonlocal measured
        measured = steps.done
        found.append(watch.end(steps))
        if order.length.profiled and steps.counted >= order.length.steps:
            kernels.begin()

    def leaves() -> None:
        computing_s, profiled = kernels.seconds(), steps.done - measured
        if computing_s is not None:  # the function may have ended before all profiled steps
            computing_s = computing_s / profiled if profiled else None
        seen = replace(
            found[0],
            kernels_s=computing_s,
            attention=tuple(attention.places),
            operations=counter.last,
        )
        send(("seen", seen))

    length = order.length if gpu else replace(order.length, profiled=0)
    steps = StepCounter(
        length,
        settled=watch.loaders.settled,
        each=counter.next_step,
        begins=begins,
        ends=ends,
        leaves=leaves,
    )
    for hook in (watch.stepped, steps.step):
        patches.callback(register_optimizer_step_post_hook(hook).remove)
    patches.callback(roots.end)
    roots.find()
    if order.length.profiled:
        patches.callback(inspector.end)
        inspector.begin()
    try:
        made = call_factory(order.reference, {}, Path(order.folder))
    except WindowDone:
        return
    if not steps.end_early():
        raise _make_too_few_error(order, steps, made)
    leaves()


def _make_too_few_error(order: WindowRequest, steps: StepCounter, made: Any) -> InputError:
    if isinstance(made, Iterator | Awaitable | AsyncIterator):
        return InputError(
            f"'{order.reference}' gives a {type(made).__name__}, and trains nothing by itself",
            code="function-trains-nothing",
            fix="name a function that goes through it: `for _ in ...: pass`, `asyncio.run(...)`",
        )
    if not steps.done:
        return InputError(
            f"'{order.reference}' ended without a step of an optimizer",
            code="function-without-step",
            fix="name the function that trains: steps are counted by optimizers of torch",
        )
    return InputError(
        f"'{order.reference}' ended after {format_count(steps.done, 'step')}",
        code="function-ended-early",
        why=f"{order.length.warm_up} warm it up, and {LEAST_STEPS} at least are measured",
        fix="let it train longer: it is ended as soon as enough was seen",
    )


def _reset_process_state(threads: int) -> None:
    """Reset process state as at a script's start, with equal random seeds in all windows for
    functions without seeding."""
    torch.set_num_threads(threads)
    default, *_ = multiprocessing.get_all_start_methods()  # the first is this platform's default
    multiprocessing.set_start_method(default, force=True)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    sys.argv = sys.argv[:1]


def _redirect_output(log: Path) -> Any:
    """Redirect stdout and stderr to `log`; return the previous stderr."""
    talk = os.fdopen(os.dup(2), "w")
    with open_log(log) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    return talk


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
