"""Search for plans with tensor-parallel groups, by a search for plans of single devices.

A tensor-parallel group is devices of one class on one host, and in one island if there are islands.
To the planner it is a device of another, faster kind (`cost.tensor_parallel_groups`): every way to
plan for devices plans for tensor-parallel groups too, one degree at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from gpumix.cost.device_alone import compute_ideal_samples_per_s
from gpumix.cost.predict import predict
from gpumix.cost.tensor_parallel_groups import (
    TensorParallelGroup,
    get_tp_profile,
    make_group_profile,
    make_leader_profile,
)
from gpumix.planner.common.strategy import (
    PlanRequest,
    attach_bound,
    compute_time_to_beat,
    get_prediction,
    is_within_memory,
    list_devices_by_rank,
    select_by_devices,
)
from gpumix.planner.pipeline_parallel.candidate import form_tensor_parallel_groups
from gpumix.planner.pipeline_parallel.device_order import DevicePlace, get_device_place
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    TensorParallelDegree,
    get_measured_tp_degrees,
    list_tp_degrees,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.tensor_parallel_degrees import check_degrees_fit
from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.plan.stage import Stage
from gpumix.schema.profile.profile import Profile

# Most mixtures tried, each by its own search, by devices: up to so many.
MIXTURES = ((12, 4), (64, 2), (float("inf"), 1))
MAX_RANKED_MIXTURES = 4096
GroupMembers = dict[str, tuple[Device, ...]]
"""The devices of each tensor-parallel group, by the id of the first device."""


Searched = tuple[Plan | None, float | None]
"""The fastest plan, None if too slow; and a proven lower bound of all plans in seconds, if any."""

Search = Callable[[Profile, PlanRequest, float], Searched]
"""A search for plans below a number of seconds."""


def search_all_degrees(
    profile: Profile, request: PlanRequest, search: Search, below_s: float = float("inf")
) -> Searched:
    """Return the fastest plan over the request's degrees, by a search for plans of a single degree;
    None if single devices are allowed and nothing fits, or takes less than `below_s`.

    Raises:
        InputError, NoFeasiblePlanError: there is no plan; the error is of the lowest degree.
    """
    best: Plan | None = None
    bounds_s: list[float | None] = []
    failures: list[InputError | NoFeasiblePlanError] = []
    check_degrees_fit(profile.cluster, request.space)
    wanted, measured = list_tp_degrees(request.space), get_measured_tp_degrees(profile)
    devices = list_devices_by_rank(profile, request)
    for tp in wanted:
        others = wanted[0] == NO_TENSOR_PARALLEL or not measured.isdisjoint(wanted)
        if tp != NO_TENSOR_PARALLEL and tp not in measured and others:
            continue  # the model, or the cluster, has no such tensor-parallel groups
        try:
            if tp == NO_TENSOR_PARALLEL:
                found, bound_s = search(profile, request, below_s)
            else:
                sizes = _make_uniform_sizes(profile, tp, devices)
                found, bound_s = _search_groups(profile, request, search, sizes, below_s)
        except (InputError, NoFeasiblePlanError) as error:
            failures.append(error)
            continue
        bounds_s.append(bound_s)
        if found is not None and get_prediction(found).step_s < below_s:
            best, below_s = found, compute_time_to_beat(found)
    most = int(select_by_devices(MIXTURES, len(devices)))
    other, more_s = search_mixed_degrees(
        profile, request, search, below_s, most=most, in_stages=False
    )
    best, bounds_s = other or best, [*bounds_s, *more_s]
    if best is None and failures and wanted[0] != NO_TENSOR_PARALLEL:
        raise failures[0]
    known = [bound_s for bound_s in bounds_s if bound_s is not None]
    return best, min(known) if len(known) == len(bounds_s) > 0 else None


def compute_ideal_step_s(profile: Profile, request: PlanRequest) -> float:
    """Return seconds of a step if all devices compute without a pause, in the fastest
    tensor-parallel groups."""
    devices = list_devices_by_rank(profile, request)
    sequences = {False} | {tp.sequence for tp in get_measured_tp_degrees(profile)}
    every = [_options(profile, request, devices, sequence=sequence) for sequence in sequences]
    of_class = ([one for options in every for one in options[name]] for name in every[0])
    return _seconds(request, (max(options) for options in of_class if options))


def search_mixed_degrees(
    profile: Profile,
    request: PlanRequest,
    search: Search,
    below_s: float,
    *,
    most: int,
    in_stages: bool,
) -> tuple[Plan | None, list[float | None]]:
    """Return the fastest plan below `below_s` with tensor-parallel groups of several sizes; and by
    mixture that is tried a lower bound in seconds, exact only where low enough to matter.

    Args:
        most: mixtures tried.
        in_stages: whether the search is for plans of several stages.
    """
    best: Plan | None = None
    bounds_s: list[float | None] = []
    for mixture in _mixtures(profile, request, list_devices_by_rank(profile, request), most):
        if mixture.least_s >= below_s:
            bounds_s.append(mixture.least_s)
            continue
        try:
            found, bound_s = _search_groups(
                profile, request, search, mixture.sizes, below_s, in_stages=in_stages
            )
        except (InputError, NoFeasiblePlanError):
            continue
        bounds_s.append(bound_s)
        if found is not None and get_prediction(found).step_s < below_s:
            best, below_s = found, compute_time_to_beat(found)
    return best, bounds_s


def select_groupable_devices(profile: Profile, request: PlanRequest) -> tuple[Device, ...]:
    """Return the request's devices in rank order; if none may compute alone, without devices in
    excess of tensor-parallel groups on a host.

    Raises:
        InputError: the request names devices unknown to the profile, or tensor parallel degrees
            without measurements.
        NoFeasiblePlanError: some devices are in excess, and none may be left out.
    """
    devices, wanted = list_devices_by_rank(profile, request), list_tp_degrees(request.space)
    if NO_TENSOR_PARALLEL in wanted:
        return devices
    check_degrees_fit(profile.cluster, request.space)
    measured = [tp for tp in wanted if tp in get_measured_tp_degrees(profile)] or wanted[:1]
    degrees: dict[str, set[int]] = {}
    for tp in measured:
        for one in get_tp_profile(profile, tp.degree, sequence=tp.sequence).classes:
            degrees.setdefault(one.device_class, set()).add(tp.degree)
    alike: dict[DevicePlace, list[Device]] = {}
    for device in devices:
        alike.setdefault(get_device_place(device), []).append(device)
    kept = {
        device.id
        for cell, some in alike.items()
        for device in some[: _count_most_grouped(len(some), degrees.get(cell.device_class, set()))]
    }
    if not kept or (len(kept) < len(devices) and request.space.leave_out is False):
        raise _make_indivisible_error(sorted({tp.degree for tp in measured}))
    return tuple(device for device in devices if device.id in kept)


def _count_most_grouped(devices: int, degrees: set[int]) -> int:
    """Return the most devices, out of `devices`, in tensor-parallel groups of `degrees`."""
    reached = {0}
    for count in range(1, devices + 1):
        if any(count - degree in reached for degree in degrees):
            reached.add(count)
    return max(reached)


def _make_indivisible_error(degrees: list[int]) -> NoFeasiblePlanError:
    return NoFeasiblePlanError(
        f"the devices cannot all form tensor-parallel groups of {' or '.join(map(str, degrees))}",
        code="tensor-parallel-groups-impossible",
        why="a tensor-parallel group has devices of one class on one host",
        fix="allow `techniques: {tensor_parallel_size: [1]}`, or `leave_out: true`",
    )


class _Sizes(NamedTuple):
    """Sizes of tensor-parallel groups by class; `sequence` divides positions too; with
    `others_alone`, devices too few for a further group compute alone."""

    of_class: dict[str, int]
    sequence: bool
    others_alone: bool = False

    def form_groups(self, devices: Sequence[Device]) -> GroupMembers:
        """Return the devices of all tensor-parallel groups, in the order of the first devices."""
        found = {
            members[0].id: members
            for name, size in self.of_class.items()
            for members in form_tensor_parallel_groups(
                tuple(d for d in devices if d.device_class == name), size
            )
        }
        used = {device.id for members in found.values() for device in members}
        if self.others_alone:
            found |= {device.id: (device,) for device in devices if device.id not in used}
        return {device.id: found[device.id] for device in devices if device.id in found}


def _make_uniform_sizes(
    profile: Profile, tp: TensorParallelDegree, devices: Sequence[Device]
) -> _Sizes:
    """Return the same size for all classes measured in tensor-parallel groups of this size."""
    measured = get_tp_profile(profile, tp.degree, sequence=tp.sequence).classes
    there = {device.device_class for device in devices}
    names = [one.device_class for one in measured if one.device_class in there]
    if not names:
        raise _make_indivisible_error([tp.degree])
    return _Sizes(dict.fromkeys(names, tp.degree), tp.sequence)


class _Mixture(NamedTuple):
    """Tensor-parallel groups of several sizes, with a lower bound `least_s`."""

    sizes: _Sizes
    least_s: float


def _mixtures(
    profile: Profile, request: PlanRequest, devices: Sequence[Device], most: int
) -> Iterator[_Mixture]:
    """Yield the `most` promising mixtures with a size or two for each class."""
    sequences = {tp.sequence for tp in list_tp_degrees(request.space) if tp != NO_TENSOR_PARALLEL}
    found = []
    for sequence in sorted(sequences):
        kept = _keep_fastest_options(_options(profile, request, devices, sequence=sequence))
        for chosen in product(*kept.values()):
            sizes = {size for one in chosen for size in one.sizes}
            if len(sizes) > 1 and not any(max(sizes) % size for size in sizes):
                of_class = {name: one.size for name, one in zip(kept, chosen)}
                mixture = _Sizes(
                    of_class, sequence, others_alone=1 in request.space.tensor_parallel_size
                )
                found.append(_Mixture(mixture, _seconds(request, chosen)))
    found.sort(key=lambda mixture: mixture.least_s)
    yield from found[:most]


class _Option(NamedTuple):
    """The joint speed of a class's tensor-parallel groups, their size, and all sizes with left-over
    devices."""

    samples_per_s: float
    size: int
    sizes: frozenset[int]


def _options(
    profile: Profile, request: PlanRequest, devices: Sequence[Device], *, sequence: bool
) -> dict[str, list[_Option]]:
    """Return the options of each class, the fastest first."""
    alone, of_sizes = 1 in request.space.tensor_parallel_size, {1: profile}
    found: dict[str, list[_Option]] = {}
    for name in dict.fromkeys(device.device_class for device in devices):
        own = tuple(device for device in devices if device.device_class == name)
        options = []
        for size in _sizes_of(profile, request, name, sequence=sequence):
            count = len(form_tensor_parallel_groups(own, size))
            left = len(own) - count * size if alone and size > 1 else 0
            if size not in of_sizes:
                of_sizes[size] = make_group_profile(profile, size, sequence=sequence)
            speed = count * compute_ideal_samples_per_s(of_sizes[size], name)
            speed += left * compute_ideal_samples_per_s(profile, name) if left else 0.0
            sizes = ({size} if count else set()) | ({1} if left else set())
            options.append(_Option(speed, size, frozenset(sizes)))
        found[name] = sorted(options, key=lambda option: -option.samples_per_s)
    return found


def _keep_fastest_options(options: Mapping[str, list[_Option]]) -> dict[str, list[_Option]]:
    """Keep equally many of the fastest options of each class, for `MAX_RANKED_MIXTURES` mixtures at
    most."""
    most = max(map(len, options.values()), default=0)
    while (
        most > 1
        and prod(min(most, len(of_class)) for of_class in options.values()) > MAX_RANKED_MIXTURES
    ):
        most -= 1
    return {name: of_class[:most] for name, of_class in options.items()}


def _seconds(request: PlanRequest, chosen: Iterable[_Option]) -> float:
    """Return seconds of a step if all tensor-parallel groups compute without a pause."""
    speed = sum(option.samples_per_s for option in chosen)
    return request.global_batch / speed if speed else 0.0


def _sizes_of(profile: Profile, request: PlanRequest, name: str, *, sequence: bool) -> list[int]:
    """Return the measured tensor parallel degrees of a class in the request's space."""
    measured = {
        tp_profile.degree
        for tp_profile in profile.tp_profiles
        if tp_profile.sequence == sequence
        and any(c.device_class == name for c in tp_profile.classes)
    }
    return sorted(set(request.space.tensor_parallel_size) & (measured | {1}))


