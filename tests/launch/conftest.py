"""Hosts that ssh reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes.sshd import Hosts, NotHere, hosts, hosts_apart
from helpers.processes.two_hosts import NotAllowed, Wire, wire


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> Iterator[Hosts]:
    """Two names that ssh knows, both of them this machine."""
    try:
        with hosts(tmp_path_factory.mktemp("ssh")) as made:
            yield made
    except NotHere as error:
        pytest.skip(str(error))


@pytest.fixture
def joined() -> Iterator[Wire]:
    """Two hosts of their own names, in namespaces, with a cable between them."""
    try:
        with wire() as made:
            yield made
    except NotAllowed as error:
        pytest.skip(f"no hosts of one's own here: {error}")


@pytest.fixture
def apart(joined, tmp_path_factory) -> Iterator[Hosts]:
    """What reaches them by ssh."""
    try:
        with hosts_apart(tmp_path_factory.mktemp("apart"), joined) as made:
            yield made
    except NotHere as error:
        pytest.skip(str(error))
