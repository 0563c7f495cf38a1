"""Attacks by what commands are given: names of cards, environments, folders for `init`, plans;
and by what libraries open by name: trackers, caches of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from helpers.attacks.attacked import PWNED, Attack, Place, gpumix
from helpers.attacks.file_attacks import documents, fill, report, step_line, top
from helpers.attacks.job_attacks import CONFIG, WEIGHTS, tried
from helpers.attacks.strangers import give_away

# -- names of cards --------------------------------------------------------------------------------

CARDS = (
    "", " ", ";", ",", "x", "1x", "x rtx3090", "0x rtx3090", "-1x rtx3090", "999999999x rtx3090",
    "99999999999999999999999x rtx3090", "1e3x rtx3090", "2x \x1b[2Jrtx3090", "2x rtx\u202e3090",
    "2x rtx3090; " * 500, "1x rtx3090, " * 5000, "٣x rtx3090", "2x rtx3090\n1x t4", "2x rtx3090\0",
    "2x $(touch PWNED)", "-oProxyCommand=x", "2x rtx3090:" + "9" * 400 + "GiB",
    "2x rtx3090 1e308GiB",
    "../../etc/passwd", "/dev/zero", "/dev/stdin.yaml", "/proc/kmsg", "a" * 5000, "\ud800",
    "2x rtx3090=nan", "2xrtx3090+2xrtx3090", "２x rtx3090",
)  # fmt: skip


def of_cards(text: str, place: Place) -> str:
    return gpumix(place, "plan", "--cluster", text, "--model", "20M") + gpumix(
        place, "devices", "--cluster", text
    )


MODELS = ("", "-1", "0M", "1e308B", "9" * 400 + "B", "nan", "inf", "../../etc/passwd", "/dev/zero",
          "\x1b[2J", "x" * 5000, "a/b", "../a/..", "\0", "１M", "1e400M", "pipe")  # fmt: skip
LENGTHS = ("--sequence-length", "--global-batch-size")
NUMBERS = ("-1", "0", "1e308", "nan", "9" * 30, "\x1b[2J", "", "１")


def of_models(text: str, place: Place) -> str:
    os.mkfifo(place.root / "pipe")
    return gpumix(place, "plan", "--cluster", "2x rtx3090", "--model", text)


def of_numbers(option: str, text: str, place: Place) -> str:
    return gpumix(place, "plan", "--cluster", "2x rtx3090", "--model", "20M", option, text)


# -- environments ----------------------------------------------------------------------------------

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT",
    "GPUMIX_STARTS", "GPUMIX_STOP_ASKED_AT", "GPUMIX_GRACE_S", "GPUMIX_ALLOW", "GPUMIX_TRACEBACK",
    "GPUMIX_CLUSTER", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "HOME", "TMPDIR", "COLUMNS",
    "LINES", "TERM", "LANG", "LC_ALL", "PYTHONIOENCODING", "CXX", "HF_HOME", "HF_HUB_CACHE",
    "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "NO_COLOR", "RAY_JOB_ID",
    "SLURM_JOB_ID", "TZ",
)  # fmt: skip
VALUES = ("", "-1", "x", "9" * 40, "1e308", "nan", "\x1b[2J", "../..", "/dev/null", "٣", "a b;$(x)")
PLACED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": "29511"}  # fmt: skip


def in_environment(name: str, value: str, place: Place) -> str:
    (place.root / "job.yaml").write_text(yaml.safe_dump(JOB_OF_ENVIRONMENTS))
    (place.root / "corpus.txt").write_text("one and two and three\n" * 50)
    os.environ["XDG_CACHE_HOME"] = str(place.root / "cache")
    if name in (*PLACED, "LOCAL_WORLD_SIZE") or name.startswith(("TORCHELASTIC", "GPUMIX_ST")):
        os.environ |= PLACED
    os.environ[name] = value
    tempfile.tempdir = None  # to be read again
    said = gpumix(place, "devices") + gpumix(place, "train", "job.yaml", "--dry-run")
    return said + gpumix(place, "profile", "job.yaml")


JOB_OF_ENVIRONMENTS: dict[str, Any] = {
    "model": {"config": CONFIG}, "data": {"text": ["corpus.txt"], "num_workers": 0},
    "tokenizer": "bytes", "sequence_length": 32, "global_batch_size": 4, "max_steps": 2,
    "output_dir": "output",
    "cluster": [{"class": "fast", "emulate": "8 GFLOP/s", "memory": "64 MiB", "count": 1}],
}  # fmt: skip


def compiled_before(how: str, place: Place) -> str:
    """By the name under which torch keeps compiled code. A process of its own: it is made as torch
    is imported."""
    temporary = place.root / "tmp"
    temporary.mkdir(mode=0o1777)
    name = temporary / "torchinductor_me"
    if how == "file":
        name.touch()
    elif how == "folder":
        name.mkdir()
    else:
        name.symlink_to(place.home / {"link": "folder", "dangling": "nowhere"}[how])
    give_away(name)
    (place.root / "job.yaml").write_text(yaml.safe_dump(JOB_OF_ENVIRONMENTS))
    (place.root / "corpus.txt").write_text("one and two and three\n" * 50)
    own = {"XDG_CACHE_HOME": str(place.root / "cache"), "TMPDIR": str(temporary), "USER": "me"}
    kept = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "gpumix", "train", "job.yaml", "--dry-run"],
        env=kept | own | {"LOGNAME": "me", "CUDA_VISIBLE_DEVICES": ""},
        cwd=place.root,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# -- init ------------------------------------------------------------------------------------------

# As folders are named by a stranger, and completed by a shell.
NAMES = (
    f'm"""\nopen("{PWNED}", "w")\n"""',
    f"m'; open('{PWNED}', 'w'); '",
    "m\\",
    "m{weights}{x}",
    "m\x1b]0;t\x07",
    "m\u202egpj",
    "m: [x, y]\n- a",
    "--help",
    f"$(touch {PWNED})",
    "m%s%n",
    "*",
    "~",
)


def begun(name: str, place: Place) -> str:
    """A first script and a first job of a folder of a stranger; the script is run."""
    model = place.run / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(WEIGHTS["no tensors"])
    (model / "tokenizer.json").write_text("{}")
    (model / "a.txt").write_text("one\n")
    (place.root / "corpus.txt").write_text("one and two and three\n" * 50)
    said = gpumix(place, "init", "s.py", "--lora", "--model", model, "--data", model)
    said += gpumix(place, "init", "j.yaml", "--full", "--model", model, "--data", model)
    if (place.root / "s.py").exists():
        compiled = compile((place.root / "s.py").read_text(), "s.py", "exec")
        shown = {type(one).__name__ for one in compiled.co_consts}
        assert shown
        stubs = ("torch", "datasets", "peft", "transformers", "trl", "gpumix.integrations.trl")
        with mock.patch.dict(sys.modules, {stub: mock.MagicMock() for stub in stubs}):
            exec(compiled, {"__name__": "__main__"})
    if (place.root / "j.yaml").exists():
        said += gpumix(place, "plan", "j.yaml", "--cluster", "2x rtx3090")
        job = yaml.safe_load((place.root / "j.yaml").read_text())
        assert job["model"]["weights"] == str(model), job
    return said


def begun_at(how: str, place: Place) -> str:
    """Where the first job is written."""
    (place.root / "corpus.txt").write_text("one and two and three\n" * 50)
    file = place.run / "job.yaml"
    if how == "pipe":
        os.mkfifo(file)
    elif how == "dangling":
        file.symlink_to(place.home / "new")
    elif how == "link":
        file.symlink_to(place.secret)
    elif how == "folder":
        file.mkdir()
    elif how == "linked folder":
        (place.run / "there").symlink_to(place.home)
        file = give_away(place.run / "there") / "job.yaml"
    elif how == "device":
        file = Path("/dev/null")
    return gpumix(place, "init", file, "--data", "corpus.txt", "--model", "20M")


# -- caches of models ------------------------------------------------------------------------------

REFERENCES = (b"../../../home/folder", b"/etc", b"\xff\xfe", b"", b"..", b"x" * 5000, b"a\0b",
              b"\x1b[2J", b"\n" * 2**21)  # fmt: skip


def cached(reference: bytes | str, place: Place) -> str:
    """A folder as the hub's cache has it."""
    place.leave("hub/snapshots/abc/model.safetensors", WEIGHTS["no tensors"])
    place.leave("hub/snapshots/abc/config.json", json.dumps(CONFIG))
    path = place.run / "hub" / "refs" / "main"
    path.parent.mkdir()
    if isinstance(reference, bytes):
        path.write_bytes(reference)
    elif reference == "pipe":
        os.mkfifo(path)
    elif reference == "snapshots are a file":
        subprocess.run(["rm", "-r", path.parent.parent / "snapshots"], check=True)
        (path.parent.parent / "snapshots").touch()
    else:
        path.symlink_to({"device": "/dev/zero", "secret": place.secret}[reference])
        give_away(path)
    return tried(place, model={"config": CONFIG, "weights": str(place.run / "hub")})


