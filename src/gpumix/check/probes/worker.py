"""Per-rank server of check tasks: takes tasks from the store and runs each in a child process.

A process exceeding its time limit is killed, and the next task starts a new process. The asking
rank gets an answer even if a task hangs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpumix.check.facts.cluster import RankFacts
from gpumix.check.probes.probe import JsonDict, ProbeSettings, RankProbe
from gpumix.engine.rank_group import STORE_ERRORS
from gpumix.schema.files import open_log, read_log, remove_quietly
from gpumix.train.processes.error_translation import translate_error
from gpumix.train.processes.local_launcher import RankAddress, end_with_launcher, warm_up

STORE_PREFIX = "check"  # prefix of the check's keys in the store
END = "end"
# Poll intervals of the store: short after a task, because the next task usually follows soon.
SHORT_POLL_S, LONG_POLL_S = 0.001, 0.02
START_S = 25.0  # limit for starting a rank's first process, which imports torch
RESTART_S = 4.0  # limit for starting a later process, forked with torch already imported
PRELOAD = ("gpumix.check.probes.probe",)
KILLED_S = 1.0  # wait for a killed process to exit
ProbeFactory = Callable[[RankAddress, ProbeSettings], RankProbe]


def next_task(words: dist.Store, number: int, until: float) -> JsonDict | None:
    """Wait for task `number` of a rank, under the rank's store prefix `words`; return None once
    `time.monotonic()` passes `until`."""
    asked = time.monotonic()
    while not words.check([f"task/{number}"]):
        now = time.monotonic()
        if now > until:
            return None
        time.sleep(SHORT_POLL_S if now - asked < 10 * LONG_POLL_S else LONG_POLL_S)
    task: JsonDict = json.loads(words.get(f"task/{number}").decode())
    return task


class TaskServer:
    """Task server of a rank; runs in a thread where a process serves several ranks.

    Args:
        hello: facts published by the rank on arrival.
        make: factory of the probe run by the child processes; a class or function of a module.
    """

    def __init__(
        self,
        seat: RankAddress,
        setting: ProbeSettings,
        store: dist.Store,
        *,
        hello: RankFacts,
        make: ProbeFactory,
    ) -> None:
        self._words = dist.PrefixStore(f"{STORE_PREFIX}/{seat.rank}", store)
        self._hello = hello
        self._process = _Process(seat, setting, make)

    def serve(self, until: float) -> bool:
        """Serve tasks until the end task arrives or `time.monotonic()` passes `until`; return True
        if the check failed, as far as this process knows."""
        number = 0
        try:
            trouble = self._process.start(START_S)
            hello = self._hello.model_copy(update={"trouble": trouble})
            self._words.set("hello", hello.model_dump_json())
            while True:
                task = next_task(self._words, number, until)
                if task is None or task["task"] == END:
                    return task is None or bool(task["failed"])
                clock = {"value": {"now_s": time.time()}} if task["task"] == "clock" else None
                answer = clock or self._process.ask(task)
                self._words.set(f"answer/{number}", json.dumps(answer))
                number += 1
        except STORE_ERRORS:  # the asking process is gone
            return True
        finally:
            self.end()

    def end(self) -> None:
        """Kill the child process, and start no further process."""
        self._process.end()


class _Process:
    """A rank's probe process, started on demand."""

    def __init__(self, seat: RankAddress, setting: ProbeSettings, make: ProbeFactory) -> None:
        self._args = (make, seat, setting)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._log = Path()
        self._ending = threading.Lock()
        self._over = False

    def ask(self, task: JsonDict) -> JsonDict:
        """Return the process's answer to a task; kill the process after a failure or a timeout."""
        trouble = self.start(RESTART_S) if self._pipe is None else ""
        pipe = self._pipe
        if pipe is None:
            return _make_failure(trouble or "its process was ended", silent=True)
        deadline = time.monotonic() + task["limit_s"]
        answer: JsonDict
        try:
            pipe.send_bytes(json.dumps(task).encode())
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                answer = json.loads(pipe.recv_bytes())
            else:
                answer = _make_failure(f"no answer within {task['limit_s']:.0f} s", silent=True)
        except (EOFError, OSError):
            self._process.join(KILLED_S)
            answer = _make_failure(_describe_exit(self._process.exitcode, self._log), silent=True)
        if "value" not in answer:
            self.kill()
        return answer

    def start(self, patience_s: float) -> str:
        """Start the process and wait until ready; return an error message, empty on success."""
        warm_up(preload=PRELOAD)
        context = multiprocessing.get_context("forkserver")
        mine, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="gpumix-check-")
        os.close(descriptor)
        self._log = Path(name)
        self._process = context.Process(target=_run, args=(*self._args, theirs, name), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = mine
        if self._over:  # another thread called `end` during the start
            self.kill()
            return "its process was ended"
        trouble = f"its process did not start within {patience_s:.0f} s"
        try:
            if mine.poll(patience_s):
                mine.recv_bytes()
                return ""
        except (EOFError, OSError):
            self._process.join(KILLED_S)
            trouble = _describe_exit(self._process.exitcode, self._log)
        self.kill()
        return trouble

    def end(self) -> None:
        self._over = True
        self.kill()

    def kill(self) -> None:
        """Kill the process, from any thread; a pending `ask` fails."""
        with self._ending:
            pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        self._process.kill()
        self._process.join(KILLED_S)
        # A process blocked on a lost disk cannot be killed, and nothing should join it at exit.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        pipe.close()
        remove_quietly(self._log)


def _run(
    make: ProbeFactory, seat: RankAddress, setting: ProbeSettings, pipe: Connection, log: str
) -> None:
    """Run the child process: send output to its log, and answer tasks from the pipe."""
    if not setting.debug:
        with open_log(Path(log)) as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    end_with_launcher()
    torch.set_num_threads(1)
    probe = make(seat, setting)
    with suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            task = json.loads(pipe.recv_bytes())
            try:
                answer: JsonDict = {"value": probe.answer(task["task"], task["given"])}
            except Exception as error:
                if setting.debug:
                    traceback.print_exc()
                told = translate_error(error, "")
                answer = _make_failure(told.what, why=told.why, fix=told.fix)
            pipe.send_bytes(json.dumps(answer).encode())


def _make_failure(what: str, *, why: str = "", fix: str = "", silent: bool = False) -> JsonDict:
    return {"error": f"{what}: {why}" if why else what, "fix": fix, "silent": silent}


def _describe_exit(exit_code: int | None, log: Path) -> str:
    """Describe a process's exit, with the last line of its log."""
    how = f"its process left with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"its process was ended by {signal.Signals(-exit_code).name}"
    lines: list[str] = []
    with suppress(OSError):
        lines = read_log(log).strip().splitlines()
    return f"{how}: {lines[-1].strip()}" if lines else how
