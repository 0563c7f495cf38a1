"""Attacks by files: squatting, links, races, foreign programs, special files, size, leftovers."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from unittest import mock

from gpumix.schema import files
from gpumix.schema.errors import GpumixError, Interrupted
from gpumix.train.run_log import run_files
from helpers.attacks.attacked import PWNED, SECRET, Attack, Place, Swapping, gpumix, turns
from helpers.attacks.strangers import give_away

WRITTEN_BY_RUNS = sorted(run_files.ALL)


@cache
def documents() -> dict[str, str]:
    """A plan and its profile, as texts."""
    from gpumix.planner.plan import plan as make_plan
    from helpers.runs.verbs import measured

    profile = measured()
    plan = make_plan(profile, 8)
    return {"plan.json": plan.model_dump_json(), "profile.json": profile.model_dump_json()}


def progress_line(**changes: object) -> str:
    told = {"state": "training", "why": "", "step": 3, "steps": 10, "loss": 2.0, "step_s": 0.5}
    return json.dumps(
        told | {"tokens_per_s": 1e3, "remaining_s": 3.5, "time": time.time()} | changes
    )


def step_line(step: int = 1, /, **changes: object) -> str:
    told = {"event": "step", "time": 1.7e9, "step": step, "loss": 2.0, "learning_rate": 1e-3}
    told |= {"gradient_norm": 0.7, "step_s": 0.5, "tokens_per_s": 1e3, "tokens": 1, "samples": 8}
    return json.dumps(told | changes) + "\n"


def fill(place: Place) -> None:
    """A run of the stranger."""
    for name, text in documents().items():
        place.leave(name, text)
    place.leave("metrics.jsonl", step_line(1) + step_line(2))
    place.leave("progress.json", progress_line())
    give_away(place.run)


def report(place: Place) -> str:
    return gpumix(place, "report", place.run)


def top(place: Place) -> str:
    return gpumix(place, "top", place.run, "--once")


def resume(place: Place) -> str:
    """What a run does with its folder when it goes on, as the first rank does it."""
    from gpumix.schema.plan.plan import Plan
    from gpumix.train.checks.output_folder import check_folder
    from gpumix.train.run_figures.writer import RunLog, append_event
    from gpumix.train.run_log.metrics import RunEvent, StepRecord
    from gpumix.train.run_log.progress import mark_failed, mark_restarting
    from gpumix.train.run_log.run_id import assign_run_id

    said = []
    plan = Plan.model_validate_json(documents()["plan.json"])

    def write() -> None:
        with RunLog(place.run, plan, 10, done=1) as log:
            log.step(StepRecord(2, 1.0, 1e-3, 0.5, 0.5, 1e3, 1))
            raise Interrupted("the stranger's folder")

    for use in (
        lambda: check_folder(place.run),
        lambda: os.close(files.open_lock_file(place.run / run_files.LOCK)),
        lambda: assign_run_id(place.run, fresh=True),
        lambda: plan.save(place.run / run_files.PLAN),
        write,
        lambda: mark_failed(place.run, "why"),
        lambda: mark_restarting(place.run, "why"),
        lambda: append_event(place.run, 2, RunEvent("note", {}, "")),
    ):
        try:
            use()
        except (GpumixError, OSError) as error:
            said.append(str(error))
    return "\n".join(said)


# -- squatting -------------------------------------------------------------------------------------

FOREIGN = ("link", "link inside", "marks", "pipe", "file", "device", "open", "nested")


def squat(how: str, place: Place) -> str:
    """The folders of copies in memory, before they are made: the user's are made and removed."""
    from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder

    memory = place.root / "memory"
    memory.mkdir(mode=0o1777)
    output, treasure = place.root / "output", place.home / "folder"
    output.mkdir()
    homes = [MemoryFolder(memory, output, "localhost", run) for run in ("earlier", "now")]
    names = [f"gpumix-{os.getuid()}", "gpumix-", "gpumix-0123456789abcdef", homes[0].folder.name]
    for name in names:
        _squat_at(memory / name, how, output, treasure)
    said = []
    for use in (
        homes[1].held,
        lambda: homes[1].make(1),
        homes[1].forget_other_runs,
        lambda: homes[1].forget_before(5),
        lambda: homes[0].make(1),
        homes[0].held,
        homes[1].remove,
        homes[0].remove,
    ):
        try:
            use()
        except GpumixError as error:
            said.append(str(error))
    assert not homes[1].folder.exists()
    return "\n".join(said)


