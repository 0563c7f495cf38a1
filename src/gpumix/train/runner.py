"""Runs work on all devices of a cluster: in processes of our own, or as a part of torchrun's."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpumix.hardware.discover import discover
from gpumix.hardware.environment import TorchrunPlace, torchrun_place
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.errors import InputError
from gpumix.train.launch import Seat, launch, warm_up


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

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        """The result of `work(seat, *args)` on every rank, which must be the same on all.

        Args:
            saves: the work answers Ctrl-C itself, by saving; other work is ended by it.
        """
        ...


def runner(*, debug: bool = False, imports: tuple[str, ...] = ()) -> Runner:
    """The one for this process.

    Args:
        imports: what all ranks will import, so that it may be done once.
    """
    place = torchrun_place()
    return LocalRunner(debug, imports) if place is None else TorchrunRunner(place)


@dataclass
class LocalRunner:
    """Starts one process per device on this host."""

    debug: bool = False
    imports: tuple[str, ...] = ()
    speaks: bool = True
    decides_alone: bool = True

    def cluster(self, wanted: Cluster | None) -> Cluster:
        return wanted or discover()

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        here = {socket.gethostname(), "localhost"}
        elsewhere = sorted({d.host for d in cluster.devices} - here)
        if elsewhere and not cluster.emulated:
            raise InputError(
                f"the cluster has devices on another host: {', '.join(elsewhere)}",
                fix="start one process per device on every host: torchrun --nnodes N "
                "--nproc-per-node GPUS ... -m gpumix train JOB.yaml, and check JOB.yaml before",
            )
        return cluster.in_rank_order()

    def warm_up(self) -> None:
        warm_up(self.imports)

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        devices = self.devices(cluster)
        return launch(work, devices, *args, debug=self.debug, saves_when_stopped=saves)[0]


class TorchrunRunner:
    """This process is one rank of a run that torchrun started."""

    decides_alone = False

    def __init__(self, place: TorchrunPlace) -> None:
        self.speaks = place.rank == 0
        self._place = place
        self._runs = 0
        self._met: tuple[Device, ...] = ()

    def cluster(self, wanted: Cluster | None) -> Cluster:
        found = wanted or self._meet()
        if len(found.devices) != self._place.world:
            raise InputError(
                f"the cluster has {len(found.devices)} devices, torchrun started "
                f"{self._place.world} processes",
                fix="start one process per device",
            )
        return found

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        return self._met or cluster.in_rank_order()

    def warm_up(self) -> None:
        return

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        self._runs += 1
        device = self.devices(cluster)[self._place.rank]
        return work(replace(seat_in(self._place, device), run=f"run{self._runs}"), *args)

    def _meet(self) -> Cluster:
        """Every rank tells what it finds; together that is the cluster, in the order of ranks."""
        from gpumix.train.context import meet_devices

        device, device_class = own_device(self._place)
        cluster, self._met = meet_devices(seat_in(self._place, device), device_class)
        return cluster


def seat_in(place: TorchrunPlace, device: Device) -> Seat:
    """The seat of the process that torchrun gave this place."""
    return Seat(
        rank=place.rank,
        world=place.world,
        device=device,
        port=place.master_port,
        host=place.master_address,
        holds_store=not place.agent_has_store and place.rank == 0,
    )


def own_device(place: TorchrunPlace) -> tuple[Device, DeviceClass]:
    """Of what is found on this host, the device of the process that torchrun gave this place.

    Raises:
        InputError: there are more processes than devices.
    """
    mine = discover()
    if place.local_rank >= len(mine.devices):
        raise InputError(
            f"process {place.local_rank} of this host has no device of its own",
            where=socket.gethostname(),
            why=f"the host has {len(mine.devices)}",
            fix="give torchrun at most as many --nproc-per-node as the host has devices",
        )
    device = mine.devices[place.local_rank]
    return device, mine.class_named(device.device_class)