# -- plans -----------------------------------------------------------------------------------------


def in_plan(path: tuple[Any, ...], value: Any, place: Place) -> str:
    """A plan with another value somewhere."""
    fill(place)
    plan = json.loads(documents()["plan.json"])
    at = plan
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    place.leave("plan.json", json.dumps(plan))
    simulated = gpumix(place, "simulate", place.run / "plan.json", "--profile",
                       place.run / "profile.json")  # fmt: skip
    return simulated + report(place) + top(place)


WORKER = ("stages", 0, "workers", 0)
PLANS: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("waves",): (10**9, -1, 0, 1e308, 2, True),
    ("zero_stage",): (4, -1, 10**30),
    ("global_batch",): (10**18, 0, -1, 1e308),
    (*WORKER, "micro_batches"): ([], [0], [-1], [1] * 200_000, [10**15], [1e308], "x"),
    (*WORKER, "device"): ("\x1b[2J", "", "x" * 5000, "a\0b", "../x", "\u202ex"),
    (*WORKER, "state_share"): (2, -1, "nan", 1e308),
    ("stages",): ([], [[]], [None] * 1000, {}),
    ("stages", 0, "units"): ([], ["x"] * 100_000, [""], ["\x1b[2J"]),
    ("strategy",): ("\x1b]0;x\x07", "x" * 10**6),
    ("prediction",): ({}, {"step_s": 1e308}, [], {"step_s": -1}),
}

