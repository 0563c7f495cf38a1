"""Where tests run, and how property tests draw.

All tests run on the CPU, but those that `pytest -m gpu` chooses; without a GPU they run on the CUDA
device for tests: `python tests/cuda_device -- pytest -m gpu`. Properties are tried on the same
examples every time, so that a failure is no matter of luck; `--hypothesis-profile=explore` draws
new and many more.

What must not change by accident is in golden files; `make golden` writes them anew.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tqdm
from hypothesis import HealthCheck, settings

from cuda_device.environ import is_here
from helpers.draws import USUAL
from helpers.paths import USER_CODE
from helpers.processes import rank_server

# The code of tests' own jobs, found as a user's own is.
sys.path.append(str(USER_CODE))
os.environ.setdefault("GPUMIX_ALLOW", "toys mine")

# The lock of progress bars is one with that of forked processes, and tests kill some of those: with
# one that dies while it has the lock, no bar would go on.
tqdm.tqdm.set_lock(threading.RLock())
tqdm.tqdm.monitor_interval = 0

LONG_UNTIL = 0.7  # of all files, those with long tests are among the first so many
# Where all tests run, each process of them has use for it.
if "PYTEST_XDIST_WORKER" in os.environ:
    rank_server.warm_up()

# Examples that start processes take as long as they take.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=USUAL // 2,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("ci"), derandomize=False, max_examples=200
)
settings.load_profile("ci")  # another one: --hypothesis-profile explore


def pytest_configure(config):
    wanted = config.option.markexpr
    if ("gpu" not in wanted or "not gpu" in wanted) and not is_here():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks; ranks inherit it


def pytest_collection_modifyitems(config, items):
    """One worker tests all of a file (`--dist loadfile`), so that what its tests share is made
    once."""
    if not config.option.extended:
        left_out = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("extended")]
    places = _places(items)
    items.sort(key=lambda item: places[item.path])


def _places(items) -> dict[Path, float]:
    """Of each file, how far on it is tested. Those with long tests come early, so that what is left
    at the end is short, and files of a folder are far from each other: else all workers would wait
    at the same time, for ranks that hang, and later all compute."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    alike: dict[tuple[Path, bool], list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        alike.setdefault((path.parent, path in long), []).append(path)
    return {
        path: (number + 0.5) / len(paths) * (LONG_UNTIL if is_long else 1.0)
        for (_, is_long), paths in alike.items()
        for number, path in enumerate(paths)
    }


def pytest_collection_finish(session):
    """What is here by now stays: no collection of garbage goes through it again, also not in the
    processes that are forked."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--refresh-golden", action="store_true", help="write the golden files anew")
    parser.addoption("--extended", action="store_true", help="with all cases, however many")


@pytest.fixture
def golden(request):
    """`golden(name, found, rel)`: `found`, what JSON can hold, is in the file of that name in the
    folder `golden` beside the test; numbers may differ by a part `rel`."""

    def check(name: str, found: Any, *, rel: float) -> None:
        file = request.path.parent / "golden" / f"{name}.json"
        if request.config.getoption("refresh_golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        expected = json.loads(file.read_text(encoding="utf-8"))
        differing = list(_differences(json.loads(json.dumps(found)), expected, rel))
        assert not differing, "if that is on purpose: make golden"

    return check


def _differences(found: Any, expected: Any, rel: float, path: str = ""):
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        for key, value in found.items():
            yield from _differences(value, expected[key], rel, f"{path}.{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (mine, theirs) in enumerate(zip(found, expected)):
            yield from _differences(mine, theirs, rel, f"{path}[{number}]")
    elif isinstance(found, float) and isinstance(expected, float):
        if found != pytest.approx(expected, rel=rel):
            yield f"{path} is {found}, was {expected}"
    elif found != expected:
        yield f"{path} is {found}, was {expected}"
