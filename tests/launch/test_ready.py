"""Hosts that are not ready are told before anything starts; facts judged, and real hosts asked."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from gpumix.launch.probes import probe, survey
from gpumix.launch.probes.readiness import ProbeFacts, check_rendezvous, refuse_unready
from gpumix.schema.errors import InputError, MachineError
from helpers.extended import left_out
from helpers.processes.sshd import CLOSED, LOCKED, SILENT, STRANGE
from helpers.runs.jobs import gpumix

HERE = ProbeFacts(
    host="here",
    python="3.11.7",
    gpumix="0.1.0",
    digest="abc",
    torch=None,
    libraries={},
    devices=0,
    files={"train.py": "123"},
    listening=None,
)
THERE = replace(HERE, host="there", torch="2.13.0+cu130", devices=2)


def refused(counted=(), **hosts: ProbeFacts) -> MachineError | InputError:
    with pytest.raises((MachineError, InputError)) as caught:
        refuse_unready(hosts, HERE, counted=counted)
    return caught.value


def test_hosts_may_differ_in_builds_and_in_minor_versions_of_python():
    other = replace(THERE, python="3.12.1", torch="2.13.0+rocm7.0", devices=8)
    refuse_unready({"a": THERE, "b": other}, HERE, counted=["a", "b"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"python": "3.9.2"}, "its Python is 3.9.2, gpumix needs 3.11 to 3.13"),
        ({"gpumix": None, "digest": None}, "its Python has no gpumix"),
        ({"torch": None}, "its Python has no torch"),
        ({"gpumix": "0.2.0"}, "its gpumix is 0.2.0, here it is 0.1.0"),
        ({"digest": "abd"}, "its gpumix is 0.1.0 as here, but with other code"),
        ({"files": {"train.py": None}}, "train.py is not there"),
        ({"files": {"train.py": "124"}}, "train.py differs from the one here"),
        ({"devices": "the NVIDIA driver does not start"}, "its devices cannot be counted"),
    ],
)
def test_a_host_that_is_not_ready_is_named(changes, said):
    error = refused(a=THERE, b=replace(THERE, **changes), counted=["b"])
    assert (error.where, error.what) == ("host b", said)
    assert error.fix


def test_devices_count_only_where_nobody_said_how_many():
    refuse_unready({"a": replace(THERE, devices="no driver")}, HERE, counted=[])


def test_two_hosts_with_different_versions_are_named():
    error = refused(a=THERE, b=THERE, c=replace(THERE, torch="2.12.1"))
    assert error.where == "hosts a and c"
    assert error.what == "torch is 2.13.0 on a and 2.12.1 on c"


def test_libraries_of_scripts_are_of_one_version_where_they_are():
    old = replace(THERE, libraries={"transformers": "5.15.0", "trl": None})
    new = replace(THERE, libraries={"transformers": "5.16.0", "trl": "1.0"})
    refuse_unready({"a": old, "b": old, "c": THERE}, HERE, counted=[])
    error = refused(a=old, b=new)
    assert error.what == "transformers is 5.15.0 on a and 5.16.0 on b"
    assert "trl" not in str(error)


def test_a_host_tells_the_versions_of_what_reads_and_trains():
    told = survey.gather_local_facts([]).libraries
    for name in ("datasets", "transformers"):
        assert told[name] == version(name)


def test_all_hosts_that_are_not_ready_are_told_at_once():
    error = refused(a=replace(THERE, torch=None), b=replace(THERE, files={"train.py": None}))
    assert "host a: its Python has no torch" in str(error)
    assert "and host b: train.py is not there" in str(error)


@pytest.mark.parametrize(
    ("address", "told", "said"),
    [
        ("a", {"error": "Address already in use"}, "Address already in use"),
        ("a", {"ip": "127.0.1.1", "port": 5}, "it calls itself a, which is 127.0.1.1 there"),
    ],
)
def test_where_ranks_cannot_meet_is_told(address, told, said):
    with pytest.raises(MachineError) as caught:
        check_rendezvous(address, replace(THERE, listening=told), host="a", alone=False)
    assert said in str(caught.value)
    assert "--address" in caught.value.fix


def test_where_ranks_meet():
    for address, ip in (("a", "10.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")):
        facts = replace(THERE, listening={"ip": ip, "port": 7})
        assert check_rendezvous(address, facts, host="a", alone=False).port == 7


def test_a_probe_finds_a_free_port_and_says_why_there_is_none():
    found = probe.find_free_port("127.0.0.1", 0)
    assert found["ip"] == "127.0.0.1" and found["port"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert probe.find_free_port("127.0.0.1", taken) == {"error": "Address already in use"}
    assert "error" in probe.find_free_port("192.0.2.1", 0)


# -- real hosts ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("print('it was started')")
    return tmp_path


def launch(two, folder, *words: str):
    """With what hosts need; they have nothing of this process's environment."""
    found = ("--ssh", two.ssh, "--env", "PYTHONPATH")
    done = gpumix("launch", *found, *words, "train.py", folder=folder)
    assert "it was started" not in done.out + done.err
    assert "Traceback" not in done.err
    return done


