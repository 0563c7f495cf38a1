"""Runs work on all devices of a cluster: in processes of our own, or as a part of torchrun's."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpumix.hardware.discover import discover
from gpumix.hardware.environment import refuse_part_of_a_place, torchrun_place
from gpumix.spec.cluster import Cluster, Device
from gpumix.spec.errors import GpumixError, InputError
from gpumix.train.launch import Asked, launch, warm_up
from gpumix.train.outcome import Summary
from gpumix.train.recovery import Lessons
from gpumix.train.torchrun import TorchrunRunner


class Runner(Protocol):
    """Runs work on every rank.

    `speaks`: whether this process shows things; under torchrun only one does. `decides_alone`: no
    other process has to come to the same decision, from files that may differ from host to host.
    """

    speaks: bool
    decides_alone: bool

    def cluster(self, wanted: Cluster | None) -> Cluster:
        """The devices: those that are wanted, or those that are found."""
        ...

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        """The device of each rank."""
        ...

    def warm_up(self) -> None:
        """Something will run soon."""
        ...

    def started_again(self, output: Path, newest: Callable[[], int]) -> Lessons | None:
        """Of a run that was under way before, with this output, and goes on here; else None.
        `newest` tells after which step there is a state to go on from."""
        ...

    def take_part(self, cluster: Cluster, without: Collection[str]) -> bool:
        """Of all devices of the cluster these, by id, take no part in the run; whether this process
        does. One that does not waits for its `outcome`."""
        ...

    def outcome(self) -> Summary:
        """What those that take part come to."""
        ...

    def tell_outcome(self, summary: Summary) -> None:
        """To processes that take no part."""
        ...

    def begins(self, output: Path, lessons: Lessons | None) -> None:
        """The output is this run's from now on; for the process that speaks."""
        ...

    def restarts_after(self, error: GpumixError) -> bool:
        """Whether ranks that failed so can be run again from here."""
        ...

    def learns(self, output: Path, lessons: Lessons) -> None:
        """Before this process ends by an error, for those who start the run again."""
        ...

    def starts_again(self, output: Path, lessons: Lessons) -> None:
        """Ranks will be run again. Where this process is one of them it begins anew, and this does
        not return."""
        ...

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        """The result of `work(seat, *args)` on every rank, which must be the same on all.

        Args:
            saves: the work answers Ctrl-C itself, by saving; other work is ended by it.
        """
        ...


def runner(
    *,
    debug: bool = False,
    imports: tuple[str, ...] = (),
    silence_s: float = math.inf,
    restarts: bool = False,
) -> Runner:
    """The one for this process.

    Args:
        imports: what all ranks will import, so that it may be done once.
        silence_s: a rank of which nothing is heard for so long is lost.
        restarts: ranks that are lost while they train are started again.

    Raises:
        InputError: it is one of several, and cannot find the others.
    """
    place = torchrun_place()
    if place is not None:
        return TorchrunRunner(place, silence_s)
    refuse_part_of_a_place()
    return LocalRunner(debug, imports, silence_s, restarts)


@dataclass
class LocalRunner:
    """Starts one process per device on this host."""

    debug: bool = False
    imports: tuple[str, ...] = ()
    silence_s: float = math.inf
    restarts: bool = False
    speaks: bool = True
    decides_alone: bool = True
    _stop: Asked = field(default_factory=Asked)

    def cluster(self, wanted: Cluster | None) -> Cluster:
        return wanted or discover()

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
