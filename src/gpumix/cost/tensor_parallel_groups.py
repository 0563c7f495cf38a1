"""Tensor-parallel groups in the cost model: each group counts as one worker.

To each rank of a group the model is smaller: its parts of the divided modules. Its passes are
longer by the group's collectives, which nothing hides. So a plan with tensor-parallel groups is
predicted as the plan of their first workers ("leaders"), on a profile changed in this way; the
other ranks do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from gpumix.cost.identity import ByIdentity
from gpumix.cost.memory_layout.curves import interpolate_bytes
from gpumix.cost.mixed_degrees import MixedDegreeProfile, RankModelProfile, extract_undivided_model
from gpumix.cost.network.link_times import compute_tensor_parallel_s
from gpumix.cost.step_time import can_predict_mode
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.plan.stage import Mode, Stage, StageInput, Worker
from gpumix.schema.profile.profile import (
    ROOT,
    ClassProfile,
    Profile,
    TensorParallelCollective,
    TensorParallelProfile,
    TensorParallelTraffic,
    UnitTimes,
)

MATRIX_BYTES = 2  # per element of a matrix that an update exchanges, in bf16


def make_group_profile(
    profile: Profile, degree: int, *, sequence: bool = False, in_stages: bool = False
) -> Profile:
    """Return the profile of a rank in a tensor-parallel group of `degree` ranks, with sequence
    parallelism or without.

    Args:
        in_stages: for one of several stages; `compute_stage_end_seconds` then gives the collectives
            at entry and exit of full hidden states.

    Raises:
        InputError: no group of this kind was measured.
    """
    if degree == 1:
        return profile
    return _make_group_profile(ByIdentity(profile), degree, sequence=sequence, in_stages=in_stages)


@lru_cache(maxsize=64)  # a search asks for the same few groups, thousands of times
def _make_group_profile(
    of: ByIdentity[Profile], degree: int, *, sequence: bool, in_stages: bool
) -> Profile:
    profile = of.value
    tp_profile = get_tp_profile(profile, degree, sequence=sequence)
    cluster, network = profile.cluster, profile.network
    if len({device.host for device in cluster.devices}) > 1:
        # All ranks of groups share state with their peers at once, over the same links.
        network = tuple(
            one
            if one.group in ("inside", "island")
            else one.model_copy(update={"times": one.times.shared_by(degree)})
            for one in network
        )
        if cluster.network is not None:
            beside = cluster.network.between_slower(degree)
            cluster = cluster.model_copy(update={"network": beside})
    return profile.model_copy(
        update={
            "model": tp_profile.model,
            "other_models": tp_profile.other_models,
            "classes": tuple(
                _add_group_collectives(profile, tp_profile, of_class, ends=not in_stages)
                for of_class in tp_profile.classes
            ),
            "tp_profiles": (),
            "cluster": cluster,
            "network": network,
        }
    )


def make_stage_leaders(profile: Profile, stage: Stage, *, in_stages: bool = False) -> StageLeaders:
    """Return the leaders of a stage's tensor-parallel groups, and their profile; see
    `make_group_profile`.

    Raises:
        InputError: no group of this kind was measured.
    """
    if not stage.has_mixed_degrees:
        size = stage.get_tp_size(stage.workers[0])
        alone = make_group_profile(profile, size, sequence=stage.sequence, in_stages=in_stages)
        return StageLeaders(alone, stage.leaders)
    groups = {
        w.device: TensorParallelGroup(w.device_class, stage.get_tp_size(w)) for w in stage.leaders
    }
    found = make_leader_profile(profile, groups, sequence=stage.sequence, in_stages=in_stages)
    names = _names(groups.values())
    leaders = tuple(
        worker.model_copy(update={"device_class": names[groups[worker.device]], "parts": 1})
        for worker in stage.leaders
    )
    return StageLeaders(found, leaders)


def reduce_to_leaders(profile: Profile, plan: Plan) -> tuple[Profile, Plan]:
    """Return the profile and plan of leaders for a plan of one stage."""
    found, leaders = make_stage_leaders(profile, plan.stages[0])
    alone = plan.of_leaders
    stages = (alone.stages[0].model_copy(update={"workers": leaders}),)
    return found, alone.model_copy(update={"stages": stages})


class StageLeaders(NamedTuple):
    """Leaders with the class names used in a profile."""

    profile: Profile
    leaders: tuple[Worker, ...]


class TensorParallelGroup(NamedTuple):
    """Tensor-parallel group of `size` devices of a class."""

    device_class: str
    size: int


def make_leader_profile(
    profile: Profile,
    groups: Mapping[str, TensorParallelGroup],
    *,
    sequence: bool,
    in_stages: bool = False,
) -> Profile:
    """Return the profile of leaders, by the leaders' devices. If a class has groups of several
    sizes, each size becomes a class of its own."""
    kinds = sorted(set(groups.values()))
    of_size = {
        size: make_group_profile(profile, size, sequence=sequence and size > 1, in_stages=in_stages)
        for size in {kind.size for kind in kinds}
    }
    for kind in kinds:
        if all(one.device_class != kind.device_class for one in of_size[kind.size].classes):
            raise _not_measured(*kind)
    if len(of_size) == 1:
        return next(iter(of_size.values()))
    largest, least = max(of_size), min(of_size)
    names = _names(kinds)
    whole = extract_undivided_model(of_size[least].model, of_size[largest].model, (least, largest))
    models = {
        name: RankModelProfile.model_construct(
            **dict(of_size[kind.size].model_of(kind.device_class)),
            in_parts=kind.size < largest,
            undivided=whole,
            degree=largest,
        )
        for kind, name in names.items()
    }
    classes = tuple(
        of_size[kind.size].of_class(kind.device_class).model_copy(update={"device_class": name})
        for kind, name in names.items()
    )
    cluster = _with_classes(of_size[least].cluster, groups, names)
    more = {"classes": classes, "models": models, "cluster": cluster}
    return MixedDegreeProfile.model_construct(**dict(of_size[least]) | more)


def _names(kinds: Iterable[TensorParallelGroup]) -> dict[TensorParallelGroup, str]:
    """Name the classes of the groups' leaders."""
    every = sorted(set(kinds))
    sizes = Counter(kind.device_class for kind in every)
    return {
        kind: f"{kind.device_class}-in-{kind.size}"
        if sizes[kind.device_class] > 1
        else kind.device_class
        for kind in every
    }


