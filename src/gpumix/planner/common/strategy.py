"""Strategies: functions from a profile and a request to a plan.

Every device taking part appears in the plan, in rank order: by host, by ordinal, by id. The order
of devices in a cluster file never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from gpumix.cost.predict import predict
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import PLAIN, Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import LARGEST_BATCH
from gpumix.schema.value import Value


class PlanRequest(Value):
    """A planning request: a global batch over `devices` (ids; all of the cluster if empty), with
    the techniques of `space`. Without `bounds`, rows of stages are not bounded one by one: the plan
    is the same, found sooner, and its bound is lower."""

    global_batch: int = Field(
        gt=0, le=LARGEST_BATCH, description="samples per step over all devices"
    )
    devices: tuple[str, ...] = ()
    space: Space = EVERYTHING
    bounds: bool = True


MIN_GAIN_FRACTION = 1e-3  # gain that more stages or tensor-parallel groups must bring

Strategy = Callable[[Profile, PlanRequest], Plan]


@dataclass(frozen=True)
class DevicePart:
    """The work and state of one device."""

    samples: int
    micro_batch: int
    share: float
    mode: Mode = PLAIN


def select_by_devices(limits: Sequence[tuple[float, float]], devices: int) -> float:
    """Return the value of the first of (most devices, value) that holds for `devices`."""
    return next(value for most, value in limits if devices <= most)


def list_devices_by_rank(profile: Profile, request: PlanRequest) -> tuple[Device, ...]:
    """Return the devices of the request in rank order.

    Raises:
        InputError: a device is not in the cluster.
    """
    known = {d.id: d for d in profile.cluster.devices}
    wanted = set(request.devices) or set(known)
    unknown = sorted(wanted - set(known))
    if unknown:
        raise InputError(
            f"device '{unknown[0]}' is not in the profile's cluster",
            code="device-not-in-profile",
            why=f"its devices are {', '.join(sorted(known))}",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`",
        )
    return tuple(d for d in profile.cluster.in_rank_order() if d.id in wanted)


def build_plan(
    setting: ShardingSetting,
    *,
    strategy: str,
    global_batch: int,
    parts: Mapping[str, DevicePart],
    bound_s: float | None = None,
) -> Plan:
    """Build the plan giving each device (by id) its part, with the cost model's prediction."""
    profile = setting.profile
    workers = tuple(
        Worker.model_construct(  # unvalidated: workers may be very many
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=parts[device.id].samples,
            micro_batch=parts[device.id].micro_batch,
            state_share=parts[device.id].share,
            mode=parts[device.id].mode,
            state_on=setting.state_on(device.device_class),
            compile=profile.of_class(device.device_class).compiled,
            compute_dtype=profile.of_class(device.device_class).compute_dtype,
            efficiency=profile.of_class(device.device_class).efficiency,
        )
        for device in setting.devices
    )
    plan = Plan(
        strategy=strategy,
        model=profile.model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=global_batch,
        communication_dtype=setting.fleet.communication_dtype,
        stages=(_build_stage(setting, workers),),
        zero_stage=setting.zero_stage,
        sharding=setting.sharding,
        optimizer_state=profile.optimizer_state,
        parameters_on=setting.parameters_on,
        collectives=setting.collectives,
        emulated=any(profile.cluster.class_named(name).emulated for name in setting.classes),
        estimated=tuple(name for name in setting.classes if profile.of_class(name).estimated),
    )
    return attach_bound(plan.model_copy(update={"prediction": predict(profile, plan)}), bound_s)


def _build_stage(setting: ShardingSetting, workers: tuple[Worker, ...]) -> Stage:
    model, joining = setting.profile.model, setting.joining
    return Stage(
        units=model.calls,
        workers=workers,
        joined=joining.joined,
        before=model.root.before.names if joining.before else (),
        after=model.root.after.names if joining.after else (),
    )


def get_prediction(plan: Plan) -> Prediction:
    """Return the prediction that `build_plan` gave the plan."""
    assert plan.prediction is not None
    return plan.prediction


def compute_time_to_beat(plan: Plan) -> float:
    """Return the seconds that a plan needing more stages or tensor-parallel groups
    must beat."""
    return get_prediction(plan).step_s * (1.0 - MIN_GAIN_FRACTION)


def attach_bound(plan: Plan, bound_s: float | None) -> Plan:
    """Attach the proven lower bound of all plans, in seconds, at most the plan's own step time."""
    expected = get_prediction(plan)
    if bound_s is not None:
        bound_s = min(bound_s, expected.step_s)
    return plan.model_copy(update={"prediction": expected.model_copy(update={"bound_s": bound_s})})


def is_within_memory(workers: Iterable[WorkerPrediction]) -> bool:
    """Return True if each worker's peak is within the worker's memory limit."""
    return all(worker.peak_bytes <= worker.memory_limit_bytes for worker in workers)


def restore_device_classes(cluster: Cluster, plan: Plan) -> Plan:
    """Return the plan with device classes taken from a cluster."""
    own = {device.id: device.device_class for device in cluster.devices}
    stages = tuple(
        stage.model_copy(
            update={
                "workers": tuple(
                    worker.model_copy(update={"device_class": own[worker.device]})
                    for worker in stage.workers
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})
