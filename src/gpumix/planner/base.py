"""What a strategy is: a function from a profile and a request to a plan.

Every device that is asked for appears in the plan, in rank order: by host, by ordinal, by id. So
the order in which a cluster lists its devices never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import Field

from gpumix.cost.memory import MemoryModel
from gpumix.cost.network import Links, links_for
from gpumix.cost.predict import check_class, predict
from gpumix.spec.base import Value
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Prediction, Stage, Worker
from gpumix.spec.profile import Profile


class PlanRequest(Value):
    """What is to be planned: a global batch over `devices` (ids; all of the cluster if empty)."""

    global_batch: int = Field(gt=0, description="samples per step over all devices")
    devices: tuple[str, ...] = ()


Strategy = Callable[[Profile, PlanRequest], Plan]


@dataclass(frozen=True)
class Part:
    """What one device is given."""

    samples: int
    micro_batch: int
    share: float


@dataclass(frozen=True)
class Setting:
    """A profile over chosen devices: what all searches begin with.

    With `equal_shares` every device stores as much, and native collectives serve where they can.
    """

    profile: Profile
    devices: tuple[Device, ...]
    equal_shares: bool
    links: Links
    memory: MemoryModel

    @classmethod
    def of(cls, profile: Profile, devices: tuple[Device, ...], *, equal_shares: bool) -> Setting:
        ranks = len(devices)
        # All unequal shares cost the same: those of one owner stand for them.
        shares = (1.0 / ranks,) * ranks if equal_shares else (1.0, *(0.0,) * (ranks - 1))
        links = links_for(profile, profile.collectives, shares)
        return cls(profile, devices, equal_shares, links, MemoryModel(profile, links, ranks))

    @property
    def classes(self) -> dict[str, tuple[Device, ...]]:
        """The devices of each class by id, the classes by name."""
        names = sorted({d.device_class for d in self.devices})
        ordered = sorted(self.devices, key=lambda d: d.id)
        return {name: tuple(d for d in ordered if d.device_class == name) for name in names}

    def largest_micro_batch(self, name: str, samples: int) -> int:
        """The largest micro-batch that class `name` may run of so many samples."""
        limit = self.profile.of_class(name).largest_micro_batch
        return samples if limit is None else min(samples, limit)


def ranked_devices(profile: Profile, request: PlanRequest) -> tuple[Device, ...]:
    """The devices of the request in rank order.

    Raises:
        InputError: a device is not in the cluster, or its class was not measured.
    """
    known = {d.id: d for d in profile.cluster.devices}
    wanted = set(request.devices) or set(known)
    unknown = sorted(wanted - set(known))
    if unknown:
        raise InputError(
            f"device '{unknown[0]}' is not in the profile's cluster",
            why=f"it holds {', '.join(sorted(known))}",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`",
        )
    for name in sorted({known[id_].device_class for id_ in wanted}):
        check_class(profile, name)
    return tuple(d for d in profile.cluster.in_rank_order() if d.id in wanted)


def assemble(
    setting: Setting, *, strategy: str, global_batch: int, parts: Mapping[str, Part]
) -> Plan:
    """The plan that gives each device (by id) its part, with what the cost model expects of it."""
    profile = setting.profile
    workers = tuple(
        Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=parts[device.id].samples,
            micro_batch=parts[device.id].micro_batch,
            state_share=parts[device.id].share,
        )
        for device in setting.devices
    )
    plan = Plan(
        strategy=strategy,
        model=profile.model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=global_batch,
        compute_dtype=profile.compute_dtype,
        stages=(Stage(units=profile.model.calls, workers=workers),),
        collectives=profile.collectives,
        emulated=any(profile.cluster.class_named(name).emulated for name in setting.classes),
    )
    return plan.model_copy(update={"prediction": predict(profile, plan)})


def predicted(plan: Plan) -> Prediction:
    """The prediction that `assemble` gave the plan."""
    assert plan.prediction is not None
    return plan.prediction
