"""What users say of hosts and interpreters, and which ranks hosts get by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumix.launch.commands import LaunchEnvironment, RendezvousAddress, Ssh, make_host_line
from gpumix.launch.hosts import (
    Host,
    assign_ranks,
    find_uncounted,
    get_cluster_hosts,
    read_hosts,
    sort_by_rank,
)
from gpumix.launch.options import parse_pythons, parse_variables
from gpumix.launch.program import Program
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import InputError
from helpers.errors import raises

GPU = DeviceClass(name="gpu", accelerator="cuda", memory_bytes=2**30)


def cluster(**devices: int) -> Cluster:
    """So many on each host."""
    made = [
        Device(id=f"{host}-{n}", device_class="gpu", host=host, ordinal=n)
        for host, count in devices.items()
        for n in range(count)
    ]
    return Cluster(classes=(GPU,), devices=tuple(made))


def ranks(places) -> dict[str, tuple[int, int]]:
    return {place.host.name: (place.first, place.processes) for place in places}


# -- hosts -----------------------------------------------------------------------------------------


def test_hosts_are_words_or_lines_of_a_file(tmp_path):
    expected = (Host("a"), Host("me@b.example", 8))
    assert read_hosts("a,me@b.example:8") == expected
    file = tmp_path / "hosts"
    file.write_text("# ours\na\n\nme@b.example slots=8  # the new one\n")
    assert read_hosts(str(file)) == expected


@pytest.mark.parametrize(
    "text", ["", "a,", "a,a:2", "a:0", "a b", "-oProxyCommand=x", "a;b", "a:-1", "a:x", "$(x)"]
)
def test_what_names_no_hosts_is_refused(text):
    with pytest.raises(InputError) as caught:
        read_hosts(text)
    assert caught.value.where == f"--hosts {text}"


def test_hosts_without_a_cluster_have_what_is_said_or_found():
    hosts = read_hosts("b:3,a,c")
    assert find_uncounted(hosts, None) == ["a", "c"]
    places = assign_ranks(sort_by_rank(hosts, None), None, {"b": 8, "a": 2, "c": 1})
    assert ranks(places) == {"b": (0, 3), "a": (3, 2), "c": (5, 1)}


def test_hosts_of_a_cluster_go_in_the_order_of_its_devices():
    """Rank r computes on its r-th device."""
    wanted = cluster(b=2, a=4)
    hosts = sort_by_rank(read_hosts("b,me@a"), wanted)
    assert find_uncounted(hosts, wanted) == []
    places = assign_ranks(hosts, wanted, {})
    assert ranks(places) == {"me@a": (0, 4), "b": (4, 2)}
    devices = wanted.in_rank_order()
    for place in places:
        mine = devices[place.first : place.first + place.processes]
        assert {device.host for device in mine} == {place.host.name_without_user}
    assert [(host.name, host.processes) for host in get_cluster_hosts(wanted)] == [
        ("a", 4),
        ("b", 2),
    ]


def test_a_cluster_without_hosts_is_divided_as_is_said():
    wanted = cluster(localhost=3)
    hosts = sort_by_rank(read_hosts("a:1,b:2"), wanted)
    assert ranks(assign_ranks(hosts, wanted, {})) == {"a": (0, 1), "b": (1, 2)}
    with raises(InputError, code="cluster-without-hosts"):
        get_cluster_hosts(wanted)


@pytest.mark.parametrize(
    ("hosts", "devices", "said"),
    [
        ("a,c", {"a": 1, "b": 1}, "the hosts are not those of the cluster"),
        ("a", {"a": 1, "b": 1}, "the hosts are not those of the cluster"),
        ("a:2,b", {"a": 1, "b": 1}, "host 'a' has 1 devices in the cluster, and --hosts says 2"),
        ("a:1,b:1", {"localhost": 3}, "the cluster has 3 devices, the hosts run 2 processes"),
    ],
)
def test_hosts_that_are_not_those_of_the_cluster_are_refused(hosts, devices, said):
    wanted = cluster(**devices)
    with pytest.raises(InputError) as caught:
        assign_ranks(sort_by_rank(read_hosts(hosts), wanted), wanted, {})
    assert said in caught.value.what


# -- interpreters and variables --------------------------------------------------------------------


def test_groups_of_hosts_have_interpreters_of_their_own():
    hosts = read_hosts("a,me@b,c")
    default, some = parse_pythons(["/usr/bin/python3", "a,b=/opt/rocm/bin/python"], hosts)
    assert default == "/usr/bin/python3"
    assert some == {"a": "/opt/rocm/bin/python", "me@b": "/opt/rocm/bin/python"}
    assert parse_pythons([], hosts) == (sys.executable, {})


@pytest.mark.parametrize("word", ["d=/python", "a=", "=/python", ""])
def test_what_names_no_interpreter_is_refused(word):
    with pytest.raises(InputError):
        parse_pythons([word], read_hosts("a,b"))


def test_variables_are_given_or_as_they_are_here(monkeypatch):
    monkeypatch.setenv("HERE", "a=b")
    assert parse_variables(["HERE", "THERE=x=y", "EMPTY="]) == {
        "HERE": "a=b", "THERE": "x=y", "EMPTY": ""
    }  # fmt: skip
    for word in ("NOT_SET", "1X=2", "A B=c", "=x"):
        with pytest.raises(InputError):
            parse_variables([word])


# -- programs and commands -------------------------------------------------------------------------


def test_what_a_job_replaces_is_seen():
    job = Program("job", "job.yaml", ("--set", "a=1", "--resume", "--set=b=2"))
    assert job.overrides() == ["a=1", "b=2"]
    assert job.words[:4] == ("-m", "gpumix", "train", "job.yaml")


def test_shells_read_words_as_they_were_given(tmp_path):
    """The shell of the user, then that of the host; whatever stands in names and values."""
    odd = ["it's", '"$HOME"', "a  b", "*", "back\\slash", "new\nline", "", "é", "!x", "`id`"]
    teller = tmp_path / "py thon"
    teller.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([os.getcwd(), os.environ['ODD'], sys.argv[1:]]))\n"
    )
    teller.chmod(0o755)
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    around = LaunchEnvironment(folder, str(teller), settings={"ODD": "'$ODD'"})
    (place,) = assign_ranks(read_hosts("a:1"), None, {})
    line = make_host_line(
        place,
        Program("script", "train.py", tuple(odd)),
        around,
        world=1,
        meeting=RendezvousAddress("a", 1),
        led=False,
    )
    ssh = tmp_path / "ssh"  # gives the last of its words to a shell, as sshd does
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    typed = Ssh((str(ssh),)).make_interactive_line(place.host, line)
    for command in (["sh", "-c", typed], Ssh((str(ssh),)).command(place.host, line)):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        where, value, words = json.loads(done.stdout)
        assert (Path(where), value) == (folder, "'$ODD'")
        assert words[words.index("train.py") + 1 :] == odd


def test_ssh_never_asks_and_takes_no_host_for_an_option():
    words = Ssh(("ssh", "-F", "mine"), timeout_s=7).command(Host("a"), "true")
    assert words[:3] == ["ssh", "-F", "mine"]
    assert "BatchMode=yes" in words and "ConnectTimeout=7" in words
    assert words[-3:] == ["--", "a", "true"]
