"""Concurrent probe of all hosts, before anything is started on any."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpumix.launch.commands import (
    LOST_EXIT_CODE,
    NO_FOLDER,
    LaunchEnvironment,
    Ssh,
    make_probe_line,
)
from gpumix.launch.hosts import Host
from gpumix.launch.probes import probe
from gpumix.launch.probes.readiness import ProbeFacts, raise_problems
from gpumix.schema.errors import GpumixError, MachineError
from gpumix.schema.files import read_text

PROBE_S = 60.0  # beyond the time to connect: imports from a slow disk
# Messages of ssh, and their fixes.
_SSH_FIXES = {
    "host key": "connect once by hand and look at its key: ssh {host}",
    "permission denied": "let your key in there, or load it: ssh-add, ssh-copy-id {host}",
    "could not resolve": "give its name or an alias in ~/.ssh/config",
}


def probe_hosts(
    hosts: Sequence[Host],
    ssh: Ssh,
    around: LaunchEnvironment,
    asked: Mapping[str, Mapping[str, object]],
) -> dict[str, ProbeFacts]:
    """Return the facts of each host, by name.

    Args:
        asked: questions to each host, by name; see `probe.py`.

    Raises:
        MachineError: a host does not answer, or lacks the folder or interpreter.
    """
    asking = [_start_probe(host, ssh, around, asked[host.name]) for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as threads, _kill_at_end(asking):
        answers = list(
            threads.map(lambda host, one: _answer(host, one, ssh, around), hosts, asking)
        )
    raise_problems([answer for answer in answers if isinstance(answer, GpumixError)])
    told = zip((host.name for host in hosts), answers)
    return {name: facts for name, facts in told if isinstance(facts, ProbeFacts)}


def gather_local_facts(files: Sequence[str]) -> ProbeFacts:
    """Return the facts of this process."""
    return ProbeFacts(**probe.gather_facts([*files]) | {"host": "here"})


def resolve_host_name(host: Host, ssh: Ssh) -> str:
    """Return a host's name or address by the user's ssh configuration."""
    try:
        done = subprocess.run(
            ssh.make_config_query(host), capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return host.name_without_user
    found = re.search(r"(?m)^hostname (\S+)$", done.stdout)
    return found[1] if found else host.name_without_user


def _start_probe(
    host: Host, ssh: Ssh, around: LaunchEnvironment, asked: Mapping[str, object]
) -> subprocess.Popen[str]:
    command = ssh.command(host, make_probe_line(host, around, asked))
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the asking process
        )
    except OSError as error:
        raise MachineError(
            f"{ssh.words[0]} cannot be run here",
            code="ssh-not-runnable",
            why=error.strerror or "",
            fix="install OpenSSH, or name it: --ssh PROGRAM",
        ) from error


@contextmanager
def _kill_at_end(asking: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill the probes at the end of the block: an interrupt waits for no answer."""
    try:
        yield
    finally:
        for process in asking:
            process.kill()


def _answer(
    host: Host, asking: subprocess.Popen[str], ssh: Ssh, around: LaunchEnvironment
) -> ProbeFacts | GpumixError:
    limit_s = ssh.timeout_s + PROBE_S
    try:
        out, said = asking.communicate(read_text(Path(probe.__file__)), limit_s)
    except subprocess.TimeoutExpired:
        return MachineError(
            f"it did not answer within {limit_s:.0f} s",
            code="host-timeout",
            where=f"host {host.name}",
        )
    answers = [line for line in out.splitlines() if line.startswith(probe.FACTS_PREFIX)]
    if answers:
        return ProbeFacts(**json.loads(answers[-1].removeprefix(probe.FACTS_PREFIX)))
    return _explain_silence(host, around, asking.returncode, said.strip())


def _explain_silence(host: Host, around: LaunchEnvironment, code: int, said: str) -> MachineError:
    """Return the error explaining a missing answer of a host."""
    where, last = f"host {host.name}", (said.splitlines() or [""])[-1]
    if code == LOST_EXIT_CODE:
        fixes = [fix for words, fix in _SSH_FIXES.items() if words in said.lower()]
        fix = fixes[0] if fixes else "see whether it is up: ssh {host}; --timeout waits longer"
        return MachineError(
            "it does not answer",
            code="host-not-answering",
            where=where,
            why=last,
            fix=fix.format(host=host.name),
        )
    if code == NO_FOLDER:
        return MachineError(
            f"it has no folder {around.folder}",
            code="folder-not-on-host",
            where=where,
            fix="start in a folder that all hosts have, or name one: --folder",
        )
    python = around.python_on(host)
    if code in (126, 127):
        return MachineError(
            f"it has no Python at {python}",
            code="python-not-on-host",
            where=where,
            fix=f"name its interpreter: --python {host.name}=/path/to/python",
        )
    return MachineError(
        f"{python} did not say what it is",
        code="python-probe-failed",
        where=where,
        why=last or f"exit code {code}",
    )