def _kind(members: Sequence[Device]) -> TensorParallelGroup:
    return TensorParallelGroup(members[0].device_class, len(members))


def _search_groups(
    profile: Profile,
    request: PlanRequest,
    search: Search,
    sizes: _Sizes,
    below_s: float,
    *,
    in_stages: bool = False,
) -> Searched:
    """Search for plans with tensor-parallel groups of `sizes`."""
    devices = list_devices_by_rank(profile, request)
    groups = sizes.form_groups(devices)
    leaders, used = list(groups), sum(map(len, groups.values()))
    there = sorted({len(members) for members in groups.values()} or set(sizes.of_class.values()))
    if not leaders or (used < len(devices) and request.space.leave_out is False):
        raise _make_indivisible_error(there)
    kinds = {leader: _kind(members) for leader, members in groups.items()}
    leader_profile = make_leader_profile(
        profile, kinds, sequence=sizes.sequence, in_stages=in_stages
    )
    # Chunked cross-entropy was measured on single devices only, and all workers of a stage run the
    # head alike.
    if len(there) > 1 and "whole" not in request.space.cross_entropy:
        raise _make_indivisible_error(there)
    space = request.space.model_copy(
        update={
            "tensor_parallel_size": (1,),
            "cross_entropy": ("whole",) if len(there) > 1 else request.space.cross_entropy,
        }
    )
    request = request.model_copy(update={"devices": tuple(leaders), "space": space})
    leader_profile = leader_profile.model_copy(
        update={"cluster": leader_profile.cluster.only(leaders)}
    )

    def expanded(found: Plan) -> tuple[Plan, Prediction]:
        plan = _expand_plan(found, groups, devices, sequence=sizes.sequence)
        return plan, predict(profile, plan)

    found, bound_s = search(leader_profile, request, below_s)
    if found is None or get_prediction(found).step_s >= below_s:
        return None, bound_s
    plan, expected = expanded(found)
    if not is_within_memory(expected.workers):
        found, bound_s = search(_with_room(leader_profile, expected), request, below_s)
        if found is None:
            return None, bound_s
        plan, expected = expanded(found)
    if not is_within_memory(expected.workers):
        raise NoFeasiblePlanError(
            f"tensor-parallel groups of {' and '.join(map(str, there))} have no room "
            "for the buffers of their collectives",
            code="tensor-parallel-buffers-do-not-fit",
            fix="lower `global_batch_size`, or allow another tensor parallel degree",
        )
    return attach_bound(plan.model_copy(update={"prediction": expected}), bound_s), bound_s


