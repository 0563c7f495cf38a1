"""Estimated profiles of unmeasured GPUs: from the catalogue, the roofline, and a model's sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumix.hardware.estimates.cluster_shorthand import make_device_class
from gpumix.hardware.estimates.decoder_shapes import DividedDecoder
from gpumix.hardware.estimates.gpu_catalogue import Card, find_card
from gpumix.hardware.estimates.roofline import (
    BACKWARD_FLOPS,
    add_curves,
    compute_host_optimizer_s_per_element,
    compute_moved_bytes,
    compute_optimizer_s_per_element,
    get_peak_flops_per_s,
    get_peak_fraction,
    make_forward_curve,
    make_gradient_curve,
    make_half_gradient_curve,
    make_host_copy_curve,
    make_memory_curve,
)
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.job.tensor_parallel_degrees import get_allowed_degrees
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.dtypes import Precision, choose_compute_dtypes, get_dtype_support
from gpumix.schema.plan.optimizer_state import OptimizerState
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype
from gpumix.schema.profile.profile import (
    ROOT,
    ClassProfile,
    ModelProfile,
    Profile,
    RootUnit,
    TensorParallelProfile,
    UnitKind,
    UnitTimes,
)

# CUDA's context, kernels and workspaces of torch and cuBLAS, NCCL's buffers: GPU memory of a
# process before its first tensor. A round figure on the safe side.
FRAMEWORK_BYTES = 3 * 2**29

ADAMW_STATE_BYTES = 8


PartsIn = Callable[[ComputeDtype], Mapping[int, DividedDecoder]]
"""Function from dtype to the part of each rank by tensor parallel degree."""


def return_no_parts(dtype: ComputeDtype) -> Mapping[int, DividedDecoder]:
    """Return no parts: the model cannot be divided over tensor-parallel groups."""
    return {}


class HostPart(NamedTuple):
    """Part of a host that a device of a class has, at the fullest host of the class.

    Attributes:
        devices: that share the memory of the host.
        ram_bytes: free memory of the host for each device; None: no limit.
    """

    devices: int = 1
    ram_bytes: int | None = None


WHOLE_HOST = HostPart()


def estimate_class(
    card: Card,
    model: ModelProfile,
    name: str,
    optimizer_bytes: float = ADAMW_STATE_BYTES,
    host_part: HostPart = WHOLE_HOST,
    optimizer_state: OptimizerState = "fp32",
) -> ClassProfile:
    """Estimate a card's times for each unit of a model in its dtype.

    Args:
        optimizer_bytes, optimizer_state: of optimizer state per element, and its form.

    Raises:
        InputError: the model's FLOPs are unknown.
    """
    units: dict[str, UnitKind | RootUnit] = {kind.name: kind for kind in model.kinds}
    units[ROOT] = model.root
    if not all(kind.flops > 0 for kind in model.kinds):
        raise InputError(
            "the profile does not say how many FLOPs its units have",
            code="profile-without-flops",
            fix="measure again: `gpumix profile JOB.yaml --fresh`",
        )
    times, dtype = {}, model.compute_dtype
    for kind, unit in units.items():
        flops, elements = unit.flops, unit.trainable
        weight_bytes = elements * DTYPE_BYTES[dtype] + unit.frozen_bytes
        moved_bytes = compute_moved_bytes(unit)
        forward = make_forward_curve(card, dtype, flops, weight_bytes, moved_bytes)
        backward_flops = 2 * flops if unit.backward_flops is None else unit.backward_flops
        products = backward_flops / BACKWARD_FLOPS
        gradient = make_gradient_curve(card, dtype, products, elements, moved_bytes)
        if isinstance(unit, RootUnit):  # a look-up before the units; head and loss run in backward
            times[kind] = UnitTimes(
                forward=make_forward_curve(card, dtype, 0.0, 0.0),
                backward=add_curves(forward, gradient),
            )
        else:
            half = make_half_gradient_curve(card, dtype, flops, moved_bytes)
            unpacking = make_memory_curve(card, unit.unpacked_bytes)
            forward, gradient = add_curves(forward, unpacking), add_curves(gradient, unpacking)
            times[kind] = UnitTimes(
                forward=forward,
                backward=add_curves(forward, gradient),
                gradient=gradient,
                inputs=add_curves(half, unpacking),
                weights=gradient.less(add_curves(half, unpacking)),
            )
    return ClassProfile(
        device_class=name,
        units=times,
        # The number of products is equal; more additions to the weight's gradient are hidden.
        chunked_cross_entropy=times[ROOT].backward if model.root.chunked_cross_entropy else None,
        optimizer_s_per_element=compute_optimizer_s_per_element(
            card, optimizer_bytes, optimizer_state
        ),
        framework_bytes=FRAMEWORK_BYTES,
        host_copy=make_host_copy_curve(card),
        host_optimizer_s_per_element=host_part.devices
        * compute_host_optimizer_s_per_element(optimizer_bytes, optimizer_state),
        host_bytes=host_part.ram_bytes,
        estimated=True,
        compute_dtype=dtype,
        peak=Peak(flops_per_s=get_peak_flops_per_s(card, dtype), source="stated"),
    )


def estimate_profile(
    model_in: Callable[[ComputeDtype], ModelProfile],
    cluster: Cluster,
    *,
    sequence_length: int,
    precision: Precision = "auto",
    optimizer_bytes: float = ADAMW_STATE_BYTES,
    optimizer_state: OptimizerState = "fp32",
    parts_in: PartsIn = return_no_parts,
    ram_by_host: Mapping[str, int] | None = None,
) -> Profile:
    """Estimate the profile of a cluster of catalogue cards.

    Args:
        model_in: returns the model in a dtype.
        optimizer_bytes, optimizer_state: of optimizer state per element, and its form.
        parts_in: returns the parts for tensor-parallel groups in a dtype.
        ram_by_host: free memory of each host; None: no limit.

    Raises:
        InputError: the catalogue does not know a class, or a class does not support its dtype.
    """
    dtypes = choose_compute_dtypes(precision, cluster)
    models = {dtype: model_in(dtype) for dtype in dict.fromkeys(dtypes.values())}
    model, *others = models.values()
    host_parts = _find_host_parts(cluster, ram_by_host)
    return Profile(
        sequence_length=sequence_length,
        optimizer_bytes_per_element=optimizer_bytes,
        optimizer_state=optimizer_state,
        torch_version="none: this is an estimate",
        cluster=cluster,
        model=model,
        other_models=tuple(others),
        classes=tuple(
            estimate_class(
                find_card(c.name),
                models[dtypes[c.name]],
                c.name,
                optimizer_bytes,
                host_parts.get(c.name, WHOLE_HOST),
                optimizer_state,
            )
            for c in cluster.classes
        ),
        tp_profiles=tuple(
            _estimate_groups(
                cluster, parts_in, dtypes, (optimizer_bytes, optimizer_state), host_parts
            )
        ),
        collectives=Collectives(gather="list", reduce="list"),
    )


def _find_host_parts(
    cluster: Cluster, ram_by_host: Mapping[str, int] | None
) -> dict[str, HostPart]:
    """Return the part of a host by class: the most devices, and the least memory."""
    counts = Counter(d.host for d in cluster.devices)
    hosts_of: dict[str, set[str]] = {}
    for device in cluster.devices:
        hosts_of.setdefault(device.device_class, set()).add(device.host)
    return {
        name: HostPart(
            max(counts[host] for host in hosts),
            None
            if ram_by_host is None
            else min(ram_by_host[host] // counts[host] for host in hosts),
        )
        for name, hosts in hosts_of.items()
    }


def _estimate_groups(
    cluster: Cluster,
    parts_in: PartsIn,
    dtypes: Mapping[str, ComputeDtype],
    optimizer: tuple[float, OptimizerState],
    host_parts: Mapping[str, HostPart],
) -> Iterator[TensorParallelProfile]:
    """Yield the profile of each tensor parallel degree with enough cards of a class on a host.

    Args:
        optimizer: bytes of its state per element, and the state's form.
    """
    optimizer_bytes, optimizer_state = optimizer
    parts = {dtype: parts_in(dtype) for dtype in dict.fromkeys(dtypes.values())}
    there = get_allowed_degrees(cluster, EVERYTHING)
    for degree in sorted(set().union(*parts.values())):
        names = [name for name in sorted(there) if degree in there[name]]
        if not names:
            continue
        of_class = {name: parts[dtypes[name]][degree] for name in names}
        model, *others = {dtype: of[degree].model for dtype, of in parts.items()}.values()
        yield TensorParallelProfile(
            degree=degree,
            model=model,
            other_models=tuple(others),
            classes=tuple(
                estimate_class(
                    find_card(name),
                    part.model,
                    name,
                    optimizer_bytes,
                    host_parts[name],
                    optimizer_state,
                )
                for name, part in of_class.items()
            ),
            told={name: dict(part.told) for name, part in of_class.items()},
        )


def list_assumed_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the estimated classes of whose architecture nobody published times, in the
    dtype that it computes in by itself: how far their estimates may be off is unknown."""
    return tuple(name for name in names if _is_assumed(name))


def _is_assumed(name: str) -> bool:
    try:
        card = find_card(name)
    except InputError:  # slowed ones have a name of their own
        return False
    dtype = get_dtype_support(make_device_class(card)).usual
    return get_peak_fraction(card, dtype).assumed


def scale_estimates(classes: Iterable[ClassProfile], factor: float) -> tuple[ClassProfile, ...]:
    """Scale estimates by `factor`, the error found on available cards."""
    return tuple(_scale_times(profile, factor) for profile in classes)


def _scale_times(profile: ClassProfile, factor: float) -> ClassProfile:
    units = {
        kind: times.model_copy(
            update={name: curve and curve.scaled(factor) for name, curve in times}
        )
        for kind, times in profile.units.items()
    }
    head = profile.chunked_cross_entropy and profile.chunked_cross_entropy.scaled(factor)
    return profile.model_copy(update={"units": units, "chunked_cross_entropy": head})


def make_slower_class(profile: ClassProfile, factor: float, name: str) -> ClassProfile:
    """Return a class called `name` with compute times `factor` times as long."""
    optimizer_s = profile.optimizer_s_per_element * factor
    changes = {"device_class": name, "optimizer_s_per_element": optimizer_s}
    return _scale_times(profile, factor).model_copy(update=changes)
