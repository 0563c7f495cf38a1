"""Every `gpumix` command in a block of the pages runs, on one small job with emulated devices.

Each distinct command once, in a folder that has what pages take for granted: the job, its cluster,
a plan, a run, made by the commands that pages show for it. What is not run says why on its page;
what prints a shown output is run where that is compared, in `test_reference_pages.py`. Of commands
that take long, with the same options and others less, only the longest is run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.read import read_cluster
from helpers.extended import left_out
from helpers.pages import PAGES, ROOT, Block, blocks, commands, marked
from helpers.processes.commands import environment, run
from helpers.runs.verbs import gpumix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "vocab_size": 264,
        }
    },
    "sequence_length": 16,
    "global_batch_size": 8,
    "max_steps": 2,
    "cluster": "cluster.yaml",
    "output_dir": "runs/first",
    "advanced": {"profile_cache": "profiles", "profile_budget": 1},
}
CLASSES = {
    "big": {"emulate": "40 GFLOP/s", "memory": "64 MiB"},
    "p40": {"emulate": "20 GFLOP/s", "memory": "64 MiB"},
}
HERE = {"classes": CLASSES, "devices": [{"class": "big"}, {"class": "p40"}]}
ON_HOSTS = {
    "classes": CLASSES,
    "devices": [
        {"class": "big", "host": "a", "count": 4},
        {"class": "p40", "host": "b", "count": 8},
    ],
}
# Launched, it trains nothing; called, it does.
PROGRAM = """\
def main():
    import torch

    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    print("launched")
"""
SCRIPTS = "tests/examples/test_changed_imports.py"
# What takes long is run elsewhere, on something smaller.
ELSEWHERE = {
    "gpumix demo --max-steps 10": "tests/cli/verbs/test_demo.py",
    "gpumix launch examples/run_clm.py --output_dir runs/clm": SCRIPTS,
    "gpumix launch examples/clm_no_trainer.py": SCRIPTS,
    "gpumix launch examples/sft_lora.py --output_dir runs/lora": SCRIPTS,
    # needs GPUs
    "gpumix plan --model llama-3-8b --lora 16": "tests/cli/planning/test_plan_page.py",
    "gpumix init --data my-texts/": "tests/cli/verbs/test_init_verb.py",
    "gpumix init --model my-llama/ --data my-texts/ --lora": "tests/cli/verbs/test_init_verb.py",
}
# What makes the folder, before any other command.
FIRST = (
    "gpumix profile job.yaml --output profile.json",
    "gpumix plan job.yaml --output plan.json",
    "gpumix train job.yaml",
)
TAKE_LONG = ("doctor", "profile", "train", "whatif")
USAGE = re.compile(r"\[\w+\]|JOB|RUN|PLAN|PROGRAM|CHECKPOINT|PATH")


def shown() -> dict[tuple[str, ...], Block]:
    """The commands that are to be run, with the first place of each."""
    found: dict[tuple[str, ...], Block] = {}
    for page in PAGES:
        outputs = re.findall(r"<!-- output of: (.*) -->", page.read_text(encoding="utf-8"))
        compared = {tuple(shlex.split(line.partition(" | head ")[0])) for line in outputs}
        for block in blocks(page):
            for words in [] if marked(block) else commands(block):
                command = tuple(words[: words.index(">")] if ">" in words else words)
                usage = any(USAGE.fullmatch(word.partition("|")[0]) for word in command)
                if command[0] == "gpumix" and not usage and command not in compared:
                    found.setdefault(command, block)
    return {command: at for command, at in found.items() if shlex.join(command) not in ELSEWHERE}


def settings(command: tuple[str, ...]) -> Counter[str]:
    """The words of a command, but for its number of steps, which is another one here."""
    return Counter(word for word in command if not re.fullmatch(r"--set|steps=\d+", word))


def longest(commands: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without those that take long and whose words are all in another one; of the same words
    one."""
    alike = {frozenset(settings(one).items()): one for one in reversed([*commands])}
    kept = reversed(alike.values())
    return [
        one
        for one in kept
        if one[1] not in TAKE_LONG or not any(settings(one) < settings(o) for o in alike.values())
    ]


SHOWN = shown()
# What is simulated is planned first, by a command that is shown too.
PLANNED = {c[3:] for c in SHOWN if c[1] == "simulate" and "--cluster" in c}
RUN = [
    command
    for command in longest(SHOWN)
    if shlex.join(command) not in FIRST and (command[1] != "plan" or command[2:] not in PLANNED)
]


