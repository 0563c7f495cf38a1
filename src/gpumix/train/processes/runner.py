"""Runners of work on all devices of a cluster: in own processes, or as a part of torchrun's."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.hardware.host.environment import check_rendezvous_variables, torchrun_place
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import GpumixError, InputError
from gpumix.train.elastic.recovery import Lessons
from gpumix.train.processes.local_launcher import StopTime, launch, warm_up
from gpumix.train.processes.torchrun_runner import TorchrunRunner
from gpumix.train.run_log.summary import Summary


class Runner(Protocol):
    """Runner of work on every rank.

    `speaks`: this process prints for people; under torchrun only one does. `decides_alone`: no
    other process must reach the same decision, from files that may differ between hosts.
    """

    speaks: bool
    decides_alone: bool

    def cluster(self, wanted: Cluster | None) -> Cluster:
        """Return the wanted devices, or the devices found."""
        ...

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        """Return the device of each rank."""
        ...

    def warm_up(self) -> None:
        """Prepare to run work soon."""
        ...

    def started_again(self, output: Path, newest: Callable[[], int]) -> Lessons | None:
        """Return the lessons of an earlier start with this output, continued here; None for a new
        run. `newest` returns the last step with a state to resume from."""
        ...

    def take_part(self, cluster: Cluster, without: Collection[str]) -> bool:
        """Leave out the devices `without`, by id; return True if this process takes part. A process
        left out waits for its `outcome`."""
        ...

    def outcome(self) -> Summary:
        """Return the result of the processes taking part."""
        ...

    def tell_outcome(self, summary: Summary) -> None:
        """Send the result to processes left out."""
        ...

    def begins(self, output: Path, lessons: Lessons | None) -> None:
        """Claim the output for this run; called by the process in charge of output."""
        ...

    def restarts_after(self, error: GpumixError) -> bool:
        """Return True if failed ranks can be run again from here."""
        ...

    def learns(self, output: Path, lessons: Lessons) -> None:
        """Record lessons before this process ends by an error, for the processes restarting the
        run."""
        ...

    def starts_again(self, output: Path, lessons: Lessons) -> None:
        """Announce a restart of all ranks. A process that is a rank restarts without returning."""
        ...

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        """Run `work(seat, *args)` on every rank; return the result, equal on all ranks.

        Args:
            saves: the work answers Ctrl-C itself, by saving; other work is ended by it.
        """
        ...


def make_runner(
    *,
    debug: bool = False,
    imports: tuple[str, ...] = (),
    silence_s: float = math.inf,
    restarts: bool = False,
) -> Runner:
    """Return the runner for this process.

    Args:
        imports: modules imported by all ranks, maybe once for all.
        silence_s: a rank silent for this long is lost.
        restarts: ranks lost in training are started again.

    Raises:
        InputError: this process is one of several, and cannot find the others.
    """
    place = torchrun_place()
    if place is not None:
        return TorchrunRunner(place, silence_s)
    check_rendezvous_variables()
    return LocalRunner(debug, imports, silence_s, restarts)


@dataclass
class LocalRunner:
    """Runner with a process per device on this host."""

    debug: bool = False
    imports: tuple[str, ...] = ()
    silence_s: float = math.inf
    restarts: bool = False
    speaks: bool = True
    decides_alone: bool = True
    _stop: StopTime = field(default_factory=StopTime)

    def cluster(self, wanted: Cluster | None) -> Cluster:
        return wanted or discover_cluster()

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        here = {socket.gethostname(), "localhost"}
        elsewhere = sorted({d.host for d in cluster.devices} - here)
        if elsewhere and not cluster.emulated:
            raise InputError(
                f"the cluster has devices on another host: {', '.join(elsewhere)}",
                fix="start one process per device on every host: torchrun --nnodes N "
                "--nproc-per-node GPUS --rdzv-backend gpumix --rdzv-endpoint HOST:PORT -m gpumix "
                "train JOB.yaml, and check JOB.yaml before",
            )
        return cluster.in_rank_order()

    def warm_up(self) -> None:
        warm_up(self.imports)

    def started_again(self, output: Path, newest: Callable[[], int]) -> Lessons | None:
        return None

    def take_part(self, cluster: Cluster, without: Collection[str]) -> bool:
        return True

    def outcome(self) -> Summary:
        raise AssertionError("every process that starts ranks takes part")

    def tell_outcome(self, summary: Summary) -> None:
        return

    def begins(self, output: Path, lessons: Lessons | None) -> None:
        return

    def restarts_after(self, error: GpumixError) -> bool:
        return True

    def learns(self, output: Path, lessons: Lessons) -> None:
        return

    def starts_again(self, output: Path, lessons: Lessons) -> None:
        return

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        devices = self.devices(cluster)
        return launch(
            work,
            devices,
            *args,
            debug=self.debug,
            stop=self._stop if saves else None,
            silence_s=self.silence_s,
            spare=saves and self.restarts,
        )[0]
