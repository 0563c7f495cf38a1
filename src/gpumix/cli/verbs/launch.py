"""`gpumix launch`: a job or a program on all devices of one or several hosts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumix.cli.common import DryRun, Json, print_json, print_result
from gpumix.schema.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumix.cli.planning.dry_run import ForeseenStart
    from gpumix.launch.commands import RendezvousAddress
    from gpumix.launch.hosts import Host, HostRanks
    from gpumix.launch.launcher import LaunchRequest
    from gpumix.launch.program import Program
    from gpumix.schema.cluster.cluster import Cluster


TIMEOUT_S = 20.0
GRACE_S, SLURM_GRACE_S = 60.0, 270.0


class Template(StrEnum):
    slurm = "slurm"
    k8s = "k8s"


CONTEXT_SETTINGS = {"allow_interspersed_args": False}

ProgramWords = Annotated[
    list[str], typer.Argument(metavar="PROGRAM", help="JOB.yaml, SCRIPT.py or, with -m, MODULE.")
]
IsModule = Annotated[bool, typer.Option("-m", help="The program is a module.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="A cluster file: the devices to use, or to emulate."),
]
Processes = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Processes on this host; default: one per device."),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        help="Names for ssh: a,b or a:4,b:8 (processes), a file with one per line, or a cluster "
        "file.",
    ),
]
Pythons = Annotated[
    list[str],
    typer.Option(
        "--python",
        metavar="[HOSTS=]PATH",
        help="Interpreter on the hosts, or on some: a,b=/opt/py311/bin/python; default: the "
        "path of this one. May be repeated.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Working directory on the hosts; default: this one."),
]
Variables = Annotated[
    list[str],
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="Environment variable for every rank; without a value: its current one. Repeatable.",
    ),
]
Logs = Annotated[Path | None, typer.Option("--logs", help="Folder for a log file per host.")]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Address of the first host; default: the one that ssh uses."),
]
Port = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="Port on that host; default: any free one."),
]
TimeoutS = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1.0,
        help=f"Seconds for a host to answer; default: {TIMEOUT_S:.0f}.",
    ),
]
GraceS = Annotated[
    float | None,
    typer.Option(
        "--grace-period",
        min=0.0,
        help=f"Seconds to save after a stop; default: {GRACE_S:.0f}, under SLURM "
        f"{SLURM_GRACE_S:.0f}.",
    ),
]
SshCommand = Annotated[
    str | None,
    typer.Option("--ssh", help="The ssh command, with its options; default: ssh."),
]
PrintsCommands = Annotated[
    bool,
    typer.Option("--print-commands", help="Print the command of each host, and run nothing."),
]
PrintedTemplate = Annotated[
    Template | None,
    typer.Option("--template", help="Print a template for a scheduler: slurm or k8s."),
]


# One parameter per option, as typer requires.
def launch(
    called: typer.Context,
    program: ProgramWords,
    module: IsModule = False,
    cluster: ClusterFile = None,
    processes: Processes = None,
    hosts: Hosts = None,
    python: Pythons = [],  # noqa: B006
    folder: Folder = None,
    env: Variables = [],  # noqa: B006
    logs: Logs = None,
    address: Address = None,
    port: Port = None,
    timeout: TimeoutS = None,
    grace_period: GraceS = None,
    ssh: SshCommand = None,
    print_commands: PrintsCommands = False,
    template: PrintedTemplate = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run a job or a program on all devices of this host, or of several hosts over ssh.

    A script or module gets one process per device, like torchrun's; its own arguments follow its
    name. A job is trained; arguments of gpumix train follow it. Hosts are probed first; one Ctrl-C
    stops all, so that runs save.

    With --dry-run, hosts are probed and a job is checked; then the processes of each host are
    printed, and none is started.

    Example: gpumix launch train.py
    Example: gpumix launch --cluster cluster.yaml train.py
    Example: gpumix launch --hosts a:4,b:8 job.yaml
    Example: gpumix launch --dry-run train.py
    Example: gpumix launch --template slurm --cluster cluster.yaml job.yaml
    """
    from gpumix.launch.commands import LaunchEnvironment, Ssh
    from gpumix.launch.launcher import LaunchRequest, pass_cluster
    from gpumix.launch.options import parse_pythons, parse_variables
    from gpumix.launch.program import parse_program
    from gpumix.launch.schedulers.kubernetes import PYTHON

    named = parse_program(program, module=module)
    _check_options(called, named)
    devices, file, on = _read_devices(named, cluster, hosts)
    usual = PYTHON if template is Template.k8s else sys.executable
    default, pythons = parse_pythons(python, on, usual)
    if grace_period is None:
        grace_period = SLURM_GRACE_S if template is Template.slurm else GRACE_S
    asked = pass_cluster(
        LaunchRequest(
            program=named,
            around=LaunchEnvironment(
                folder=folder or Path.cwd(),
                python=default,
                pythons=pythons,
                settings=parse_variables(env),
                grace_s=grace_period,
            ),
            hosts=on,
            cluster=devices,
            cluster_file=file,
            processes=processes,
            ssh=Ssh(tuple(shlex.split(ssh or "ssh")), timeout or TIMEOUT_S),
            address=address,
            port=port,
            logs=logs,
            as_json=as_json,
        ),
        scheduled=template is not None,
    )
    if template is not None:
        _print_template(template, asked)
    elif print_commands:
        _print_commands(asked)
    elif dry_run or (named.kind == "job" and "--dry-run" in named.arguments):
        _check_launch(asked)
    else:
        _run_program(asked)


