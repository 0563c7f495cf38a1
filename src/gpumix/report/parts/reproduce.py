"""Instructions to repeat the run: commands, job, versions, and the plan's digest."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

from gpumix.hardware.host.environment import CLUSTER
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_remark, render_section, render_table
from gpumix.report.run import JOB
from gpumix.train.run_figures import words
from gpumix.train.run_log import run_files
from gpumix.train.run_manifest import HIDDEN, RunRecord, Script


def render_instructions(facts: RunFacts) -> Markup:
    record = facts.run.record
    commands = _commands(facts)
    return render_section(
        "reproduce",
        "How to repeat the run",
        *(render_remark(line) for line in _list_prerequisites(facts)),
        el("pre", el("code", "\n".join(commands))) if commands else None,
        render_table("Plan, model and versions", ["", "value"], _list_facts(facts)),
        el("details", el("summary", "The job"), el("pre", el("code", record.job_text())))
        if record is not None and record.script is None
        else None,
    )


def _list_prerequisites(facts: RunFacts) -> Iterator[str]:
    """Yield the prerequisites of the commands."""
    record = facts.run.record
    if record is None:
        yield (
            "The run's folder has no run.json, so the job is unknown: use the file that the run "
            "was started with."
        )
    elif record.script is not None:
        yield from _list_script_prerequisites(facts, record, record.script)
    else:
        where = (
            f" in {record.folder}, where its code is imported from"
            if _list_called_modules(record)
            else ""
        )
        yield f"Save the job below as {JOB}{where}."


def _list_script_prerequisites(facts: RunFacts, record: RunRecord, script: Script) -> Iterator[str]:
    if script.words:
        yield f"Start it in {record.folder}."
    else:
        by = f" by {script.launcher}" if script.launcher else ""
        yield f"It was called{by} in {record.folder}, not started as a script: call it again."
    if HIDDEN in " ".join(script.words):
        yield f"Fill in the values shown as {HIDDEN}: values that look secret are not stored."
    plan = facts.run.folder / run_files.PLAN
    yield f"To use the same plan, pass it: {script.plans}(..., plan={str(plan)!r})."


def _list_called_modules(record: RunRecord) -> list[str]:
    """Return the modules with code called by the job."""
    parts = (record.job.get(key) for key in ("model", "data"))
    factories = [part.get("factory") for part in parts if isinstance(part, dict)]
    return list(dict.fromkeys(f.partition(":")[0] for f in factories if isinstance(f, str)))


def _commands(facts: RunFacts) -> list[str]:
    """Return the commands, each with its purpose."""
    run = facts.run
    script = run.record.script if run.record is not None else None
    commands = [
        *(_make_job_commands(facts) if script is None else _make_script_commands(facts, script))
    ]
    if run.profile is not None:
        plan = shlex.quote(str(run.folder / run_files.PLAN))
        commands.append((f"gpumix simulate {plan}", "the bottleneck of a step"))
    if run.checkpoints:
        folder = shlex.quote(str(run.folder))
        commands.append((f"gpumix inspect {folder}", "contents of its checkpoints"))
    width = max((len(command) for command, _ in commands), default=0)
    return [f"{command:<{width}}  # {why}" for command, why in commands]


def _make_job_commands(facts: RunFacts) -> Iterator[tuple[str, str]]:
    run = facts.run
    plan = shlex.quote(str(run.folder / run_files.PLAN))
    calls = _list_called_modules(run.record) if run.record is not None else []
    train = f"gpumix train {JOB}{''.join(f' --allow {shlex.quote(m)}' for m in calls)}"
    if run.checkpoints and run.progress.state in ("interrupted", "failed"):
        yield f"{train} --resume", "continue from the last checkpoint"
    yield f"{train} --plan {plan} --set output_dir=runs/again", "the same plan"
    yield f"{train} --set output_dir=runs/again", "profile and plan again"


def _make_script_commands(facts: RunFacts, script: Script) -> Iterator[tuple[str, str]]:
    if script.words:
        words = [*_make_launcher_command(facts, script), *script.words]
        yield shlex.join(words), "the profile is cached; plans again"


def _make_launcher_command(facts: RunFacts, script: Script) -> list[str]:
    """Return the launcher command of a script's processes, with the devices."""
    hosts = Counter(worker.host for worker in facts.run.plan.workers)
    if len(hosts) > 1:
        on = ",".join(f"{host}:{processes}" for host, processes in hosts.items())
        cluster = [] if script.cluster is None else ["--cluster", script.cluster]
        return ["gpumix", "launch", *cluster, "--hosts", on]
    if script.launcher == "torchrun" or script.processes == 1:
        env = [] if script.cluster is None else ["env", f"{CLUSTER}={script.cluster}"]
        torchrun = ["torchrun", "--nproc-per-node", str(script.processes)]
        return [*env, *(torchrun if script.launcher == "torchrun" else ["python"])]
    if script.cluster is None:
        return ["gpumix", "launch", "--processes", str(script.processes)]
    return ["gpumix", "launch", "--cluster", script.cluster]


def _list_facts(facts: RunFacts) -> list[list[str]]:
    run, plan = facts.run, facts.run.plan
    rows = [
        ["plan", f"{plan.digest()}, strategy {plan.strategy}, ZeRO stage {plan.zero_stage}"],
        ["model", ", ".join(filter(None, (run.model, f"fingerprint {plan.model}")))],
        ["batch", f"{plan.global_batch:,} samples of {plan.sequence_length:,} tokens"],
    ]
    if run.profile is not None:
        profile = run.profile
        rows.append(
            [
                "profiled with",
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
    by = record.script.launcher if record.script is not None else None
    return [
        ["started", f"{words.format_time(record.started_at)}{f' by {by}' if by else ''}"],
        ["gpumix", record.gpumix],
        ["Python", f"{record.python} on {record.platform}"],
        ["packages", packages or words.UNKNOWN],
    ]
