"""Does each mistake that a user makes get one clear error, with a fix and the right exit code?

Some seventy mistakes in commands, jobs, cluster files and paths, each in a process of its own that
has not imported torch. An error counts by its fields: it has a fix, its exit code is the right one,
and torch was not imported where the mistake can be seen without it.

    python benchmarks/mistakes.py [--json] [--only REGEX] [--show]

Figures: `mistakes`, `with_fix`, `right_exit`, `without_torch`, `tracebacks`. `--show` prints every
error. The script ends with exit code 1 if one of them lacks something.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from common import make_parser, print_figures
from gpumix.cli import main as gpumix
from gpumix.hardware.estimates import estimate, known_models, what_if
from gpumix.planner import plan
from gpumix.schema.reading import read
from gpumix.train.console import plan_page

# What most commands import, so that each process need not.
SHARED = (estimate, known_models, what_if, plan, read, plan_page)

JOB: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "vocab_size": 264,
        }
    },
    "data": {"text": ["texts"]},
    "sequence_length": 32,
    "global_batch_size": 8,
    "max_steps": 2,
    "cluster": "cluster.yaml",
    "advanced": {"profile_cache": "cache"},
    "output_dir": "run",
}
CLUSTER = "- {class: big, emulate: 40 GFLOP/s, memory: 1 GiB}\n"
INPUT, MACHINE, NO_PLAN = 2, 3, 4


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        command: words behind `gpumix`.
        exit_code: the right one.
        job: changed keys of the job, by dotted name; None takes a key away.
        files: other files, by path.
        needs_torch: whether only a look at the model shows it.
    """

    command: str | tuple[str, ...]
    exit_code: int = INPUT
    job: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    needs_torch: bool = False

    @property
    def words(self) -> list[str]:
        return self.command.split() if isinstance(self.command, str) else list(self.command)


def cards(text: str, *more: str) -> tuple[str, ...]:
    return ("plan", "--cluster", text, *more)


