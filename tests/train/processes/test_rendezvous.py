"""How torchrun's agents meet: at the endpoint alone, and in nothing that is code."""

from __future__ import annotations

import base64
import os
import pickle
import socket
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from gpumix.train.processes.rendezvous_handler import JsonRendezvousBackend, make_handler
from helpers.extended import every_second
from helpers.processes.harness import run_ranks

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # both loopback


@pytest.fixture(autouse=True)
def _environment_of_its_own(monkeypatch):
    """What an agent tells its ranks is for none that a later test starts."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def filled() -> _RendezvousState:
    """One of which nothing is as it begins."""
    one, two, three = (_NodeDesc(f"host-{n}", 10 + n, n) for n in range(3))
    state = _RendezvousState()
    state.round, state.complete, state.closed = 3, True, True
    state.deadline = datetime.now(UTC) + timedelta(seconds=30)
    state.participants = {one: 1, two: 0}
    state.wait_list, state.redundancy_list = {three}, {two}
    state.last_heartbeats = {one: datetime.now(UTC), two: datetime.now(UTC)}
    return state


def backend(store: dist.Store) -> JsonRendezvousBackend:
    return JsonRendezvousBackend(store, "run")


def test_what_agents_agree_on_is_all_of_torchs_state():
    store, state = dist.HashStore(), filled()
    assert backend(store).get_state() is None
    _, token, was_set = backend(store).set_state(pickle.dumps(state))
    assert was_set
    told, seen = backend(store).get_state()
    assert vars(pickle.loads(told)) == vars(state) and seen == token
    assert all(vars(state)[name] for name in vars(_RendezvousState()))


def test_who_does_not_know_the_last_changes_nothing():
    store = dist.HashStore()
    first, second = filled(), filled()
    second.round = 4
    _, token, _ = backend(store).set_state(pickle.dumps(first))
    now, _, was_set = backend(store).set_state(pickle.dumps(second))
    assert not was_set and pickle.loads(now).round == 3
    now, _, was_set = backend(store).set_state(pickle.dumps(second), token)
    assert was_set and pickle.loads(now).round == 4


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_store_is_not_read(tmp_path):
    store, bomb = dist.HashStore(), pickle.dumps(Bomb(tmp_path / "boom"))
    dist.PrefixStore("gpumix/agents", store).set("run", base64.b64encode(bomb).decode())
    with pytest.raises(RendezvousStateError, match="nonsense"):
        backend(store).get_state()
    assert not (tmp_path / "boom").exists()


def parameters(endpoint: str, **told: object) -> RendezvousParameters:
    return RendezvousParameters("gpumix", endpoint, "run", 1, 2, **told)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _meet(host: str) -> tuple[list[bool], str, str]:
    told = parameters(f"{host}:0", is_host="true")
    met = make_handler(told)
    port = met._store.port
    second = parameters(f"{host}:{port}")
    make_handler(second)  # which finds that the first one has the store
    apart = os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    assert not met.use_agent_store
    return [_listens(at, port) for at in (HERE, ELSEWHERE)], second.local_addr, apart


@pytest.mark.parametrize(
    ("host", "reached"), every_second([(HERE, [True, False]), (ELSEWHERE, [False, True])])
)
def test_agents_listen_at_the_endpoint_alone(host, reached):
    (told,) = run_ranks(_meet, 1, host)
    listens, address, apart = told
    assert listens == reached and apart == "1"
    assert address.startswith("127.")  # not what the host's name stands for


def test_torchrun_finds_it():
    (entry,) = [e for e in entry_points(group="torchrun.handlers") if e.name == "gpumix"]
    made = entry.load()()
    assert made(parameters(f"{HERE}:0", is_host="true")).get_backend() == "gpumix"