def _squat_at(path: Path, how: str, output: Path, treasure: Path) -> None:
    whose = json.dumps({"output": str(output), "host": "localhost"})
    if how == "link":
        path.symlink_to(treasure)
    elif how == "file":
        path.write_text(whose)
    elif how == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir(mode=0o700)
        for name in ("localhost", "run-1", "generation-00000001", "generation-00000000"):
            (path / name).symlink_to(treasure)
        if how == "nested":
            (path / "a" / "localhost").mkdir(parents=True)
            (path / "a" / "localhost" / "run-1").symlink_to(treasure)
        for name in ("whose.json", "output"):
            if how == "pipe":
                os.mkfifo(path / name)
            else:
                (path / name).write_text(whose if name == "whose.json" else "/nowhere")
        if how == "open":
            path.chmod(0o777)
            return  # the user's own, which all may enter
    give_away(path)


def squat_scratch(how: str, place: Place) -> str:
    """The folders of processes in the temporary folder."""
    temporary = place.root / "tmp"
    temporary.mkdir(mode=0o1777)
    for name in ("gpumix-scratch-aaaaaaaa", "gpumix-scratch-"):
        _squat_at(temporary / name, how, place.root, place.home / "folder")
    with (
        mock.patch.object(tempfile, "tempdir", str(temporary)),
        files.make_scratch_folder() as folder,
    ):
        assert files.is_private(folder)
    return ""


# -- links -----------------------------------------------------------------------------------------


def linked_part(name: str, place: Place) -> str:
    """By the names that parts of files had, and those that are easily told."""
    fill(place)
    place.link(name.format(pid=os.getpid()), place.secret)
    return report(place) + resume(place) + top(place)


PARTS = (
    ".report.html.{pid}.part", ".plan.json.{pid}.part", ".metrics.jsonl.part", ".id.part",
    ".progress.json.part", ".profile.json.{pid}.part", ".run.json.{pid}.part", ".lessons.part",
    ".gpumix-.part", ".gpumix-0000000000000000.part",
)  # fmt: skip


def linked_file(name: str, act: Callable[[Place], str], place: Place) -> str:
    fill(place)
    place.link(name, place.secret)
    return act(place)


def linked_folder(name: str, place: Place) -> str:
    """A folder that a run clears or keeps few things in."""
    from gpumix.train.checkpoint import checkpoint_folder

    fill(place)
    for inside in ("step-00000001", "step-00000002.part", "step-00000003.gone.part"):
        (place.home / "folder" / inside).mkdir()
    place.before = place.state()
    place.link(name, place.home / "folder")
    said = report(place)
    for use in (
        lambda: checkpoint_folder.begin_part(place.run / name, 7),
        lambda: checkpoint_folder.prune(place.run / name, 1),
        lambda: checkpoint_folder.find_latest(place.run / name),
    ):
        try:
            use()
        except (GpumixError, OSError) as error:
            said += str(error)
    return said


def linked_checkpoint(name: str, place: Place) -> str:
    """Among checkpoints, a link to the user's home by the name of what a crash left."""
    from gpumix.train.checkpoint import checkpoint_folder

    fill(place)
    place.link(f"checkpoints/{name}", place.home / "folder")
    checkpoint_folder.begin_part(place.run / "checkpoints", 7)
    checkpoint_folder.prune(place.run / "checkpoints", 1)
    return report(place)


# -- reading with the rights of the user -----------------------------------------------------------


def leaking(name: str, act: Callable[[Place], str], place: Place) -> str:
    fill(place)
    place.secret.write_text(f"{SECRET}\n" + json.dumps({"why": SECRET, "state": SECRET}))
    place.before = place.state()
    place.link(name, place.secret)
    return act(place)


def leaking_values(place: Place) -> str:
    """A file of the user that is a whole progress, which the page would show."""
    fill(place)
    place.secret.write_text(progress_line(state="failed", why=SECRET))
    place.before = place.state()
    place.link("progress.json", place.secret)
    return report(place) + top(place)


def exported(name: str, place: Place) -> str:
    """A folder for an export, with a link by the name of what it writes."""
    from gpumix.train.checkpoint import export

    fill(place)
    place.link(name, place.secret)
    try:
        export._check_replaceable(place.run)
        export._write_json(place.run / name, {"a": 1})
    except GpumixError as error:
        return str(error)
    return ""


# -- races -----------------------------------------------------------------------------------------


