"""Files that users name: what may never end is not waited for, what a shell hands over is read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from gpumix.launch.hosts import Host, read_hosts
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.read import read_cluster, read_job
from gpumix.schema.value import Document


class Note(Document):
    kind: Literal["note"] = "note"
    text: str


NOTE = Note(text="x" * 60_000)
READERS = {
    "job": read_job,
    "cluster": read_cluster,
    "plan": Plan.load,
    "profile": Profile.load,
    "hosts": lambda path: read_hosts(str(path)),
    "saved": NOTE.save,
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.fixture
def handed():
    """The name of a pipe with this text, as a shell hands it over, and its writer ended."""
    ends = []

    def name(text: str) -> Path:
        read, write = os.pipe()
        ends.append(read)
        os.write(write, text.encode())
        os.close(write)
        return Path(f"/dev/fd/{read}")

    yield name
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("make", [pipe, device, unix_socket])
def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch, make, read):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    make(Path("named"))
    with pytest.raises(InputError) as caught:
        read(Path("named"))
    error = caught.value
    assert error.where.endswith("named") and error.fix
    kind = {pipe: "a pipe", device: "a device", unix_socket: "a socket"}[make]
    assert error.why == f"it is {kind}, not a file" or "is not overwritten" in error.what


def test_what_a_shell_hands_over_is_read(handed):
    assert Note.load(handed(NOTE.model_dump_json())) == NOTE
    assert read_hosts(str(handed("a\nb:2\n"))) == (Host("a", None), Host("b", 2))
    text = "- {class: a, memory: 1GiB, emulate: 1e9}\n"
    assert [one.name for one in read_cluster(handed(text)).classes] == ["a"]


def test_standard_input_is_waited_for():
    program = (
        "from pathlib import Path\n"
        "from gpumix.schema.reading.read import read_cluster\n"
        "print(read_cluster(Path('/dev/stdin')).classes[0].name)\n"
    )
    late = "sleep 1; echo '- {class: slow, memory: 1GiB, emulate: 1e9}'"
    with subprocess.Popen(["sh", "-c", late], stdout=subprocess.PIPE) as writer:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=writer.stdout, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    assert done.stdout == "slow\n"