def _check_options(called: typer.Context, program: Program) -> None:
    """Refuse options without effect; refuse, or warn of, options behind the program's name."""
    _refuse_unused_options(called, program.kind == "job")
    if program.kind == "job":
        _refuse_misplaced_options(program.arguments, called)
    else:
        _warn_of_misplaced_options(program.arguments, called)


def _refuse_unused_options(called: typer.Context, is_job: bool) -> None:
    """Refuse options without effect on what is wanted.

    Args:
        is_job: the program is a job.
    """
    given = called.params
    unused: tuple[str, ...]
    if given["template"] is not None:
        unused = ("processes", "logs", "print_commands", "timeout", "ssh", "dry_run")
        _refuse_options(given, unused, "has no effect on a template", fix="leave it out")
        for word in given["python"] or ():
            if "=" in word:
                raise InputError(
                    f"--python {word} is for one host: nodes of a template have one interpreter",
                    code="python-per-host-in-template",
                    fix="--python PATH",
                )
    elif given["print_commands"]:
        unused = ("logs", "timeout", "dry_run")
        _refuse_options(
            given, unused, "has no effect where commands are printed", fix="leave it out"
        )
    if given["hosts"] is not None:
        _refuse_options(given, ["processes"], "is of this host", fix="--hosts a:4,b:8")
    elif given["template"] is None:
        unused = ("address", "logs", "python", "folder", "timeout", "ssh")
        _refuse_options(
            given, unused, "has an effect on several hosts only", fix="name them: --hosts a,b"
        )
        if is_job:
            _refuse_options(
                {**given, "grace_period": given["grace_period"] is not None},
                ["processes", "port", "grace_period"],
                "has no effect on a job on one host",
                fix="leave it out: its cluster says which devices it has",
            )


def _refuse_misplaced_options(arguments: Sequence[str], called: typer.Context) -> None:
    """Refuse options of `gpumix launch` behind a job; arguments there are for `gpumix train`."""
    assert called.parent is not None
    verbs: Any = called.parent.command
    of_train, own = verbs.commands["train"], called.command
    before = {option for of in own.params for option in of.opts}
    before.difference_update(option for of in of_train.params for option in of.opts)
    for word in arguments:
        if word.partition("=")[0] in before:
            raise InputError(
                f"{word} is an option of gpumix launch, and stands behind the job",
                code="launch-option-after-job",
                where="command line",
                fix=f"put it before: gpumix launch {word} ... JOB.yaml",
            )


def _warn_of_misplaced_options(arguments: Sequence[str], called: typer.Context) -> None:
    """Warn of arguments of a script or module that are named like options of `gpumix launch`."""
    own = {option for of in called.command.params for option in of.opts if option.startswith("--")}
    for word in dict.fromkeys(word.partition("=")[0] for word in arguments):
        if word in own:
            sys.stderr.write(
                f"{word} goes to the program; options of gpumix launch come before its name\n"
            )


def _refuse_options(
    given: Mapping[str, object], names: Iterable[str], what: str, *, fix: str
) -> None:
    for name in names:
        if given[name]:
            raise InputError(
                f"--{name.replace('_', '-')} {what}", code="option-without-effect", fix=fix
            )


def _read_devices(
    program: Program, file: Path | None, hosts: str | None
) -> tuple[Cluster | None, Path | None, tuple[Host, ...]]:
    """Return the cluster, the program's cluster file, and the hosts."""
    from gpumix.hardware.host.environment import cluster_file
    from gpumix.launch.hosts import get_cluster_hosts, read_hosts
    from gpumix.launch.program import JOB_SUFFIXES
    from gpumix.schema.reading.error_location import locate_errors
    from gpumix.schema.reading.read import read_cluster, read_job

    of_hosts = Path(hosts) if hosts is not None and hosts.endswith(JOB_SUFFIXES) else None
    file = file or of_hosts or (cluster_file() if program.kind != "job" else None)
    cluster = read_cluster(file) if file is not None else None
    if program.kind == "job" and cluster is None:
        found = read_job(Path(program.name), program.overrides()).cluster
        cluster = found if found != "auto" else None
    if of_hosts is not None:
        with locate_errors(of_hosts):
            return cluster, file, get_cluster_hosts(read_cluster(of_hosts))
    return cluster, file, read_hosts(hosts) if hosts is not None else ()


