"""Runner of work on all devices of a cluster, in own processes."""

from __future__ import annotations

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import GpumixError, InputError
from gpumix.train.elastic.recovery import Lessons
from gpumix.train.processes.local_launcher import StopTime, launch, warm_up
from gpumix.train.run_log.summary import Summary


class Runner(ABC):
    """Runner of work on every rank. Its own methods are those of a process that starts all ranks.

    `speaks`: this process prints for people; under torchrun only one does. `decides_alone`: no
    other process must reach the same decision, from files that may differ between hosts.
    """

    speaks = True
    decides_alone = True

    @abstractmethod
    def cluster(self, wanted: Cluster | None) -> Cluster:
        """Return the wanted devices, or the devices found."""

    @abstractmethod
    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        """Return the device of each rank."""

    def warm_up(self) -> None:  # noqa: B027
        """Prepare to run work soon."""

    def started_again(self, output: Path, newest: Callable[[], int]) -> Lessons | None:
        """Return the lessons of an earlier start with this output, continued here; None for a new
        run. `newest` returns the last step with a state to resume from."""
        return None

    def take_part(self, cluster: Cluster, without: Collection[str]) -> bool:
        """Leave out the devices `without`, by id; return True if this process takes part. A process
        left out waits for its `outcome`."""
        return True

    def outcome(self) -> Summary:
        """Return the result of the processes taking part."""
        raise AssertionError("every process that starts ranks takes part")

    def tell_outcome(self, summary: Summary) -> None:  # noqa: B027
        """Send the result to processes left out."""

    def begins(self, output: Path, lessons: Lessons | None) -> None:  # noqa: B027
        """Claim the output for this run; called by the process in charge of output."""

    def restarts_after(self, error: GpumixError) -> bool:
        """Return True if failed ranks can be run again from here."""
        return True

    def learns(self, output: Path, lessons: Lessons) -> None:  # noqa: B027
        """Record lessons before this process ends by an error, for the processes restarting the
        run."""

    def starts_again(self, output: Path, lessons: Lessons) -> None:  # noqa: B027
        """Announce a restart of all ranks. A process that is a rank restarts without returning."""

    @abstractmethod
    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        """Run `work(seat, *args)` on every rank; return the result, equal on all ranks.

        Args:
            saves: the work answers Ctrl-C itself, by saving; other work is ended by it.
        """


@dataclass
class LocalRunner(Runner):
    """Runner with a process per device on this host."""

    debug: bool = False
    imports: tuple[str, ...] = ()
    silence_s: float = math.inf
    restarts: bool = False
    _stop: StopTime = field(default_factory=StopTime)

    def cluster(self, wanted: Cluster | None) -> Cluster:
        return wanted or discover_cluster()

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        here = {socket.gethostname(), "localhost"}
        elsewhere = sorted({d.host for d in cluster.devices} - here)
        if elsewhere and not cluster.emulated:
            raise InputError(
                f"the cluster has devices on another host: {', '.join(elsewhere)}",
                code="devices-on-other-hosts",
                fix="start one process per device on every host: torchrun --nnodes N "
                "--nproc-per-node GPUS --rdzv-backend gpumix --rdzv-endpoint HOST:PORT -m gpumix "
                "train JOB.yaml, and check JOB.yaml before",
            )
        return cluster.in_rank_order()

    def warm_up(self) -> None:
        warm_up(self.imports)

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
