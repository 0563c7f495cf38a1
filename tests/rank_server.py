"""The server that ranks of tests are forked from, whether a test or gpumix starts them.

Whoever comes first would else choose what ranks have imported already.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from gpumix.train import launch

HERE = str(Path(__file__).parent)
IMPORTS = ("forked",)


def warm_up() -> None:
    """Start it, unless it runs. It finds modules by the environment alone: before Python 3.12
    `sys.path` is nothing to it."""
    paths = [HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        launch.warm_up(IMPORTS)