def _with_classes(
    cluster: Cluster,
    groups: Mapping[str, TensorParallelGroup],
    names: Mapping[TensorParallelGroup, str],
) -> Cluster:
    """Return the cluster with the leaders' devices renamed to their classes."""
    new = {name: kind.device_class for kind, name in names.items() if name != kind.device_class}
    if not new:
        return cluster
    classes = [cluster.class_named(old).model_copy(update={"name": n}) for n, old in new.items()]
    devices = [
        device.model_copy(update={"device_class": names[groups[device.id]]})
        if device.id in groups
        else device
        for device in cluster.devices
    ]
    return cluster.model_copy(
        update={
            "classes": (*cluster.classes, *classes),
            "devices": tuple(devices),
            "network": cluster.network and cluster.network.as_of(new),
        }
    )


def refuse_unmeasured(
    profile: Profile, kind: TensorParallelGroup, mode: Mode, *, sequence: bool
) -> None:
    """Raise an InputError if groups were not measured in a mode."""
    tp_profile = get_tp_profile(profile, kind.size, sequence=sequence)
    if all(one.device_class != kind.device_class for one in tp_profile.classes):
        raise _not_measured(*kind)
    update = {
        "model": tp_profile.model,
        "other_models": tp_profile.other_models,
        "classes": tp_profile.classes,
    }
    if not can_predict_mode(profile.model_copy(update=update), kind.device_class, mode):
        raise InputError(
            f"the profile does not say what tensor-parallel groups of {kind.size} of class "
            f"'{kind.device_class}' take to {mode.describe()}",
            code="tensor-parallel-mode-not-measured",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`; chunked cross-entropy "
            "is measured of devices that compute alone only",
        )


def _not_measured(name: str, size: int) -> InputError:
    return InputError(
        f"tensor-parallel groups of {size} of class '{name}' were not measured",
        code="tensor-parallel-not-measured",
        fix="profile again with `techniques: {tensor_parallel_size: [1, ...]}`, or take another "
        "degree",
    )


def get_tp_profile(profile: Profile, degree: int, *, sequence: bool) -> TensorParallelProfile:
    """Return the measurements of groups of `degree` ranks; see `make_group_profile`."""
    for tp_profile in profile.tp_profiles:
        if (tp_profile.degree, tp_profile.sequence) == (degree, sequence):
            return tp_profile
    alike = [str(one.degree) for one in profile.tp_profiles if one.sequence == sequence]
    how = " and divide the positions of samples" if sequence else ""
    raise InputError(
        f"the profile does not say how {degree} ranks compute units together{how}",
        code="tensor-parallel-not-measured",
        why=f"tensor parallel degrees that were measured so: {', '.join(alike) or 'none'}",
        fix="profile again with `techniques: {tensor_parallel_size: [1, ...]}`, or take another "
        "degree" + (", or `techniques: {sequence_parallel: false}`" if sequence else ""),
    )


def expand_to_members(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """Expand a prediction of `plan.of_leaders` to all workers of the plan."""
    leaders = {w.device: expected for w, expected in zip(plan.of_leaders.workers, found.workers)}
    for number, stage in enumerate(plan.stages):
        for worker in (leader for leader in stage.leaders if stage.get_tp_size(leader) > 1):
            expected = leaders[worker.device]
            memory = expected.memory_bytes | {
                "tensor parallel": compute_buffer_bytes(profile, plan, number, worker)
            }
            leaders[worker.device] = expected.model_copy(update={"memory_bytes": memory})
    leader = {
        member.device: tp_group[0].device
        for stage in plan.stages
        for tp_group in stage.tp_groups
        for member in tp_group
    }
    return found.model_copy(
        update={
            "workers": tuple(
                leaders[leader[worker.device]].model_copy(update={"device": worker.device})
                for worker in plan.workers
            )
        }
    )


def list_group_collectives(
    profile: Profile, plan: Plan, stage: int, worker: Worker
) -> list[TensorParallelTraffic]:
    """Return the collectives of a worker's tensor-parallel group, for each unit call of a stage,
    and last those between units: of the stage's part of the root, and of sequence parallelism."""
    one, name = plan.stages[stage], worker.device_class
    tp_profile, first = _get_worker_tp_profile(profile, one, worker), plan.first_call(stage)
    calls = profile.model.kind_of_call[first : first + len(one.units)]
    of_class, nothing = tp_profile.told[name], TensorParallelTraffic()
    root = of_class.get(ROOT, nothing)
    ends = _StageEndGathers.of(profile, plan, stage, tp_profile, name)
    forward, backward = (*ends.sent, *ends.left), ends.entered
    if stage == 0:
        forward = (*root.forward, *forward)
    if stage == len(plan.stages) - 1:
        backward = (*root.backward, *backward)
    between = root.model_copy(update={"forward": forward, "backward": backward})
    return [*(of_class.get(kind, nothing) for kind in calls), between]


class _StageEndGathers(NamedTuple):
    """Gathers of divided positions between the units of a stage and at its ends: forward of tensors
    sent to other stages or used between units, backward of gradients of full inputs."""

    sent: tuple[TensorParallelCollective, ...]
    left: tuple[TensorParallelCollective, ...]
    entered: tuple[TensorParallelCollective, ...]

    @classmethod
    def of(
        cls, profile: Profile, plan: Plan, stage: int, tp_profile: TensorParallelProfile, name: str
    ) -> _StageEndGathers:
        one, first = plan.stages[stage], plan.first_call(stage)
        calls = range(first, first + len(one.units))
        entered = {*tp_profile.enters, *([first] if first else [])}
        taken = {t for later in plan.stages[stage + 1 :] for t in later.takes if t.call in calls}
        return cls(
            sent=_gathers(
                tp_profile, name, (t.call for t in taken if _is_part(profile, tp_profile, t))
            ),
            left=_gathers(
                tp_profile, name, (call for call in tp_profile.leaves if call in calls[:-1])
            ),
            entered=_gathers(tp_profile, name, (call for call in calls if call in entered)),
        )


def _gathers(
    tp_profile: TensorParallelProfile, name: str, calls: Iterable[int]
) -> tuple[TensorParallelCollective, ...]:
    """Return the gathers of the calls' hidden states, as far as divided."""
    kinds, told = tp_profile.model.kind_of_call, tp_profile.told[name]
    parts = (told[kinds[call]].part for call in calls if kinds[call] in told)
    return tuple(
        TensorParallelCollective(operation="exchange", times=1, bytes=part)
        for part in parts
        if part is not None
    )


def _is_part(profile: Profile, tp_profile: TensorParallelProfile, taken: StageInput) -> bool:
    """Check if each rank of a group has only a part of a call's output: a smaller tensor."""
    kind = profile.model.kind_of_call[taken.call]
    whole, own = (m.kind(kind).outputs.get(taken.output) for m in (profile.model, tp_profile.model))
    return whole is not None and own is not None and own.values[0] < whole.values[0]


def compute_stage_end_seconds(
    profile: Profile, plan: Plan, stage: int, worker: Worker, samples: int
) -> tuple[float, float]:
    """Return the seconds of a micro-batch's collectives, forward and backward, at entry and exit of
    full hidden states in one of several stages."""
    one = plan.stages[stage]
    if not one.sequence or one.get_tp_size(worker) == 1:
        return 0.0, 0.0
    tp_profile = _get_worker_tp_profile(profile, one, worker)
    device = profile.of_class(worker.device_class)
    ends = _StageEndGathers.of(profile, plan, stage, tp_profile, worker.device_class)
    forward = _seconds(profile, tp_profile, device, samples, (*ends.sent, *ends.left))
    return forward, _seconds(profile, tp_profile, device, samples, ends.entered)


def compute_buffer_bytes(profile: Profile, plan: Plan, stage: int, worker: Worker) -> int:
    """Return the bytes of a worker's buffers for its group's collectives over gloo, used by
    CPUs."""
    if profile.cluster.class_named(worker.device_class).accelerator != "cpu":
        return 0
    degree = plan.stages[stage].get_tp_size(worker)
    largest = {"all_reduce": 0, "exchange": 0, "reduce": 0}
    for told in list_group_collectives(profile, plan, stage, worker):
        for one in (*told.forward, *told.backward):
            size = int(float(interpolate_bytes(one.bytes, worker.micro_batch))) // max(1, one.times)
            largest[one.operation] = max(largest[one.operation], size)
    # Reductions need rows for their input and for the received parts.
    return largest["all_reduce"] + (degree + 1) * largest["exchange"] + 2 * largest["reduce"]


def _get_worker_tp_profile(profile: Profile, stage: Stage, worker: Worker) -> TensorParallelProfile:
    return get_tp_profile(profile, stage.get_tp_size(worker), sequence=stage.sequence)


def _add_group_collectives(
    profile: Profile, tp_profile: TensorParallelProfile, device: ClassProfile, *, ends: bool
) -> ClassProfile:
    units = _lengthen_units(
        _ByLinks(profile), ByIdentity(tp_profile), device.device_class, ends=ends
    )
    update_s = device.optimizer_s_per_element
    if profile.exchanges_matrices:
        update_s += _exchange_s_per_element(profile, tp_profile, device.device_class)
    return device.model_copy(update={"units": units, "optimizer_s_per_element": update_s})


def _exchange_s_per_element(
    profile: Profile, tp_profile: TensorParallelProfile, name: str
) -> float:
    """Return the seconds for a group to gather its ranks' parts of matrices on one rank each and to
    return the updates, per element of a rank's part of the model."""
    size = tp_profile.model.mean_per_element(of_matrices=MATRIX_BYTES, of_others=0)
    elements = tp_profile.model.parameters
    # A rank sends its part once, divided among the others; in a gather, once to each of them.
    sent = size * elements / tp_profile.degree
    once = compute_tensor_parallel_s(profile, "exchange", name, tp_profile.degree, sent)
    return 2 * once / max(1, elements)


class _ByLinks(ByIdentity[Profile]):
    """A profile equal to those with the same links."""

    def __hash__(self) -> int:
        return id(self.value.cluster)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ByLinks)
            and other.value.cluster is self.value.cluster
            and other.value.network is self.value.network
        )


@lru_cache(maxsize=1024)  # mixtures of degrees have the units of the same few groups
def _lengthen_units(
    of: _ByLinks, of_tp_profile: ByIdentity[TensorParallelProfile], name: str, *, ends: bool
) -> dict[str, UnitTimes]:
    profile, tp_profile, nothing = of.value, of_tp_profile.value, TensorParallelTraffic()
    device = next(one for one in tp_profile.classes if one.device_class == name)

    def told_of(unit: str) -> TensorParallelTraffic:
        told = tp_profile.told[name].get(unit, nothing)
        if unit != ROOT or not ends:
            return told
        entered = _gathers(tp_profile, name, tp_profile.enters)
        return told.model_copy(
            update={
                "forward": (*told.forward, *_gathers(tp_profile, name, tp_profile.leaves)),
                "backward": (*told.backward, *entered),
                "gradient": (*told.gradient, *entered),
            }
        )

    def lengthened(name: str, times: UnitTimes) -> UnitTimes:
        told = told_of(name)

        def by(curve: Curve, of_pass: Iterable[TensorParallelCollective]) -> Curve:
            waits = [_seconds(profile, tp_profile, device, size, of_pass) for size in curve.sizes]
            values = tuple(v + wait for v, wait in zip(curve.values, waits))
            return curve.model_copy(update={"values": values})

        update = {
            "forward": by(times.forward, told.forward),
            "backward": by(times.backward, told.backward),
        }
        if times.gradient is not None:
            update["gradient"] = by(times.gradient, told.gradient)
        if times.inputs is not None:
            update["inputs"] = by(times.inputs, told.gradient)
        return times.model_copy(update=update)

    return {name: lengthened(name, times) for name, times in device.units.items()}


def _seconds(
    profile: Profile,
    tp_profile: TensorParallelProfile,
    device: ClassProfile,
    samples: float,
    of_pass: Iterable[TensorParallelCollective],
) -> float:
    """Return the seconds of a micro-batch's collectives in a pass."""
    return sum(
        one.times
        * compute_tensor_parallel_s(
            profile,
            one.operation,
            device.device_class,
            tp_profile.degree,
            float(interpolate_bytes(one.bytes, samples)) / one.times,
        )
        for one in of_pass
        if one.times
    )