# -- trackers --------------------------------------------------------------------------------------


def tracked(tracker: str, spoil: Callable[[Place], object], place: Place) -> str:
    """A run continues in the stranger's folder, and logs to a tracker."""
    from gpumix.integrations.trackers.__main__ import TrackerThread
    from gpumix.schema.reading.read import read_job

    fill(place)
    spoil(place)
    tried(place)
    settings = {tracker: {"textfile": str(place.run / "a.prom")} if tracker == "prometheus" else {}}
    (place.root / "tracked.yaml").write_text(
        yaml.safe_dump(JOB_OF_ENVIRONMENTS | {"report_to": settings, "output_dir": str(place.run)})
    )
    thread = TrackerThread(tracker, read_job(place.root / "tracked.yaml"), 0.0)
    with mock.patch.object(sys, "stderr") as stream:
        thread.start()
        thread.prepared.wait(60)
        thread.end("finished")
        thread.join(60)
    assert not thread.is_alive(), "it waits"
    return json.dumps(thread.error, ensure_ascii=False) + "".join(
        str(call.args[0]) for call in stream.write.call_args_list
    )


def linked(name: str, target: str = "folder") -> Callable[[Place], object]:
    return lambda place: place.link(name, place.home / target)


def piped(name: str) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        (place.run / name).parent.mkdir(exist_ok=True)
        (place.run / name).unlink(missing_ok=True)
        os.mkfifo(place.run / name)
        give_away(place.run / name)

    return make


def without_end(place: Place) -> None:
    with place.leave("metrics.jsonl", step_line(1)).open("r+b") as file:
        file.truncate(30 * 10**9)


def parts_of_a_textfile(place: Place) -> None:
    """By the name that prometheus_client gives to what it has not finished."""
    for process in (os.getpid(), os.getppid()):
        for thread in {threading.get_ident(), *(t.ident for t in threading.enumerate())}:
            place.link(f"a.prom.{process}.{thread}", place.secret)


