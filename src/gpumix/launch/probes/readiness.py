"""Readiness of hosts for a launch, by the facts of probes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from gpumix.launch.commands import RendezvousAddress
from gpumix.schema.errors import GpumixError, InputError, MachineError

PYTHONS = ((3, 11), (3, 14))  # from, up to and excluding; as in pyproject.toml


@dataclass(frozen=True)
class ProbeFacts:
    """Facts reported by the probe on a host; see `probe.py`."""

    host: str
    python: str
    gpumix: str | None
    digest: str | None
    torch: str | None
    libraries: Mapping[str, str | None]
    devices: int | str
    files: Mapping[str, str | None]
    listening: Mapping[str, Any] | None

    @property
    def torch_version(self) -> str:
        """torch's version without the build, which differs between GPU types."""
        return (self.torch or "").partition("+")[0]


def refuse_unready(
    found: Mapping[str, ProbeFacts], here: ProbeFacts, *, counted: Sequence[str]
) -> None:
    """Raise an error on unready hosts, by name; `here` has the facts of the launching host.

    Args:
        counted: hosts whose number of processes is not given.

    Raises:
        GpumixError: a host cannot run the program, or hosts do not match.
    """
    problems: list[GpumixError] = []
    for name, facts in found.items():
        if (problem := _find_host_problem(name, facts, here, counted)) is not None:
            problems.append(problem)
    raise_problems(problems or _find_differences(found))


def raise_problems(problems: Sequence[GpumixError]) -> None:
    """Raise the first of the problems, mentioning the rest."""
    if not problems:
        return
    first, *others = problems
    also = [f"and {other.where}: {other.what}" for other in others]
    why = "\n       ".join(filter(None, [first.why, *also]))
    raise type(first)(first.what, code=first.code, where=first.where, why=why, fix=first.fix)


def _find_host_problem(
    name: str, facts: ProbeFacts, here: ProbeFacts, counted: Sequence[str]
) -> GpumixError | None:
    major, minor = (int(part) for part in facts.python.split(".")[:2])
    if not PYTHONS[0] <= (major, minor) < PYTHONS[1]:
        return MachineError(
            f"its Python is {facts.python}, gpumix needs 3.11 to 3.13",
            code="python-unsupported",
            where=f"host {name}",
            fix=f"name another: --python {name}=/path/to/python",
        )
    for package in ("gpumix", "torch"):
        if getattr(facts, package) is None:
            return MachineError(
                f"its Python has no {package}",
                code="package-missing",
                where=f"host {name}",
                fix=f"install it there, or name another interpreter: --python {name}=/path/to/"
                "python",
            )
    if facts.gpumix != here.gpumix or facts.digest != here.digest:
        what = f"its gpumix is {facts.gpumix}, here it is {here.gpumix}"
        if facts.gpumix == here.gpumix:
            what = f"its gpumix is {facts.gpumix} as here, but with other code"
        return MachineError(
            what, code="gpumix-differs", where=f"host {name}", fix="install the same on all hosts"
        )
    return _find_file_problem(name, facts, here) or _find_device_problem(name, facts, counted)


def _find_file_problem(name: str, facts: ProbeFacts, here: ProbeFacts) -> GpumixError | None:
    for file, digest in facts.files.items():
        if digest is None or digest != here.files[file]:
            what = "is not there" if digest is None else "differs from the one here"
            return InputError(
                f"{file} {what}",
                code="file-not-on-host",
                where=f"host {name}",
                fix="copy it there (rsync -a), or work in a folder that all hosts share",
            )
    return None


def _find_device_problem(
    name: str, facts: ProbeFacts, counted: Sequence[str]
) -> GpumixError | None:
    if name in counted and isinstance(facts.devices, str):
        return MachineError(
            "its devices cannot be counted",
            code="devices-not-counted",
            where=f"host {name}",
            why=facts.devices,
            fix=f"say how many processes it runs: --hosts {name}:4",
        )
    return None


def _find_differences(found: Mapping[str, ProbeFacts]) -> list[GpumixError]:
    """Return errors on versions differing from the first host's: a library missing on either is not
    used."""
    (first, reference), *others = found.items()
    return [
        MachineError(
            f"{package} is {here} on {first} and {there} on {name}",
            code="package-versions-differ",
            where=f"hosts {first} and {name}",
            fix="install the same version on both, or name interpreters that have it: "
            f"--python {name}=/path/to/python",
        )
        for name, facts in others
        for package, here, there in [
            ("torch", reference.torch_version, facts.torch_version),
            *((p, v, facts.libraries.get(p)) for p, v in reference.libraries.items()),
        ]
        if here and there and here != there
    ]


def check_rendezvous(
    address: str, facts: ProbeFacts, *, host: str, alone: bool
) -> RendezvousAddress:
    """Return the address of the ranks' rendezvous on the first host.

    Args:
        alone: no other host has to reach it.

    Raises:
        MachineError: it cannot listen there, or is not reachable by others.
    """
    told = facts.listening or {"error": "it was not asked"}
    if "error" in told:
        raise MachineError(
            f"it cannot listen at {address}",
            code="address-not-listening",
            where=f"host {host}",
            why=str(told["error"]),
            fix="name another port (--port), or an address of it that the others reach (--address)",
        )
    if (
        ip_address(told["ip"]).is_loopback
        and not alone
        and address not in ("localhost", told["ip"])
    ):
        raise MachineError(
            f"it calls itself {address}, which is {told['ip']} there: others do not reach that",
            code="address-not-reachable",
            where=f"host {host}",
            fix="name an address of it that they reach (--address), or mend its /etc/hosts",
        )
    return RendezvousAddress(address, int(told["port"]))