# For verbs that search: few plans.
SEARCHED = (
    "techniques={max_pipeline_stages: 1, tensor_parallel_size: 1, zero_stages: 3, state_on: device}"
)
# What others try too, in long searches and in runs; and of each, its options are looked at in
# `test_page_commands.py`.
FURTHER = {
    "gpumix compare --cluster '4x rtx3090, 2x p40' --model 1B",
    "gpumix doctor train:main",
    "gpumix plan --cluster '4x a100-40gb-sxm; 8x v100-16gb-sxm' --network ib-hdr --model 1B",
    "gpumix plan job.yaml --strategy even --output plan.json",
    "gpumix simulate plan.json --cluster '4x rtx3090, 2x p40' --model 3B",
    "gpumix train job.yaml --trace-step 20",
    "gpumix plan job.yaml --cluster '4x a100-40gb-sxm'",
    "gpumix train job.yaml --set report_to=tensorboard",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """The folder, as commands find it."""
    folder = tmp_path_factory.mktemp("desk")
    # Where it lies is part of what is known of data: in copies of the folder it stays the same.
    texts = {"text": [str(folder / "my-texts")], "pattern": "*.txt"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "data": texts}), encoding="utf-8")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(HERE), encoding="utf-8")
    (folder / "my-texts").mkdir()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "my-texts" / "one.txt").write_text(text, encoding="utf-8")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "train.py").write_text(PROGRAM, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in FIRST:
            done = gpumix(*command.split()[1:])
            assert done.exit_code == 0, f"{command}: {done.stderr}"
    for name in ("latest", "second", "clm/gpumix", "llama-7b"):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
    as_if_real(folder)
    return folder


def as_if_real(folder: Path) -> None:
    """What was measured, as if of GPUs."""
    classes = {name: {"memory": one["memory"]} for name, one in CLASSES.items()}
    devices = [{"class": name, "ordinal": number} for number, name in enumerate(classes)]
    real = {"classes": classes, "devices": devices}
    (folder / "real.yaml").write_text(yaml.safe_dump(real), encoding="utf-8")
    cluster = read_cluster(folder / "real.yaml")
    measured = Profile.load(folder / "profile.json")
    measured.model_copy(update={"cluster": cluster}).save(folder / "real.json")


@pytest.fixture
def folder(desk, tmp_path, monkeypatch) -> Path:
    copied = tmp_path / "desk"
    shutil.copytree(desk, copied)
    monkeypatch.chdir(copied)
    return copied


@pytest.mark.parametrize(
    "command",
    left_out([(c,) for c in RUN], [(c,) for c in RUN if shlex.join(c) in FURTHER]),
    ids=shlex.join,
)
def test_a_command_of_the_pages_runs(command, folder, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    _, verb, *words = command
    if verb == "launch":
        launched(words, folder)
        return
    if verb == "train" and "--resume" not in words:
        shutil.rmtree(folder / "runs" / "first")
    if verb == "simulate" and "--cluster" in words:  # the plan is one that was made so
        done = gpumix("plan", *words[1:], "--output", words[0])
        assert done.exit_code == 0, done.stderr
    done = gpumix(verb, *words, *shorter(verb, words))
    assert done.exit_code == 0, f"{SHOWN[command]}: {done.stderr}"


def launched(words: list[str], folder: Path) -> None:
    """There are no such hosts, so what each would run is printed, which nothing is logged of; what
    runs here has a process of its own."""
    if "--hosts" in words:
        (folder / "cluster.yaml").write_text(yaml.safe_dump(ON_HOSTS), encoding="utf-8")
        words = ["--print-commands", *words]
        if "--logs" in words:
            at = words.index("--logs")
            del words[at : at + 2]
    if {"--print-commands", "--template"} & set(words):
        printed = gpumix("launch", *words)
        assert (printed.exit_code, bool(printed.stdout)) == (0, True), printed.stderr
        return
    env = environment(folder / "cache") | {"NCCL_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "gpumix", "launch", *words]
    done = run(command, folder=folder, env=env, timeout_s=200)
    assert done.code == 0, done.err
    assert done.out


def shorter(verb: str, words: list[str]) -> list[str]:
    """What makes a command short, whatever the page says: few steps, of the sizes that are measured
    already, and few plans; and real cards where real ones join."""
    if verb == "train":
        steps = 4 if "--resume" in words else 20 if "--trace-step" in words else 2
        sizes = (f"{key}={JOB[key]}" for key in ("sequence_length", "global_batch_size"))
        return [word for one in (f"max_steps={steps}", *sizes) for word in ("--set", one)]
    if verb == "whatif" and "job.yaml" in words:
        real = ["--profile", "real.json", "--set", "cluster=real.yaml"]
        return [*real, "--set", SEARCHED]
    if verb == "compare" and "job.yaml" in words:
        return ["--set", SEARCHED]
    if verb == "doctor":
        return ["--steps", "3", "--pairs", "3"]
    return []


def test_what_pages_show_is_run():
    assert len(SHOWN) > 40 and len(RUN) > 35
    assert {shlex.join(command) for command in RUN} >= FURTHER
    assert {shlex.join(command) for command in SHOWN} >= set(FIRST)
    assert all(
        command in RUN
        or shlex.join(command) in FIRST
        or command[1] in TAKE_LONG
        or command[2:] in PLANNED
        for command in SHOWN
    )
    assert {words[1] for words in SHOWN} >= {"plan", "train", "doctor", "launch", "report"}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