POSITIONS = (b'{"steps": 5}', b'{"run": 5, "since": "x"}', b"[]", b"[" * 200_000, b"\xff",
             b'{"time_s": "x", "steps": {"step": "y"}}', b'{"since": 1e400}')  # fmt: skip


def at_position(content: bytes) -> Callable[[Place], object]:
    return lambda place: place.leave(".trackers/prometheus.json", content)


def lines(*changes: dict[str, Any]) -> Callable[[Place], object]:
    return lambda place: place.leave(
        "metrics.jsonl", "".join(step_line(n, **change) for n, change in enumerate(changes, 1))
    )


SPOILT: dict[str, tuple[str, Callable[[Place], object]]] = {
    "tensorboard is a link": ("tensorboard", linked("tensorboard")),
    "a link in tensorboard": ("tensorboard", linked("tensorboard/events.out", "thesis")),
    "tensorboard is a pipe": ("tensorboard", piped("tensorboard")),
    "wandb is a link": ("wandb", linked("wandb")),
    "a link in wandb": ("wandb", linked("wandb/debug.log", "thesis")),
    "a database is a link": ("mlflow", linked("mlflow.db", "thesis")),
    "a journal is a link": ("mlflow", linked("mlflow.db-journal", "thesis")),
    "a textfile is a link": ("prometheus", linked("a.prom", "thesis")),
    "a part of a textfile": ("prometheus", parts_of_a_textfile),
    "a textfile is a pipe": ("prometheus", piped("a.prom")),
    "positions are a link": ("prometheus", linked(".trackers")),
    "a lock is a link": ("prometheus", linked(".trackers/prometheus.lock", "thesis")),
    "a lock is a pipe": ("prometheus", piped(".trackers/prometheus.lock")),
    "a position is a link": ("prometheus", linked(".trackers/prometheus.json", "thesis")),
    "a position is a pipe": ("prometheus", piped(".trackers/prometheus.json")),
    "a log is a pipe": ("prometheus", piped("metrics.jsonl")),
    "a log is a link": ("prometheus", linked("metrics.jsonl", "thesis")),
    "a log has no end": ("prometheus", without_end),
    "a step is a text": ("prometheus", lines({}, {"step": "x"}, {"time": None})),
    "a step is huge": ("prometheus", lines({}, {"step": 10**400, "loss": 10**400})),
    "a loss is a list": ("prometheus", lines({"loss": [1]}, {"loss": {"a": 1}})),
    "a label has a line": ("prometheus", lines({"event": "x\ny 1\n"})),
    **{f"position {n}": ("prometheus", at_position(c)) for n, c in enumerate(POSITIONS)},
}


# -- all of them -----------------------------------------------------------------------------------


def every() -> Iterator[Attack]:
    for number, text in enumerate(CARDS):
        yield Attack("names of cards", f"{number}, {text[:20]!r}", partial(of_cards, text))
    for number, text in enumerate(MODELS):
        name = f"model {number}, {text[:20]!r}"
        yield Attack("names of cards", name, partial(of_models, text))
    for option in LENGTHS:
        for text in NUMBERS:
            name = f"{option} {text[:20]!r}"
            yield Attack("names of cards", name, partial(of_numbers, option, text))
    for number, name in enumerate(VARIABLES):
        for other, value in enumerate(VALUES):
            if (number + other) % 3 == 0:
                act = partial(in_environment, name, value)
                yield Attack("environments", f"{name}={value[:20]!r}", act)
    for how in ("file", "folder", "link", "dangling"):
        yield Attack("compiled code", how, partial(compiled_before, how))
    for name in NAMES:
        yield Attack("init", f"{name!r}", partial(begun, name))
    for how in ("pipe", "dangling", "link", "folder", "linked folder", "device"):
        yield Attack("init", f"into {how}", partial(begun_at, how))
    for reference in (*REFERENCES, "pipe", "device", "secret", "snapshots are a file"):
        yield Attack("caches of models", f"{reference[:20]!r}", partial(cached, reference))
    for path, values in PLANS.items():
        for number, value in enumerate(values):
            key = ".".join(map(str, path))
            yield Attack("plans", f"{key} {number}", partial(in_plan, path, value))
    for name, (tracker, spoil) in SPOILT.items():
        yield Attack("trackers", name, partial(tracked, tracker, spoil))
