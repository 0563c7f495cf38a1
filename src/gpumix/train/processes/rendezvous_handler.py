"""Rendezvous of torchrun's agents with `--rdzv-backend gpumix`: no listening on all addresses, and
no pickle from the network.

It follows torch's `c10d` backend and leaves all decisions to torch. There, the agents' store
listens everywhere, as does a second store for ranks, and the agents' state is a pickle in the
first: anyone reaching the port can run code on all hosts. Here the store listens at the endpoint,
the state is JSON, and the first rank owns the ranks' store (`store`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from errno import EADDRINUSE

import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from gpumix.hardware.host.environment import disable_agent_store
from gpumix.schema.errors import MachineError, get_first_line
from gpumix.schema.value import Value
from gpumix.train.processes.store import create_listening_store
from gpumix.train.processes.tcp_connections import find_own_address

NAME = "gpumix"
DEFAULT_PORT = 29400  # where the endpoint names none, as in torch
READ_TIMEOUT = timedelta(seconds=60)


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return an agent's rendezvous handler; `parameters` are as in `c10d`. The ranks' address
    announced to other hosts is the agent's address towards the endpoint, unless given."""
    disable_agent_store()
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    store = _store(host, port, parameters)
    parameters.local_addr = parameters.local_addr or find_own_address(host, store.port)
    return torchs.create_handler(store, JsonRendezvousBackend(store, parameters.run_id), parameters)


def _store(host: str, port: int, parameters: RendezvousParameters) -> dist.TCPStore:
    """Return the agents' store: the first agent on the endpoint's host serves it."""
    told = parameters.get_as_bool("is_host")
    if _matches_machine_hostname(host) if told is None else told:
        try:
            return create_listening_store(host, port, one_host=parameters.max_nodes == 1)
        except MachineError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == EADDRINUSE
            if told or not taken:
                raise RendezvousConnectionError(str(error)) from error
    with _convert_store_errors():
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=READ_TIMEOUT
        )


class JsonRendezvousBackend(torchs.RendezvousBackend):
    """State shared by agents: one value of a store, changed only by an agent knowing the last.

    torch's side of it is in pickles, each written and read within one process.
    """

    def __init__(self, store: dist.Store, run_id: str) -> None:
        self._store = dist.PrefixStore("gpumix/agents", store)
        self._key = run_id

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, str] | None:
        with _convert_store_errors():
            if not self._store.check([self._key]):
                return None
            text = self._store.get(self._key).decode()
        return _pickle_state(text), text

    def set_state(self, state: bytes, token: str | None = None) -> tuple[bytes, str, bool]:
        text = _State.of(pickle.loads(state)).model_dump_json()
        with _convert_store_errors():
            now = self._store.compare_set(self._key, token or "", text).decode()
        return _pickle_state(now), now, now == text


class _Node(Value):
    """An agent."""

    addr: str
    pid: int
    local_id: int

    @classmethod
    def of(cls, node: torchs._NodeDesc) -> _Node:
        return cls(addr=node.addr, pid=node.pid, local_id=node.local_id)

    def torchs(self) -> torchs._NodeDesc:
        return torchs._NodeDesc(self.addr, self.pid, self.local_id)


class _State(Value):
    """State agreed on by agents, as in torch."""

    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    participants: tuple[tuple[_Node, int], ...]
    wait_list: tuple[_Node, ...]
    redundancy_list: tuple[_Node, ...]
    last_heartbeats: tuple[tuple[_Node, datetime], ...]

    @classmethod
    def of(cls, state: torchs._RendezvousState) -> _State:
        return cls(
            round=state.round,
            complete=state.complete,
            deadline=state.deadline,
            closed=state.closed,
            participants=tuple((_Node.of(n), rank) for n, rank in state.participants.items()),
            wait_list=tuple(map(_Node.of, state.wait_list)),
            redundancy_list=tuple(map(_Node.of, state.redundancy_list)),
            last_heartbeats=tuple((_Node.of(n), at) for n, at in state.last_heartbeats.items()),
        )

    def torchs(self) -> torchs._RendezvousState:
        state = torchs._RendezvousState()
        state.round, state.complete = self.round, self.complete
        state.deadline, state.closed = self.deadline, self.closed
        state.participants = {node.torchs(): rank for node, rank in self.participants}
        state.wait_list = {node.torchs() for node in self.wait_list}
        state.redundancy_list = {node.torchs() for node in self.redundancy_list}
        state.last_heartbeats = {node.torchs(): at for node, at in self.last_heartbeats}
        return state


def _pickle_state(text: str) -> bytes:
    """Return the state pickled for torch, within this process."""
    try:
        return pickle.dumps(_State.model_validate_json(text).torchs())
    except ValidationError as error:
        raise RendezvousStateError(f"agents told nonsense: {error.errors()[0]['msg']}") from error


@contextmanager
def _convert_store_errors() -> Iterator[None]:
    """Convert the errors of a store into errors known to torch's agents."""
    try:
        yield
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"the agents' store fails: {get_first_line(error)}"
        ) from error
