"""`jobs.py` and what its jobs train lie with the tests of `train`; hosts that ssh reaches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd import Hosts, NotHere, hosts

sys.path.append(str(Path(__file__).parents[1] / "train"))


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> Iterator[Hosts]:
    """Two names that ssh knows, both of them this machine."""
    try:
        with hosts(tmp_path_factory.mktemp("ssh")) as made:
            yield made
    except NotHere as error:
        pytest.skip(str(error))
