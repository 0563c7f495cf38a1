"""The server that ranks of tests are forked from, whether a test or gpumix starts them.

Whoever comes first would else choose what ranks have imported already.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.forkserver import _forkserver

from gpumix.train.processes import local_launcher
from helpers.paths import TESTS

IMPORTS = ("helpers.processes.forked",)
NAME = "PYTHONPATH"
_STARTING = threading.Lock()


def warm_up() -> None:
    """Start it, unless it runs; in any thread. It finds modules by the environment alone: before
    Python 3.12 `sys.path` is nothing to it."""
    with _STARTING:
        if _forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
            return local_launcher.warm_up(IMPORTS)
        before = os.environ.get(NAME)
        os.environ[NAME] = os.pathsep.join(filter(None, [str(TESTS), before]))
        try:
            local_launcher.warm_up(IMPORTS)
        finally:
            if before is None:
                del os.environ[NAME]
            else:
                os.environ[NAME] = before