SMALL = ("--model", "20M")
MISTAKES: dict[str, Mistake] = {
    # Commands.
    "a verb with a typo": Mistake("trian job.yaml"),
    "an unknown option": Mistake("plan --modle 7B"),
    "an option without its value": Mistake("plan --model"),
    "no run to export": Mistake("export"),
    "a word for a number": Mistake(cards("rtx4090", "--global-batch-size", "many")),
    "a batch of zero": Mistake(cards("rtx4090", "--global-batch-size", "0")),
    "an unknown precision": Mistake(cards("rtx4090", "--precision", "fp8")),
    "an unknown optimizer": Mistake(cards("rtx4090", "--optimizer", "adamx")),
    "an unknown base": Mistake(cards("rtx4090", "--base", "fp4")),
    "a base without adapters": Mistake(cards("rtx4090", "--base", "nf4")),
    "a rank of zero": Mistake(cards("rtx4090", "--lora", "0")),
    "memory in unknown units": Mistake(cards("rtx4090", "--ram", "64 gigs")),
    "an unknown strategy": Mistake(cards("rtx4090", *SMALL, "--strategy", "fastest")),
    "--set without a job": Mistake(cards("rtx4090", "--set", "max_steps=2")),
    "--set without a value": Mistake("plan job.yaml --set max_steps"),
    "an option of estimates on a job": Mistake("plan job.yaml --model 7B"),
    "a link without a cluster": Mistake("plan --network 25GbE --model 7B"),
    # Cards, links and models.
    "a card that does not exist": Mistake(cards("2x rtx4900", *SMALL)),
    "a card of several kinds": Mistake(cards("rtx6000", *SMALL)),
    "no card at all": Mistake(cards("", *SMALL)),
    "zero cards": Mistake(cards("0x rtx4090", *SMALL)),
    "cards of two makers": Mistake(cards("rtx4090, mi300x", *SMALL)),
    "hosts without a link": Mistake(cards("rtx4090; rtx3090", *SMALL)),
    "a link within one host": Mistake(cards("rtx4090, rtx3090", "--network", "25GbE", *SMALL)),
    "an unknown link": Mistake(cards("rtx4090; rtx3090", "--network", "25GbX", *SMALL)),
    "no GPU here": Mistake("plan --model 7B"),
    "a number for a model": Mistake(cards("rtx4090", "--model", "7")),
    "a model with a typo": Mistake(cards("rtx4090", "--model", "lama-3-8b")),
    "a model that is not in the cache": Mistake(cards("rtx4090", "--model", "some/model-7b")),
    "a model that is no JSON": Mistake(
        cards("rtx4090", "--model", "config.json"), files={"config.json": "{"}
    ),
    "a model of an unknown type": Mistake(
        cards("rtx4090", "--model", "config.json"), files={"config.json": '{"model_type": "lama"}'}
    ),
    "a model without its sizes": Mistake(
        cards("rtx4090", "--model", "config.json"),
        files={"config.json": '{"model_type": "llama", "hiden_size": 64}'},
    ),
    "a model that fits nowhere": Mistake(cards("2x rtx3060", "--model", "70B"), NO_PLAN),
    "whatif without a change": Mistake(("whatif", "--cluster", "rtx4090", *SMALL)),
    "whatif of an unknown card": Mistake(
        ("whatif", "--cluster", "rtx4090", *SMALL, "--add", "rtx4900")
    ),
    "whatif without more than there is": Mistake(
        ("whatif", "--cluster", "rtx4090", *SMALL, "--remove", "2x rtx4090")
    ),
    # Files.
    "no such job": Mistake("plan nope.yaml"),
    "a script for a job": Mistake("plan train.py", files={"train.py": "print(1)\n"}),
    "a plan for a job": Mistake(
        "plan plan.json", files={"plan.json": '{"schema_version": 1, "kind": "plan"}'}
    ),
    "a job that is no YAML": Mistake("plan broken.yaml", files={"broken.yaml": "model: [\n"}),
    "an empty job": Mistake("plan empty.yaml", files={"empty.yaml": ""}),
    "a folder for a job": Mistake("plan texts"),
    "JSON that is no plan": Mistake("simulate other.json", files={"other.json": "{}"}),
    "a job for a plan": Mistake("simulate job.yaml"),
    "no such cluster file": Mistake("devices --cluster none.yaml"),
    "a cluster without memory": Mistake(
        "devices --cluster c.yaml", files={"c.yaml": "- {class: big}\n"}
    ),
    "a cluster of names for training": Mistake("train job.yaml --cluster p40"),
    "two classes of one name": Mistake(
        "devices --cluster c.yaml",
        files={"c.yaml": CLUSTER + "- {class: big, emulate: 2 GFLOP/s, memory: 1 GiB}\n"},
    ),
    "an emulated cluster without speed": Mistake(
        "devices --cluster c.yaml",
        files={"c.yaml": "- {class: big, emulate: fast, memory: 1 GiB}\n"},
    ),
    "no run to report on": Mistake("report nowhere"),
    "no checkpoint to inspect": Mistake("inspect nowhere"),
    "no checkpoint to export": Mistake("export nowhere --to out"),
    "no run to watch": Mistake("top nowhere"),
    "no module for the doctor": Mistake("doctor missing:main"),
    "no program to launch": Mistake("launch missing.py"),
    "data that is not there": Mistake(("init", "--data", "missing")),
    # Keys of a job.
    "an unknown key": Mistake("plan job.yaml", job={"globl_batch_size": 8}),
    "an unknown key of the optimizer": Mistake(
        "plan job.yaml", job={"optimizer.learning_rate": 1e-3}
    ),
    "no steps": Mistake("plan job.yaml", job={"max_steps": None}),
    "steps below zero": Mistake("plan job.yaml", job={"max_steps": -1}),
    "a word for steps": Mistake("plan job.yaml", job={"max_steps": "many"}),
    "a rate below zero": Mistake("plan job.yaml", job={"optimizer.lr": -1}),
    "an optimizer that does not exist": Mistake("plan job.yaml", job={"optimizer.name": "adamx"}),
    "a setting of another optimizer": Mistake("plan job.yaml", job={"optimizer.momentum": 0.9}),
    "no model": Mistake("plan job.yaml", job={"model.config": None}),
    "a model without a type": Mistake("plan job.yaml", job={"model.config.model_type": None}),
    "no data": Mistake("plan job.yaml", job={"data.text": None}),
    "text that is not there": Mistake("train job.yaml", job={"data.text": ["missing"]}),
    "nothing to resume": Mistake("train job.yaml --resume"),
    "an output that is a file": Mistake("train job.yaml", job={"output_dir": "cluster.yaml"}),
    "a plan and a strategy": Mistake(
        "train job.yaml --plan plan.json --strategy even", files={"plan.json": "{}"}
    ),
    "GPUs on a host without them, in a dry run": Mistake(
        "train job.yaml --dry-run",
        MACHINE,
        job={"cluster": [{"class": "rtx3090", "memory": "24 GiB"}]},
        needs_torch=True,
    ),
    "a job with a typo in its name": Mistake("train jop.yaml"),
    "text that is not there, in a dry run": Mistake(
        "train job.yaml --dry-run", job={"data.text": ["missing"]}
    ),
    "too small a vocabulary, in a dry run": Mistake(
        "train job.yaml --dry-run",
        job={"model.config.vocab_size": 100, "tokenizer": "bytes"},
        needs_torch=True,
    ),
    "a dry run of a template": Mistake("launch --template slurm --dry-run job.yaml"),
    "text that is not there, planned": Mistake("plan job.yaml", job={"data.text": ["missing"]}),
    "weights that are not there": Mistake("train job.yaml", job={"model.weights": "missing"}),
    "no tokenizer for many tokens": Mistake(
        "plan job.yaml", job={"model.config.vocab_size": 32_000}
    ),
    "a tokenizer that is not there": Mistake("plan job.yaml", job={"tokenizer": "missing.json"}),
    "a cluster that is not there": Mistake("plan job.yaml", job={"cluster": "missing.yaml"}),
    "a key of the model with a typo": Mistake(
        "train job.yaml", job={"model.config.num_key_value_head": 2}, needs_torch=True
    ),
    "an unknown strategy of a job": Mistake("plan job.yaml", job={"strategy": "fastest"}),
    "an unknown tracker": Mistake("plan job.yaml", job={"report_to": "wandbb"}),
    "a time in unknown units": Mistake("plan job.yaml", job={"advanced.timeout": "5 minutes"}),
    "fewer stages than at least": Mistake(
        "plan job.yaml", job={"techniques": {"max_pipeline_stages": 1, "min_pipeline_stages": 2}}
    ),
}


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    exit_code: int
    errors: str
    told: dict[str, Any]
    imported_torch: bool