def race(use: str, place: Place) -> str:
    """A thread swaps the name between what is the stranger's and a link to the user's file."""
    name = place.run / "file"

    def as_link() -> None:
        name.unlink(missing_ok=True)
        name.symlink_to(place.secret)

    def as_file() -> None:
        name.unlink(missing_ok=True)
        name.write_text("the stranger's")

    def as_pipe() -> None:
        name.unlink(missing_ok=True)
        os.mkfifo(name)

    def append() -> None:
        with files.open_log(name) as log:
            log.write("written by the user\n")

    uses: dict[str, Callable[[], object]] = {
        "read": lambda: files.read_text(name),
        "append": append,
        "lock": lambda: os.close(files.open_lock_file(name)),
        "replace": lambda: files.write_text_atomically(name, "written by the user"),
        "in place": lambda: files.write_in_place(name, "written by the user"),
        "remove": lambda: files.remove(name),
        "anew": lambda: os.close(files.create_private_file(name)),
        "move": lambda: files.move(name, "moved"),
    }
    give_away(place.run)
    with Swapping(as_link, as_file, as_pipe):
        for _ in turns(1.5):
            try:
                found = uses[use]()
                assert SECRET not in str(found), "the user's file was read"
            except OSError:
                continue
    return ""


def race_folder(use: str, place: Place) -> str:
    """The same with a folder."""
    name, aside = place.run / "folder", place.run / "aside"

    def as_link() -> None:
        name.rename(aside / str(time.monotonic_ns()))
        name.symlink_to(place.home / "folder")

    def as_folder() -> None:
        name.unlink()
        name.mkdir()
        (name / "notes").touch()

    for folder in (aside, name, place.run):
        folder.mkdir(exist_ok=True)
        give_away(folder)
    uses: dict[str, Callable[[], object]] = {
        "remove": lambda: files.remove(name),
        "write inside": lambda: files.write_text_atomically(name / "notes", "x"),
        "remove inside": lambda: files.remove(name / "notes"),
        "make private": lambda: files.make_private(name),
    }
    with Swapping(as_link, as_folder):
        for _ in turns(1.5):
            try:
                uses[use]()
            except OSError:
                continue
    return ""


# -- programs of others ----------------------------------------------------------------------------

LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void begin(void) { fclose(fopen("%s", "w")); }
"""


@cache
def foreign_library() -> bytes:
    """One that makes the file PWNED in the folder where it is loaded."""
    import subprocess

    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name, "a.c"), Path(name, "a.so")
        source.write_text(LIBRARY % PWNED)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return library.read_bytes()


def loaded(how: str, place: Place) -> str:
    """The allocator, from a cache that others may write."""
    from gpumix.hardware.memory_limit import build_allocator, limit

    cache_folder = place.root / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache_folder)
    name = f"capped_alloc-{build_allocator._hash_build()}.so"
    folder = cache_folder / "gpumix" / "libraries"
    folder.mkdir(parents=True, mode=0o700)
    for there in (folder, folder.parent):
        (there / name).write_bytes(foreign_library())
        (there / name).chmod(0o755)
        if how in ("theirs", "folder and file"):
            give_away(there / name)
    if how in ("folder", "folder and file"):
        give_away(folder)
    elif how == "mode":
        folder.chmod(0o777)
    elif how == "file mode":
        (folder / name).chmod(0o777)
    elif how == "link":
        (folder / name).unlink()
        (folder / name).symlink_to(give_away(folder.parent / name))
    limit._get_process_limit.cache_clear()
    memory = limit.limit_memory(None)
    return memory.why_inexact


# -- what has no end -------------------------------------------------------------------------------


def special(name: str, make: str, act: Callable[[Place], str], place: Place) -> str:
    fill(place)
    path = place.run / name
    path.unlink(missing_ok=True)
    if make == "pipe":
        os.mkfifo(path)
    elif make == "socket":
        os.chdir(place.run)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
        os.chdir(place.root)
    else:
        path.symlink_to(
            {"device": "/dev/zero", "kernel": "/proc/kmsg", "terminal": "/dev/tty"}[make]
        )
    return act(place)


def bomb(name: str, act: Callable[[Place], str], place: Place) -> str:
    """A file of 30 GB that takes no room."""
    fill(place)
    with place.leave(name).open("r+b") as file:
        file.truncate(30 * 10**9)
    return act(place)


def nested(name: str, act: Callable[[Place], str], place: Place) -> str:
    fill(place)
    place.leave(name, '{"kind": "plan", "a": ' + "[" * 200_000)
    return act(place)


def broken_text(name: str, act: Callable[[Place], str], place: Place) -> str:
    """A byte that is no UTF-8."""
    fill(place)
    content = (place.run / name).read_bytes() if (place.run / name).exists() else b"{}"
    place.leave(name, content[:20] + b"\xff\xfe" + content[20:])
    return act(place)


def named(name: bytes, act: str, place: Place) -> str:
    """A folder whose name is no UTF-8, or an order to a terminal."""
    fill(place)
    folder = os.fsdecode(os.fsencode(place.root) + b"/" + name)
    place.run.rename(folder)
    place.run = Path(folder)
    return gpumix(place, act, folder, *(["--once"] if act == "top" else []))


def named_job(words: tuple[str, ...], place: Place) -> str:
    """A job in a folder whose name is no UTF-8."""
    from helpers.attacks.mutant_files import write_all

    write_all(place.root / "whole")
    folder = Path(os.fsdecode(os.fsencode(place.root) + b"/job\xff"))
    (place.root / "whole").rename(folder)
    os.chdir(folder)
    place.root, said = folder, ""
    try:
        said = gpumix(place, *words)
    finally:
        place.root = folder.parent
    return said


# -- all of them -----------------------------------------------------------------------------------


def inspect(place: Place) -> str:
    return gpumix(place, "inspect", place.run)


def simulate(place: Place) -> str:
    return gpumix(
        place, "simulate", place.run / "plan.json", "--profile", place.run / "profile.json"
    )


READERS = {"report": report, "top": top, "resume": resume}


def every() -> Iterator[Attack]:
    for how in FOREIGN:
        yield Attack("squatting", f"memory, {how}", partial(squat, how))
        if how != "open":
            yield Attack("squatting", f"temporary folder, {how}", partial(squat_scratch, how))
    for name in PARTS:
        yield Attack("links", name, partial(linked_part, name))
    for name in WRITTEN_BY_RUNS:
        yield Attack("links", f"{name}, resumed", partial(linked_file, name, resume))
        yield Attack("links", f"{name}, reported", partial(linked_file, name, report))
    for name in ("checkpoints", "flight-recorder", ".trackers"):
        yield Attack("links", f"folder {name}", partial(linked_folder, name))
    for name in ("step-00000001", "step-00000001.part", "step-1.part", "step-00000007.part"):
        yield Attack("links", f"checkpoint {name}", partial(linked_checkpoint, name))
    for name in ("config.json", "gpumix.json", "model.safetensors"):
        yield Attack("links", f"export {name}", partial(exported, name))
    for name in ("plan.json", "run.json", "progress.json", "metrics.jsonl", "trace.json"):
        for act in ("report", "top"):
            yield Attack("leaks", f"{name}, {act}", partial(leaking, name, READERS[act]))
    yield Attack("leaks", "a whole progress", leaking_values)
    for use in ("read", "append", "lock", "replace", "in place", "remove", "anew", "move"):
        yield Attack("races", use, partial(race, use))
    for use in ("remove", "write inside", "remove inside", "make private"):
        yield Attack("races", f"folder, {use}", partial(race_folder, use))
    for how in ("theirs", "folder", "folder and file", "mode", "file mode", "link"):
        yield Attack("foreign programs", how, partial(loaded, how))
    for name in ("plan.json", "run.json", "progress.json", "metrics.jsonl", "trace.json"):
        for make in ("pipe", "socket", "device", "kernel", "terminal"):
            yield Attack("special files", f"{name}, {make}", partial(special, name, make, report))
    for name in (
        "plan.json",
        "profile.json",
        "run.json",
        "progress.json",
        "metrics.jsonl",
        "trace.json",
    ):
        yield Attack("size", f"{name}, report", partial(bomb, name, report))
    for name in ("plan.json", "metrics.jsonl", "progress.json"):
        yield Attack("size", f"{name}, top", partial(bomb, name, top))
    for name in (".id", "progress.json", "metrics.jsonl", ".lock", "plan.json"):
        yield Attack("size", f"{name}, resume", partial(bomb, name, resume))
    for name in ("plan.json", "progress.json", "run.json", "metrics.jsonl"):
        yield Attack("size", f"{name}, nested", partial(nested, name, report))
    for name in ("plan.json", "profile.json", "run.json", "progress.json", "metrics.jsonl"):
        for act, use in READERS.items():
            yield Attack("no UTF-8", f"{name}, {act}", partial(broken_text, name, use))
    for name in (b"\xff\xfe", b"run\xe9", b"\x1b]0;title\x07", b"a\nb", "\u202egpj".encode()):
        for act in ("report", "top", "inspect"):
            yield Attack("names of folders", f"{name!r}, {act}", partial(named, name, act))
    for words in (
        ("train", "job.yaml", "--plan", "one.json"),
        ("plan", "small.yaml", "--profile", "cards.json"),
        ("profile", "own.yaml", "--allow", "mine"),
        ("devices", "--cluster", "cluster.yaml"),
        ("simulate", "one.json"),
    ):
        yield Attack("names of folders", f"job, {words[0]}", partial(named_job, words))