def _with_room(leader_profile: Profile, expected: Prediction) -> Profile:
    """Return the profile with less memory: twice the shortage of a plan, for buffers of
    collectives."""
    part = max(w.peak_bytes / w.memory_limit_bytes for w in expected.workers) ** 2
    cluster = leader_profile.cluster
    classes = tuple(
        c.model_copy(update={"memory_bytes": int(c.memory_bytes / part)}) for c in cluster.classes
    )
    smaller = cluster.model_copy(update={"classes": classes})
    return leader_profile.model_copy(update={"cluster": smaller})


def _expand_plan(
    plan: Plan, groups: GroupMembers, devices: tuple[Device, ...], *, sequence: bool
) -> Plan:
    """Expand a plan for the first devices of tensor-parallel groups to all devices."""

    def with_members(stage: Stage) -> Stage:
        degree = max(len(groups[worker.device]) for worker in stage.workers)
        workers = tuple(
            worker.model_copy(
                update={
                    "device": device.id,
                    "device_class": device.device_class,
                    "parts": degree // len(groups[worker.device]),
                }
            )
            for worker in stage.workers
            for device in groups[worker.device]
        )
        update = {"workers": workers, "tensor": degree, "sequence": sequence and degree > 1}
        return stage.model_copy(update=update)

    stages = tuple(map(with_members, plan.stages))
    used = {worker.device for stage in stages for worker in stage.workers}
    ranks = tuple(device.id for device in devices if device.id in used)
    return plan.model_copy(update={"stages": stages, "ranks": ranks, "prediction": None})