def main() -> int:
    arguments = _arguments()
    chosen = {n: m for n, m in MISTAKES.items() if re.search(arguments.only, n)}
    answers = {name: ask(mistake) for name, mistake in chosen.items()}
    figures = {
        "mistakes": len(chosen),
        "with_fix": sum(
            bool(a.told.get("fix") or a.told.get("remedies")) for a in answers.values()
        ),
        "right_exit": sum(answers[n].exit_code == m.exit_code for n, m in chosen.items()),
        "without_torch": sum(
            m.needs_torch or not answers[n].imported_torch for n, m in chosen.items()
        ),
        "tracebacks": sum("Traceback" in a.errors for a in answers.values()),
    }
    for name, answer in answers.items():
        if arguments.show or lacks(chosen[name], answer):
            print(f"-- {name}: {' '.join(chosen[name].words)}", file=sys.stderr)
            print(f"{answer.errors.rstrip()}\n{lacks(chosen[name], answer)}", file=sys.stderr)
    print_figures(figures, as_json=arguments.json)
    return int(any(lacks(m, answers[n]) for n, m in chosen.items()))


def lacks(mistake: Mistake, answer: Answer) -> str:
    """What an answer lacks; empty for a good one."""
    found = []
    if answer.exit_code != mistake.exit_code:
        found.append(f"exit code {answer.exit_code}, {mistake.exit_code} is right")
    if not (answer.told.get("fix") or answer.told.get("remedies")):
        found.append("no fix")
    if answer.imported_torch and not mistake.needs_torch:
        found.append("torch was imported")
    if "Traceback" in answer.errors:
        found.append("a traceback")
    return "; ".join(found)


def ask(mistake: Mistake) -> Answer:
    """The answer of a process of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        place = Path(folder)
        _furnish(place, mistake)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _in_child(place, mistake, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
    return Answer(**json.loads(told))


def _in_child(place: Path, mistake: Mistake, writing: int) -> None:
    os.chdir(place)
    verb, *words = mistake.words
    sys.argv = ["gpumix", verb, "--json", *words]
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            gpumix()
        except SystemExit as left:
            code = int(left.code or 0)
    lines = out.getvalue().splitlines()
    told = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    answer = {
        "exit_code": code,
        "errors": errors.getvalue() or out.getvalue(),
        "told": told,
        "imported_torch": "torch" in sys.modules,
    }
    with os.fdopen(writing, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _furnish(place: Path, mistake: Mistake) -> None:
    job = json.loads(json.dumps(JOB))
    for name, value in mistake.job.items():
        *path, last = name.split(".")
        at = job
        for key in path:
            at = at.setdefault(key, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    (place / "texts").mkdir()
    (place / "texts" / "one.txt").write_text("some text\n" * 500)
    (place / "cluster.yaml").write_text(CLUSTER)
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    for name, text in mistake.files.items():
        (place / name).write_text(text)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="mistakes whose name matches this expression")
    parser.add_argument("--show", action="store_true", help="print every error")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