def _print_template(template: Template, asked: LaunchRequest) -> None:
    from gpumix.launch.schedulers.kubernetes import make_manifests
    from gpumix.launch.schedulers.nodes import group_equal_nodes
    from gpumix.launch.schedulers.slurm import make_sbatch_script

    components = group_equal_nodes(asked.hosts, asked.cluster)
    program, around, port = asked.program, asked.around, asked.port
    if template is Template.slurm:
        text = make_sbatch_script(components, program, around, address=asked.address, port=port)
    else:
        if asked.address:
            raise InputError(
                "--address has no effect: the first pod has its name",
                code="option-without-effect",
                fix="leave it out",
            )
        text = make_manifests(components, program, around, asked.files, port=port)
    if asked.as_json:
        print_json({"template": template.value, "text": text})
    else:
        sys.stdout.write(text)


def _print_commands(asked: LaunchRequest) -> None:
    from gpumix.launch.launcher import commands_of

    commands = commands_of(asked)
    if asked.as_json:
        print_json([{"host": host, "command": command} for host, command in commands])
    else:
        sys.stdout.write("".join(f"{command}\n" for _, command in commands))


def _check_launch(asked: LaunchRequest) -> None:
    """Check a launch, and print what it would run where."""
    from gpumix.cli.planning.dry_run import check_job_of_hosts
    from gpumix.launch.hosts import LOCALHOST, Host, HostRanks
    from gpumix.launch.launcher import count_local_processes, prepare_hosts

    program = asked.program
    if not asked.hosts and program.kind == "job":
        more = () if "--dry-run" in program.arguments else ("--dry-run",)
        _become_train(replace(asked, program=program.with_arguments(*more)))
        return
    start = None
    if program.kind == "job":
        start = check_job_of_hosts(Path(program.name), program.overrides(), asked.cluster)
    elif program.kind == "module" and not asked.hosts:
        _require_module(program.name)
    if asked.hosts:
        places, meeting = prepare_hosts(asked)
    else:
        places = (HostRanks(Host(LOCALHOST), 0, count_local_processes(asked)),)
        meeting = None
    print_result(
        lambda: {
            "dry_run": True,
            "command": [asked.around.python, *program.words],
            "hosts": [
                {"host": p.host.name, "first_rank": p.first, "processes": p.processes}
                for p in places
            ],
            "job": start and start.as_dict(),
        },
        lambda: _render_launch(asked, places, meeting, start),
        asked.as_json,
    )


def _require_module(name: str) -> None:
    """Raise InputError if Python finds no module here; of a dotted name, no package."""
    from importlib.machinery import PathFinder

    if PathFinder.find_spec(name.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise InputError(
            f"there is no module '{name}'",
            code="module-missing",
            where="-m",
            fix="correct the name, or install its package into this environment",
        )


def _render_launch(
    asked: LaunchRequest,
    places: Sequence[HostRanks],
    meeting: RendezvousAddress | None,
    start: ForeseenStart | None,
) -> RenderableType:
    from rich.console import Group

    from gpumix.cli.planning.dry_run import render_start
    from gpumix.train.console.text_page import iterate_labelled, join_lines

    lines = [("Ready.", "bold")]
    words = shlex.join([asked.around.python, *asked.program.words])
    lines += iterate_labelled("Would run", words)
    lines += [
        line
        for place in places
        for line in iterate_labelled("", f"{place.ranks} on {place.host.name}")
    ]
    if meeting is not None:
        lines += iterate_labelled("Meet at", f"{meeting.address}:{meeting.port}")
    if start is None:
        lines.append(("Dry run: nothing was started or written.", "bold"))
        return join_lines(lines)
    lines += [("", "")]
    return Group(join_lines(lines), render_start(start))


def _run_program(asked: LaunchRequest) -> None:
    from gpumix.launch.launcher import launch_locally, launch_on_hosts

    if not asked.hosts and asked.program.kind == "job":
        _become_train(asked)
        return
    done = launch_on_hosts(asked) if asked.hosts else launch_locally(asked)
    if done.said:
        sys.stderr.write(f"{done.said}\n")
    if asked.as_json:
        print_json(done.value)
    if done.code:
        raise typer.Exit(done.code)


def _become_train(asked: LaunchRequest) -> None:
    """Become `gpumix train`, which starts the ranks of one host itself."""
    from gpumix.hardware.host.environment import exec_python, use_settings

    use_settings(asked.around.settings)
    program = asked.program.with_arguments("--json") if asked.as_json else asked.program
    exec_python(program.words)
