"""How to do the same again: commands, the job, versions, and the plan by its digest."""

from __future__ import annotations

import shlex

from gpumix.report import words
from gpumix.report.facts import Facts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import aside, section, table
from gpumix.train import run_files
from gpumix.train.run_record import RunRecord

JOB = "job.yaml"


def reproduce(facts: Facts) -> Markup:
    record = facts.run.record
    return section(
        facts,
        "reproduce",
        "How to do the same again",
        aside(
            f"Save the job below as {JOB} in {record.folder}, where its code is looked for."
            if record is not None and _calls(record)
            else f"Save the job below as {JOB}."
            if record is not None
            else "The run's folder has no run.json, so the job itself is not known: give the file "
            "that it was started with."
        ),
        el("pre", el("code", "\n".join(_commands(facts)))),
        table("What it ran by", ["what", "is"], _known(facts)),
        el("details", el("summary", "The job"), el("pre", el("code", record.job_text())))
        if record is not None
        else None,
    )


def _calls(record: RunRecord) -> list[str]:
    """Modules of code that the job calls."""
    parts = (record.job.get(key) for key in ("model", "data"))
    factories = [part.get("factory") for part in parts if isinstance(part, dict)]
    return list(dict.fromkeys(f.partition(":")[0] for f in factories if isinstance(f, str)))


def _commands(facts: Facts) -> list[str]:
    run = facts.run
    folder = shlex.quote(str(run.folder))
    plan = shlex.quote(str(run.folder / run_files.PLAN))
    allowed = (
        "".join(f" --allow {shlex.quote(m)}" for m in _calls(run.record)) if run.record else ""
    )
    train = f"gpumix train {JOB}{allowed}"
    commands = [
        (f"{train} --plan {plan} --set output=runs/again", "the same plan"),
        (f"{train} --set output=runs/again", "measured and planned anew"),
    ]
    if run.checkpoints and run.progress.state in ("interrupted", "failed"):
        commands.insert(0, (f"{train} --resume", "go on where it stopped"))
    if run.profile is not None:
        commands.append((f"gpumix simulate {plan}", "what binds a step"))
    if run.checkpoints:
        commands.append((f"gpumix inspect {folder}", "what its checkpoints hold"))
    width = max(len(command) for command, _ in commands)
    return [f"{command:<{width}}  # {why}" for command, why in commands]


def _known(facts: Facts) -> list[list[str]]:
    run, plan = facts.run, facts.run.plan
    rows = [
        ["plan", f"{plan.digest()}, strategy {plan.strategy}, ZeRO stage {plan.zero_stage}"],
        ["model", plan.model],
        ["batch", f"{plan.global_batch:,} samples of {plan.sequence_length:,} tokens"],
    ]
    if run.profile is not None:
        profile = run.profile
        rows.append(
            [
                "measured with",
                f"torch {profile.torch_version}" if profile.torch_version else "a datasheet",
            ]
        )
    if run.record is not None:
        rows += _versions(run.record)
    if run.checkpoints:
        rows.append(["newest checkpoint", run.checkpoints[0][1]])
    return rows


def _versions(record: RunRecord) -> list[list[str]]:
    packages = ", ".join(f"{name} {version}" for name, version in record.packages.items())
    return [
        ["started", words.moment(record.started_at)],
        ["gpumix", record.gpumix],
        ["Python", f"{record.python} on {record.platform}"],
        ["packages", packages or words.UNKNOWN],
    ]