NOT_ANSWERING = [
    ("no-such-host.invalid", "Could not resolve hostname", "~/.ssh/config"),
    (SILENT, "timed out", "--timeout"),
    (CLOSED, "Connection refused", f"ssh {CLOSED}"),
    (STRANGE, "Host key verification failed", f"look at its key: ssh {STRANGE}"),
    (LOCKED, "Permission denied", f"ssh-copy-id {LOCKED}"),
]


@pytest.mark.parametrize(("host", "said", "fix"), left_out(NOT_ANSWERING, NOT_ANSWERING[1:]))
def test_a_host_that_does_not_answer_is_named(two, folder, host, said, fix):
    done = launch(two, folder, "--timeout", "2", "--hosts", f"gpx-a:1,{host}:1")
    assert done.code == 3
    assert f"gpumix: host {host}: it does not answer" in done.err
    assert said in done.err and fix in done.err


@pytest.mark.extended
def test_an_interpreter_that_is_not_there_or_is_another_is_told(two, folder):
    done = launch(two, folder, "--hosts", "gpx-a,gpx-b", "--python", "gpx-b=/nowhere/python")
    assert done.code == 3
    assert "host gpx-b: it has no Python at /nowhere/python" in done.err
    other = folder / "python"
    other.write_text(
        f'#!/bin/sh\n{sys.executable} "$@" | sed \'s/"torch": "[^"]*/"torch": "1.0/\'\n'
    )
    other.chmod(0o755)
    done = launch(two, folder, "--hosts", "gpx-a,gpx-b", "--python", f"gpx-b={other}")
    assert done.code == 3
    assert "hosts gpx-a and gpx-b: torch is" in done.err and "1.0 on gpx-b" in done.err


@pytest.mark.extended
def test_a_folder_that_is_not_there_is_told(two, folder):
    done = launch(two, folder, "--hosts", "gpx-a", "--folder", "/nowhere")
    assert "host gpx-a: it has no folder /nowhere" in done.err


def test_a_file_that_is_not_there_is_told(two, folder):
    (folder / "elsewhere").mkdir()
    done = launch(two, folder, "--hosts", "gpx-a,gpx-b", "--folder", str(folder / "elsewhere"))
    assert done.code == 2
    assert "host gpx-a: train.py is not there" in done.err and "and host gpx-b:" in done.err


@pytest.mark.extended
def test_a_port_in_use_is_told(two, folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = launch(two, folder, "--hosts", "gpx-a,gpx-b", "--port", str(port))
    assert done.code == 3
    assert "host gpx-a: it cannot listen at 127.0.0.1" in done.err
    assert "Address already in use" in done.err


def test_where_there_is_no_ssh_that_is_told(folder):
    done = gpumix("launch", "--ssh", "no-such-ssh", "--hosts", "a", "train.py", folder=folder)
    assert done.code == 3
    assert "no-such-ssh cannot be run here" in done.err
