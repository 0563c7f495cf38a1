"""`gpumix.profile`: the profiler in a program that has its own process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gpumix.engine.objective import Objective
from gpumix.engine.ranks import Ranks
from gpumix.hardware.discover import discover
from gpumix.hardware.runtime import open_device
from gpumix.profiler.cache import Shape
from gpumix.profiler.cluster import ClusterProfiler, Subject
from gpumix.profiler.measure import OptimizerOf
from gpumix.spec.cluster import Cluster, Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import ComputeDtype
from gpumix.spec.profile import Profile


def profile(
    build: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    *,
    sequence_length: int,
    global_batch: int,
    cluster: Cluster | None = None,
    precision: ComputeDtype = "fp32",
    optimizer: OptimizerOf | None = None,
    optimizer_kind: str = "adamw",
    loss: Objective | None = None,
    units: Sequence[str] = (),
    budget_s: float = 120.0,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] = print,
) -> Profile:
    """Measure a model on the devices of the default process group. Collective.

    Args:
        build: makes the model; `gpumix.build` keeps it off memory.
        make_batch: a batch of so many samples on the host, a pytree of tensors.
        cluster: the devices, rank r on the r-th in rank order; default: each rank's own GPU, found
            by NVML.
        optimizer: makes the optimizer for given parameters; default: fused AdamW.
        optimizer_kind: what its state weighs: adamw (8 bytes an element), sgd-momentum (4), sgd.
        loss, units: as for `gpumix.prepare`.
        budget_s: how long one device may measure.

    Raises:
        InputError: the cluster has another number of devices than there are ranks.
        NoFeasiblePlanError: a device cannot hold one unit with one sample.
    """
    with Ranks.of_default_group(timeout_s) as ranks:
        found, devices = _devices(ranks, cluster)
        device = devices[ranks.rank]
        device_class = found.class_named(device.device_class)
        subject = Subject(
            build=build,
            make_batch=make_batch,
            optimizer_of=optimizer or partial(torch.optim.AdamW, fused=True),
            shape=Shape(sequence_length, global_batch, precision, optimizer_kind),
            budget_s=budget_s,
            loss=loss,
            units=tuple(units),
        )
        with open_device(device_class, device.ordinal, device_id=device.id) as runtime:
            profiler = ClusterProfiler(
                subject, found, ranks=ranks, devices=devices, runtime=runtime
            )
            return profiler.run(progress)


def _devices(ranks: Ranks, cluster: Cluster | None) -> tuple[Cluster, tuple[Device, ...]]:
    """The cluster, and the device of each rank."""
    if cluster is None:
        here = discover()
        number = ranks.device.index or 0
        mine = here.devices[min(number, len(here.devices) - 1)]
        alone = Cluster(classes=(here.class_named(mine.device_class),), devices=(mine,))
        told = ranks.gather("devices", alone.model_dump_json())
        found = [Cluster.model_validate_json(text) for text in told]
        classes = {c.classes[0].name: c.classes[0] for c in found}
        devices = tuple(c.devices[0] for c in found)
        return Cluster(classes=tuple(classes.values()), devices=devices), devices
    if len(cluster.devices) != ranks.world:
        raise InputError(
            f"the cluster has {len(cluster.devices)} devices, the process group {ranks.world} "
            "ranks",
            fix="start one process per device",
        )
    return cluster, cluster.in_rank_order()
