"""Script for `make_sbatch_script`: a task per node, running the ranks of the node. Pure.

Unequal nodes are components of one heterogeneous job, with a single step over all of them: its
tasks are numbered globally, so each knows its ranks.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from gpumix.launch.commands import LaunchEnvironment, make_rendezvous_arguments
from gpumix.launch.program import Program
from gpumix.launch.schedulers.nodes import (
    EqualNodes,
    NumberedNodes,
    count_ranks,
    make_node_command,
    number_components,
)
from gpumix.schema.errors import InputError
from gpumix.schema.untrusted_text import format_sbatch_option

CPUS_PER_DEVICE = 4
# Time left to end in after saving; SLURM stores seconds in 16 bits.
END_S, MOST_S = 30, 2**16 - 1
HEAD = """\
#!/bin/bash
# Made by `gpumix launch --template slurm`; sbatch {file}
# Look at partition, account, time and the kinds of GPUs (sinfo -o '%P %G'), and add what your site
# needs."""
FIRST_NODE = '$(scontrol show hostnames "${nodes}" | head -n 1)'
BODY = """\
set -euo pipefail
cd {folder}
{settings}
ADDRESS={address}
PORT={port}
export ADDRESS PORT

# One task on each node; SLURM_PROCID counts them through. A task that fails ends all. On SIGTERM,
# which comes {save_s} s before the time is over, runs save."""


def make_sbatch_script(
    components: Sequence[EqualNodes],
    program: Program,
    around: LaunchEnvironment,
    *,
    address: str | None = None,
    port: int | None = None,
) -> str:
    """Return the script for `components` in rank order. By default the rendezvous is the first
    node, at a port derived from the job's number.

    Raises:
        InputError: the grace period is too long for SLURM.
    """
    before_s = math.ceil(around.grace_s) + END_S
    if before_s > MOST_S:
        raise InputError(
            "SLURM does not send a signal so long before the time is over",
            code="slurm-signal-too-early",
            where=f"--grace-period {around.grace_s:g}",
            fix=f"--grace-period {MOST_S - END_S}, or less",
        )
    parts, several = number_components(components), len(components) > 1
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST"
    head = [
        HEAD.format(file=f"{program.title}.sbatch"),
        *_make_common_directives(program, before_s),
    ]
    asked = "\n#SBATCH hetjob\n".join("\n".join(_make_directives(part.component)) for part in parts)
    settings = [f"export {shlex.join([f'{n}={v}'])}" for n, v in sorted(around.settings.items())]
    body = BODY.format(
        folder=shlex.quote(str(around.folder)),
        settings="\n".join(
            [*settings, "# export NCCL_SOCKET_IFNAME=... the network between nodes"]
        ),
        address=shlex.quote(address) if address else FIRST_NODE.format(nodes=nodes),
        port=port or "$((20000 + SLURM_JOB_ID % 20000))",
        save_s=before_s,
    )
    world = count_ranks(components)
    steps = [_make_step_options(number, part, several) for number, part in enumerate(parts)]
    tasks = [_make_task_command(part, program, around, world) for part in parts]
    run = " \\\n    : ".join(f"{step} \\\n    {task}" for step, task in zip(steps, tasks))
    return "\n".join(
        [*head, asked, "", body, f"srun --kill-on-bad-exit=1 --label \\\n    {run}", ""]
    )


def _make_common_directives(program: Program, before_s: int) -> Iterator[str]:
    yield format_sbatch_option("job-name", program.title)
    yield format_sbatch_option("output", "%x-%j.log")
    yield format_sbatch_option("time", "24:00:00")
    yield format_sbatch_option("signal", f"TERM@{before_s}")


def _make_directives(component: EqualNodes) -> Iterator[str]:
    yield format_sbatch_option("nodes", component.nodes)
    yield format_sbatch_option("ntasks-per-node", 1)
    yield format_sbatch_option("cpus-per-task", component.devices * CPUS_PER_DEVICE)
    if component.gpus:
        kinds = [f"gpu:{name}:{count}" for name, count in component.held]
        yield format_sbatch_option("gres", ",".join(kinds) or f"gpu:{component.devices}")
    if component.hosts:
        yield format_sbatch_option("nodelist", ",".join(component.hosts))


def _make_step_options(number: int, part: NumberedNodes, several: bool) -> str:
    group = f"--het-group={number} " if several else ""
    cpus = part.component.devices * CPUS_PER_DEVICE  # srun does not inherit them
    return f"{group}--ntasks={part.component.nodes} --cpus-per-task={cpus}"


def _make_task_command(
    part: NumberedNodes, program: Program, around: LaunchEnvironment, world: int
) -> str:
    """Return the command of each task of a component, as one word for the script's shell."""
    node = f"(SLURM_PROCID - {part.first_node})" if part.first_node else "SLURM_PROCID"
    meeting = make_rendezvous_arguments('"$ADDRESS"', '"$PORT"')
    command = make_node_command(part, node, world, meeting, around, shlex.join(program.words))
    return f"bash -c {shlex.quote(command)}"
