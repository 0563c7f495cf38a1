"""A plugin of pytest: each test in a forked process, with a time limit, and a line about its end.

The process that forks has imported the library and the tests; a test that hangs or dies takes
nothing with it, and libraries with one global state begin each test without it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from gpumix.hardware.host.environment import cache_folder
from gpumix.hardware.memory_limit.build_allocator import LIBRARY_FOLDER
from gpumix.schema.errors import GpumixError
from suites_of import results, stand_ins, swaps
from zoo_of.forking import kill_group

# Before any conftest.py, which may put sources of the same name before what is installed.
importlib.import_module(os.environ["SUITES_PACKAGE"])
MOST_WORDS = 1500  # of a failure


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites")
    for name in ("suite", "side", "out", "only", "part", "limit"):
        group.addoption(f"--suites-{name}", default="")


class Walk:
    """The tests of one suite, on one side.

    Attributes:
        used: whether a test has made an object of gpumix's classes.
    """

    def __init__(self, config: pytest.Config) -> None:
        def told(name: str) -> str:
            return str(config.getoption(f"--suites-{name}"))

        self.suite, self.side, self.out = told("suite"), told("side"), Path(told("out"))
        self.only, self.part, self.limit = told("only"), told("part"), float(told("limit"))
        self.used = False
        self._refusal = ""
        stand_ins.provide(self.suite)
        if self.side == "ours":
            swaps.plan_by_hands()
            swaps.SWAPS[self.suite](self.note)

    def note(self) -> None:
        self.used = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # the file counts as one test
            why = str(report.longreprtext)[-MOST_WORDS:]
            line = {"suite": self.suite, "test": report.nodeid, "side": self.side}
            results.add(self.out, {**line, "outcome": "failed", "why": why})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        lines = results.read(self.out)
        number, parts = map(int, self.part.split("/"))
        found = [item for item in items if re.search(self.only, item.nodeid)][number - 1 :: parts]
        done = {one["test"]: one for one in lines if one["side"] == self.side}
        stock = {one["test"]: one for one in lines if one["side"] == "stock"}
        items[:] = [
            item
            for item in found
            if item.nodeid not in done
            and (self.side == "stock" or stock.get(item.nodeid, {}).get("outcome") == "passed")
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="suites-") as folder:
            path = Path(folder) / "result"
            pid = os.fork()
            if not pid:
                self._run(item, path)
            ended = _wait(pid, self.limit)
            found = pickle.loads(path.read_bytes()) if path.exists() else None
        if found is None:
            why = "ended without a result" if ended else f"no end in {self.limit:g} s"
            found = {"outcome": "failed", "why": why}
        line = {"suite": self.suite, "test": item.nodeid, "side": self.side, **found}
        line["seconds"] = round(time.monotonic() - begun, 1)
        results.add(self.out, line)
        return True

    def _run(self, item: pytest.Item, path: Path) -> None:
        """In the forked process, which it ends."""
        try:
            os.setpgid(0, 0)
            with tempfile.TemporaryDirectory(prefix="suites-") as folder:
                _with_libraries(Path(folder))
                os.environ["XDG_CACHE_HOME"] = folder
                self.used = False
                reports = runtestprotocol(item, log=False, nextitem=None)
            found = {"outcome": outcome_of(reports), "used": self.used}
            if found["outcome"] != "passed":
                found["why"] = why_of(reports)
                found["refusal"] = self._refusal
            part = path.with_suffix(".part")
            part.write_bytes(pickle.dumps(found))
            part.rename(path)
        finally:
            os._exit(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.excinfo is not None and not self._refusal:  # of unittest's it is there only now
            self._refusal = refusal_in(call.excinfo.value)
        return report


def _with_libraries(folder: Path) -> None:
    """Put what gpumix compiled before into a cache folder that is else empty."""
    compiled = cache_folder() / LIBRARY_FOLDER
    if compiled.is_dir():
        own = folder / cache_folder().name
        own.mkdir(mode=0o700)
        shutil.copytree(compiled, own / LIBRARY_FOLDER)


def _wait(pid: int, limit: float) -> bool:
    """Whether a process and its children ended by themselves."""
    end = time.monotonic() + limit
    ended = False
    while not ended and time.monotonic() < end:
        ended = bool(os.waitpid(pid, os.WNOHANG)[0])
        time.sleep(0.01)
    kill_group(pid)
    if not ended:
        os.waitpid(pid, 0)
    return ended


def outcome_of(reports: list[Any]) -> str:
    """`passed` only if setup, call and teardown did."""
    outcomes = [one.outcome for one in reports]
    return next((one for one in ("failed", "skipped") if one in outcomes), "passed")


def why_of(reports: list[Any]) -> str:
    """The last words of the first report that is not good."""
    bad = next(one for one in reports if one.outcome != "passed")
    if isinstance(bad.longrepr, tuple):  # of a test that is skipped
        return str(bad.longrepr[2])
    return str(bad.longreprtext)[-MOST_WORDS:]


def refusal_in(error: BaseException) -> str:
    """The words of gpumix's own error behind an error, or none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GpumixError):
            return f"{type(seen).__name__}: {seen}"
        seen = seen.__cause__ or seen.__context__
    told = re.search(r"gpumix\.\S*?(\w+Error: .*(?:\n.*){0,5})", str(error))
    return told[1] if told else ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Walk(config), "suites-walk")
