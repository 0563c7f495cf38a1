"""The door to files: nothing is waited for, nothing grows without end, no link leads astray."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gpumix.hardware.host.environment import keep_compiled_code
from gpumix.schema import files
from gpumix.schema.file_errors import describe_write_fix
from helpers.attacks.strangers import as_root, give_away, linked


@pytest.fixture
def secret(tmp_path) -> Path:
    file = tmp_path / "secret"
    file.write_text("mine")
    file.chmod(0o600)
    return file


# -- reading ---------------------------------------------------------------------------------------


@as_root
def test_a_link_of_another_user_reads_only_what_is_theirs_or_everybody_s(tmp_path, secret):
    with pytest.raises(files.NotAFileError, match="link of another user"):
        files.read_text(linked(tmp_path / "astray", secret))
    secret.chmod(0o644)
    assert files.read_text(tmp_path / "astray") == "mine"
    secret.chmod(0o600)
    assert files.read_text(linked(tmp_path / "own", give_away(secret))) == "mine"


def test_a_link_of_this_user_is_followed_and_links_in_a_circle_are_not(tmp_path, secret):
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(secret)
    assert files.read_text(tmp_path / "first") == "mine"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        files.read_text(tmp_path / "circle")


@pytest.mark.parametrize("name", ["/proc/kmsg", "/dev/zero", "/dev/tty"])
def test_what_of_the_kernel_has_no_end_is_refused(name):
    """`/proc/kmsg` looks like a file of no size, and waits for the kernel to say something."""
    if not os.access(name, os.R_OK):
        pytest.skip("it is not to be read here")
    try:
        files.read_bytes(Path(name), 2**24)
    except (files.NotAFileError, PermissionError):
        return
    assert name == "/proc/kmsg"  # it had something to say, and was not waited for afterwards


def test_files_of_the_kernel_are_read():
    assert "MemTotal" in files.read_log(Path("/proc/meminfo"))


def test_no_more_is_read_than_a_file_of_its_kind_holds(tmp_path):
    large = tmp_path / "sparse"
    with large.open("wb") as file:
        file.truncate(2**43)
    began = time.process_time()
    with pytest.raises(files.TooLargeError, match="are the most"):
        files.read_bytes(large)
    read, write = os.pipe()
    os.write(write, b"x" * 2000)
    os.close(write)
    with pytest.raises(files.TooLargeError, match="more bytes"):
        files.read_bytes(Path(f"/dev/fd/{read}"), 1000)
    os.close(read)
    assert time.process_time() - began < 5  # reading 8 TiB takes an hour
    (tmp_path / "exact").write_bytes(b"x" * 1000)
    assert len(files.read_bytes(tmp_path / "exact", 1000)) == 1000


def test_a_line_without_an_end_is_cut_and_the_next_one_found(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_BYTES", 8)
    monkeypatch.setattr(files, "LOST_BYTES", 64)
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 30 + b"\nlast\n")
    with files.open_for_reading(log) as stream:
        assert list(files.iterate_lines(stream)) == [b"first\n", b"x" * 8, b"last\n"]
    log.write_bytes(b"first\n" + b"x" * 300 + b"\nlast\n")
    with files.open_for_reading(log) as stream:
        assert list(files.iterate_lines(stream)) == [b"first\n", b"x" * 8]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_lines_from_the_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "_BLOCK_BYTES", block)
    log = tmp_path / "log"
    for content in (b"", b"\n", b"one", b"one\n", b"one\n\ntwo three\nfour", b"a\nbb\nccc\n"):
        log.write_bytes(content)
        with files.open_for_reading(log) as stream:
            found = list(files.iterate_lines_from_end(stream))
        assert [line for _, line in reversed(found)] == content.splitlines(keepends=True)
        assert all(content[at : at + len(line)] == line for at, line in found)


# -- writing ---------------------------------------------------------------------------------------


def test_writing_replaces_a_link_and_leaves_what_it_leads_to(tmp_path, secret):
    (tmp_path / "report").symlink_to(secret)
    files.write_text_atomically(tmp_path / "report", "new")
    assert secret.read_text() == "mine"
    assert (tmp_path / "report").read_text() == "new"
    assert not (tmp_path / "report").is_symlink()


@pytest.mark.parametrize("open_it", [files.open_log, files.open_lock_file])
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path, secret, open_it):
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("link", "device", "pipe"):
        with pytest.raises(files.NotAFileError):
            os.close(taken) if isinstance(taken := open_it(tmp_path / name), int) else None
    assert secret.read_text() == "mine"


@as_root
@pytest.mark.parametrize("open_it", [files.open_log, files.open_lock_file])
def test_nothing_is_written_through_a_folder_that_another_user_linked(tmp_path, open_it):
    (tmp_path / "home").mkdir()
    folder = linked(tmp_path / ".trackers", tmp_path / "home")
    with pytest.raises(files.NotAFileError, match="link of another user"):
        open_it(folder / "wandb.lock")
    assert not list((tmp_path / "home").iterdir())


@as_root
def test_a_second_name_of_a_file_is_not_written_in_a_folder_of_another_user(tmp_path, secret):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "metrics.jsonl").hardlink_to(secret)
    files.open_log(folder / "metrics.jsonl").close()  # of a user's own backup, say
    give_away(folder)
    with pytest.raises(files.NotAFileError, match="another name"):
        files.open_log(folder / "metrics.jsonl")
    assert secret.read_text() == "mine"


def test_a_lock_keeps_what_the_file_holds(tmp_path, secret):
    os.close(files.open_lock_file(secret))
    assert secret.read_text() == "mine"


def test_names_of_parts_are_random_and_parts_of_the_dead_are_removed(tmp_path):
    names = set()
    for _ in range(2):
        with files.replace_atomically(tmp_path / "file"):
            names |= {path.name for path in tmp_path.iterdir()} - {"file"}
    assert len(names) == 2
    left, new = (tmp_path / f".gpumix-{n}.part" for n in range(2))
    for part in (left, new):
        part.touch()
    os.utime(left, (1, 1))
    files.remove_partial_files(tmp_path)
    assert not left.exists() and new.exists()


def test_an_error_while_writing_leaves_what_was_there(tmp_path, secret):
    with pytest.raises(ZeroDivisionError), files.replace_atomically(secret) as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert secret.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [secret]


@as_root
def test_a_folder_that_another_user_linked_is_not_written_into(tmp_path):
    (tmp_path / "home").mkdir()
    folder = linked(tmp_path / "checkpoints", tmp_path / "home")
    for write in (
        lambda: files.write_text_atomically(folder / "file", "x"),
        lambda: files.remove(folder / "file"),
        lambda: files.move(folder / "file", "other"),
    ):
        with pytest.raises(files.NotAFileError):
            write()


# -- removing --------------------------------------------------------------------------------------


def test_of_a_link_only_the_link_goes(tmp_path):
    treasure = tmp_path / "home" / "thesis"
    treasure.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inside").symlink_to(tmp_path / "home")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    files.remove(tmp_path / "link")
    files.remove(tmp_path / "run")
    files.remove(tmp_path / "run")  # which is gone
    assert treasure.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_who_swaps_a_folder_for_a_link_while_it_is_removed_gets_nothing_removed(tmp_path):
    """A thread that swaps as fast as it can, against a hundred removals."""
    treasure, place, done = tmp_path / "home", tmp_path / "place", threading.Event()
    treasure.mkdir()
    for number in range(5):
        (treasure / str(number)).touch()

    def swap() -> None:
        while not done.is_set():
            for make in (lambda: place.symlink_to(treasure), lambda: place.mkdir()):
                try:
                    if place.is_symlink():
                        place.unlink()
                    elif place.exists():
                        place.rename(tmp_path / f"old-{time.monotonic_ns()}")
                    make()
                except OSError:
                    continue

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(300):
            files.remove_quietly(place)
    finally:
        done.set()
        swapping.join()
    assert len(list(treasure.iterdir())) == 5


# -- folders and programs --------------------------------------------------------------------------


@as_root
def test_a_private_folder_is_this_user_s_alone(tmp_path):
    files.make_private(tmp_path / "own")
    files.make_private(tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "open").mkdir(mode=0o750)
    linked(tmp_path / "link", tmp_path / "own")
    for name in (give_away(tmp_path / "theirs").name, "open", "link"):
        with pytest.raises(files.NotAFileError, match="not this user's alone"):
            files.make_private(tmp_path / name)


@as_root
@pytest.mark.parametrize("spoil", ["theirs", "link", "folder", "mode"])
def test_what_another_user_may_have_written_is_not_executed(tmp_path, spoil):
    folder = tmp_path / "libraries"
    folder.mkdir(mode=0o700)
    library = folder / "one.so"
    library.write_bytes(b"\x7fELF")
    library.chmod(0o700)
    with files.open_trusted(library) as descriptor:
        assert Path(files.make_descriptor_path(descriptor, library)).read_bytes() == b"\x7fELF"
    if spoil == "theirs":
        give_away(library)
    elif spoil == "link":
        library.rename(folder / "two.so")
        library.symlink_to("two.so")
    elif spoil == "folder":
        folder.chmod(0o777)
    else:
        library.chmod(0o777)
    with pytest.raises(OSError), files.open_trusted(library):
        pass


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    with files.make_scratch_folder() as living:
        child = os.fork()
        if not child:
            kept = files.make_scratch_folder()
            kept.__enter__()
            os._exit(0)  # as one that is killed
        os.waitpid(child, 0)
        assert len(list(tmp_path.iterdir())) == 2
        with files.make_scratch_folder():
            assert living.exists()
            assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_being_made_is_not_taken_for_one_of_an_ended_process(
    tmp_path, monkeypatch
):
    """Others look at it while its lock is there and not yet held."""
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    lock, seen = files.fcntl.flock, []

    def late(descriptor, how):
        seen.extend(files._is_left(folder) for folder in tmp_path.iterdir())
        lock(descriptor, how)

    with monkeypatch.context() as patched:
        patched.setattr(files.fcntl, "flock", late)
        with files.make_scratch_folder() as folder:
            patched.undo()
            assert not files._is_left(folder)
    assert seen == [False]


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOSPC, "make room"),
     (errno.EROFS, "read-only"), (errno.ENOENT, "by this name"), (errno.EIO, "dmesg")],
)  # fmt: skip
def test_each_cause_has_its_own_advice(code, said):
    assert said in describe_write_fix(OSError(code, os.strerror(code)))


@as_root
def test_compiled_code_lies_where_nobody_else_can_write_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert own.parent == tmp_path / "gpumix" and files.is_private(own)
    give_away(own)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    other = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert other != own and files.is_private(other)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


@as_root
def test_a_cache_of_another_user_is_replaced_by_a_folder_that_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").mkdir()
    child = os.fork()
    if not child:
        give_away(tmp_path / "cache")
        made = files.make_private_folder(tmp_path / "cache")
        os._exit(0 if files.is_private(made) else 1)  # as one that is killed
    assert os.waitpid(child, 0)[1] == 0
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    with files.make_scratch_folder() as folder:
        assert list((tmp_path / "tmp").iterdir()) == [folder]


@pytest.fixture
def short_folder():
    """A folder with room in its path for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_sockets_of_a_killed_launcher_are_removed_by_the_next_start(short_folder):
    code = """
import os, sys
from gpumix.train.processes.local_launcher import warm_up
warm_up(preload=())
print(*os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), 9)
"""
    env = dict(os.environ) | {"TMPDIR": str(short_folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -9
    left = [path.name for path in short_folder.iterdir()]
    assert done.stdout.split() == left
    assert [name.startswith("gpumix-scratch-") for name in left] == [True]
    deadline = time.monotonic() + 60  # the server has the lock too, and ends by itself
    while time.monotonic() < deadline and any(short_folder.iterdir()):
        with files.make_scratch_folder(short_folder):
            pass
        time.sleep(0.2)
    assert not list(short_folder.iterdir())


def test_the_server_of_ranks_starts_with_a_long_folder_for_temporary_files(tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    code = "from gpumix.train.processes.local_launcher import warm_up; warm_up(preload=())"
    env = dict(os.environ) | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
