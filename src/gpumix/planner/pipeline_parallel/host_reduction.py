"""Large clusters as copies of smaller ones: stages are searched on one, and then built of all.

Hosts with the same devices are alike. Of each kind every n-th host is kept, with an n-th of the
batch. A plan for these devices is one for all: each worker becomes n workers, with as many samples
each, of which each stores an n-th of the share. Only collectives change, over n times as many
ranks, so the plan is predicted anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile

MOST_DEVICES = 128  # up to this many, all are searched


@dataclass(frozen=True)
class Reduction:
    """A smaller request, and by kept device the devices it stands for, itself first.

    Attributes:
        whole: the request of all devices.
        devices: all, in rank order.
    """

    whole: PlanRequest
    request: PlanRequest
    devices: tuple[Device, ...]
    copies: dict[str, tuple[Device, ...]]

    def expand(self, plan: Plan) -> Plan:
        """Return the plan for all devices, without a prediction."""
        stages = tuple(map(self._expand_stage, plan.stages))
        used = {worker.device for stage in stages for worker in stage.workers}
        ranks = tuple(device.id for device in self.devices if device.id in used)
        update = {"stages": stages, "global_batch": self.whole.global_batch, "prediction": None}
        return plan.model_copy(update=update | ({"ranks": ranks} if plan.ranks else {}))

    def _expand_stage(self, stage: Stage) -> Stage:
        workers = tuple(
            worker for tp_group in stage.tp_groups for worker in self._expand_group(tuple(tp_group))
        )
        return stage.model_copy(update={"workers": workers})

    def _expand_group(self, tp_group: tuple[Worker, ...]) -> Iterator[Worker]:
        number = len(self.copies[tp_group[0].device])
        for copy in range(number):
            for worker in tp_group:
                device = self.copies[worker.device][copy]
                share = worker.state_share / number
                yield worker.model_copy(
                    update={"device": device.id, "host": device.host, "state_share": share}
                )


def reduce_hosts(profile: Profile, request: PlanRequest) -> Reduction | None:
    """Return a request for fewer hosts; None for few devices, if hosts of a rack are nearer to each
    other, or if hosts of a kind and the batch have no common divisor."""
    devices = list_devices_by_rank(profile, request)
    if len(devices) <= MOST_DEVICES or any(device.rack for device in devices):
        return None
    on_host: dict[str, list[Device]] = {}
    for device in devices:
        on_host.setdefault(device.host, []).append(device)
    kinds: dict[object, list[list[Device]]] = {}
    for of_host in on_host.values():
        kind = tuple((device.device_class, device.island) for device in of_host)
        kinds.setdefault(kind, []).append(of_host)
    common = gcd(request.global_batch, *map(len, kinds.values()))
    wanted = -(-len(devices) // MOST_DEVICES)
    divisors = [n for n in range(2, common + 1) if common % n == 0]
    if not divisors:
        return None
    number = next((n for n in divisors if n >= wanted), divisors[-1])
    copies = {
        alike[0].id: alike
        for hosts in kinds.values()
        for begin in range(0, len(hosts), number)
        for alike in zip(*hosts[begin : begin + number])
    }
    update = {"devices": tuple(copies), "global_batch": request.global_batch // number}
    return Reduction(request, request.model_copy(update=update), devices, copies)
