"""Python API for a custom training loop: `gpumix.profile`, `gpumix.open_device`.

Here the caller has made the process group, or the one of torchrun's processes is made; `gpumix
train` uses `train.rank_setup.context` instead, which makes both group and device itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpumix.data.core.read_policy import DEFAULT_READING
from gpumix.data.core.source import Source
from gpumix.data.sources.iterable import is_stream
from gpumix.data.sources.map_style import Collate, as_source
from gpumix.engine.comm.init_distributed import ensure_process_group
from gpumix.engine.comm.process_groups import group_timeout
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.deferred_init import build as deferred
from gpumix.engine.rank_group import RankGroup
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.device import open_device as open_runtime
from gpumix.hardware.discovery.discover import describe_cpu_run, discover_cluster
from gpumix.hardware.host.environment import (
    CLUSTER,
    cluster_file,
    count_gpus_by_nvml,
    torchrun_place,
    world_size,
)
from gpumix.hardware.runtime import current_device, device_uuid, is_available
from gpumix.profiler.cache.measurement_files import MeasurementFiles
from gpumix.profiler.cache.program_cache import open_program_cache
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.cluster import ClusterProfiler
from gpumix.profiler.input_pipeline import measure_input
from gpumix.profiler.subject import OptimizerOf, Workload
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.kernels import EfficiencySpec
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.job.tensor_parallel_degrees import get_allowed_degrees
from gpumix.schema.plan.dtypes import Precision
from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.error_location import locate_errors
from gpumix.schema.reading.read import read_cluster

_WARNED: set[str] = set()  # unused cluster files


# More parameters than elsewhere: a program has no job file for these settings.
def profile(
    build: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    *,
    sequence_length: int,
    global_batch_size: int,
    cluster: Cluster | None = None,
    precision: Precision = "auto",
    optimizer: OptimizerOf | None = None,
    loss: Objective | None = None,
    units: Sequence[str] = (),
    tensor: Mapping[str, Any] | None = None,
    dataset: Any = None,
    collate: Collate | None = None,
    space: Space = EVERYTHING,
    torch_compile: bool | Mapping[str, bool] = False,
    efficiency: EfficiencySpec | None = None,
    budget_s: float = 120.0,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = print,
    same_as: object = None,
) -> Profile:
    """Measure a model on the devices of the default process group. Collective. Without a group, the
    group of the ranks started by torchrun is made.

    Args:
        build: makes the model; it is called under `gpumix.build`, so its weights take no memory.
        make_batch: makes a batch of a number of samples on the host, a pytree of tensors.
        cluster: the devices, rank r on the r-th in rank order; default: those of the cluster file
            in the environment variable `GPUMIX_CLUSTER`; without it each rank's own GPU, chosen by
            `torch.cuda.set_device` or, if the group is made here, by local rank.
        optimizer: makes the optimizer for given parameters, without a layout; default: fused AdamW.
        precision: the compute dtype: `auto` for each device class's best, one for all, or by class.
        loss, units, tensor: as for `gpumix.prepare`.
        dataset, collate: the arguments of the `gpumix.Loader` feeding the ranks: the input rate of
            each host is measured too and limits plans. Streams are not measured.
        space: limits of plans; the tensor-parallel degrees in it are measured.
        torch_compile: use compiled units, on all classes that support it, or by class.
        efficiency: compute settings besides dtype and compilation; default: by the table.
        budget_s: the time limit for measuring one device.
        timeout_s: how long a rank waits for other ranks beyond that; default: as in the default
            process group.
        progress: called with a line for each measurement; first with a line that all ranks are on
            the CPU, if no cluster was given and no GPU was found.
        same_as: a key for this work, of JSON values: earlier measurements with an equal key are
            reused. Default: measure everything.

    Raises:
        InputError: the cluster's number of devices is not the number of ranks, two ranks have one
            device, or a class does not support its dtype.
        NoFeasiblePlanError: a device cannot hold one unit with one sample.
    """
    cluster, named_by = _resolve_cluster(cluster)
    _join_ranks(cluster)
    with _ranks(timeout_s) as ranks:
        with locate_errors(named_by):
            found, devices = _devices(ranks, cluster)
        if cluster is None and ranks.rank == 0 and not any(c.is_gpu for c in found.classes):
            progress(describe_cpu_run())
        subject = Workload(
            build=partial(deferred, build, 0),
            make_batch=make_batch,
            optimizer_of=optimizer or partial(torch.optim.AdamW, fused=True),
            sequence_length=sequence_length,
            global_batch=global_batch_size,
            budget_s=budget_s,
            settings=ClassSettings.choose(
                found, precision, torch_compile, efficiency or EfficiencySpec()
            ),
            loss=loss,
            units=tuple(units),
            tensor=tensor,
            degrees=get_allowed_degrees(found, space),
            sequence=space.sequence_parallel,
            requires_tensor_parallel=1 not in space.tensor_parallel_size,
        )
        cache = None if same_as is None else open_program_cache(same_as, subject, found)
        source = None if dataset is None or is_stream(dataset) else as_source(dataset, collate)
        return _measure_devices(subject, found, devices, ranks, cache, source, progress)


def _measure_devices(
    subject: Workload,
    cluster: Cluster,
    devices: tuple[Device, ...],
    ranks: RankGroup,
    cache: MeasurementFiles | None,
    source: Source | None,
    progress: Callable[[str], None],
) -> Profile:
    """Measure the devices, and the input rate of `source` if given. Collective."""
    device = devices[ranks.rank]
    device_class = cluster.class_named(device.device_class)
    with open_runtime(device_class, device.ordinal, device_id=device.id) as runtime:
        ranks.device = runtime.torch_device
        measured = ClusterProfiler(
            subject, cluster, ranks=ranks, devices=devices, runtime=runtime, cache=cache
        ).run(progress)
        if source is None:
            return measured
        inputs = measure_input(source, cluster, devices, ranks, reading=DEFAULT_READING)
        return measured.model_copy(update={"inputs": inputs})


def open_device(cluster: Cluster | None = None) -> DeviceRuntime:
    """Open this process's device while a `with` block runs.

    An emulated device slows compute and limits memory only inside the block, so run the loop
    inside; a GPU keeps allocations below its class's memory. Not around `gpumix.profile`, which
    opens the devices itself.

    Args:
        cluster: the devices, rank r on the r-th in rank order; default: those of the cluster file
            in the environment variable `GPUMIX_CLUSTER`; without it this rank's own GPU, chosen by
            `torch.cuda.set_device`.

    Raises:
        InputError: the cluster's number of devices is not the number of ranks.
        MachineError: there is no such GPU, or it does not match its class.
    """
    cluster, named_by = _resolve_cluster(cluster)
    _join_ranks(cluster)
    if cluster is None:
        device_class, device = _own_device()
    else:
        rank, world = _get_rank_and_world()
        with locate_errors(named_by):
            device = _order_devices(cluster, world)[rank]
        device_class = cluster.class_named(device.device_class)
    return open_runtime(device_class, device.ordinal, device_id=device.id)


def _resolve_cluster(cluster: Cluster | None) -> tuple[Cluster | None, str]:
    """Return the devices named by the caller or the environment, if any, and the file's name."""
    file = cluster_file()
    if file is None:
        return cluster, ""
    named_by = f"{CLUSTER}={file}"
    if cluster is not None:
        _warn_of_others(cluster, file, named_by)
        return cluster, ""
    with locate_errors(named_by):
        return read_cluster(file), named_by


def _warn_of_others(cluster: Cluster, file: Path, named_by: str) -> None:
    """Warn once, on the first rank, if a cluster file differs from the program's cluster: the
    program's devices are used, and the user may not know."""
    place = torchrun_place()
    if named_by in _WARNED or (place is not None and place.rank):
        return
    try:
        same = read_cluster(file) == cluster
    except InputError:
        same = False
    if not same:
        _WARNED.add(named_by)
        what = f"the program names its own devices: those of {named_by} are not used"
        warnings.warn(what, stacklevel=4)


def join_ranks() -> torch.device:
    """Join the ranks started by a launcher, if not joined, and return this rank's device, unopened.

    Raises:
        InputError: there are several processes, but no rendezvous is given.
    """
    cluster, _ = _resolve_cluster(None)
    return current_device() if _join_ranks(cluster) else torch.device("cpu")


def gather_cluster() -> Cluster:
    """Return the devices of all ranks, in a profile's form. Collective."""
    cluster, named_by = _resolve_cluster(None)
    _join_ranks(cluster)
    with _ranks(None) as ranks, locate_errors(named_by):
        return _devices(ranks, cluster)[0]


def announce_cpu_ranks() -> None:
    """Tell transformers and Accelerate, before they look, if ranks compute on CPUs. Otherwise these
    treat each process on CPUs as the only one, which prints and writes everything."""
    cluster, _ = _resolve_cluster(None)
    if world_size() > 1 and not _has_gpus(cluster):
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _join_ranks(cluster: Cluster | None) -> bool:
    """Join the other ranks, if not joined, and check if ranks compute on GPUs."""
    count_gpus_by_nvml()
    found = _has_gpus(cluster)
    ensure_process_group(on_gpus=found)
    return found


def _has_gpus(cluster: Cluster | None) -> bool:
    named = cluster is None or any(one.is_gpu for one in cluster.classes)
    return named and is_available()


def _ranks(timeout_s: float | None) -> RankGroup:
    """Return the ranks of the default process group, with a separate store: messages of an earlier
    profile in the same program must not be read again."""
    store, (rank, world) = None, _get_rank_and_world()
    if dist.is_initialized():
        default = dist.distributed_c10d._get_default_store()
        number = default.add(f"gpumix/profiles/{rank}", 1)
        store = dist.PrefixStore(f"gpumix/profile{number}", default)
    if timeout_s is None:
        waits = group_timeout()
        timeout_s = waits.total_seconds() if waits else 0.0  # alone, without other ranks
    # The device is set once it is open.
    return RankGroup(store, rank=rank, world=world, device=torch.device("cpu"), timeout_s=timeout_s)


def _get_rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _devices(ranks: RankGroup, cluster: Cluster | None) -> tuple[Cluster, tuple[Device, ...]]:
    """Return the cluster, and the device of each rank."""
    if cluster is not None:
        return cluster, _order_devices(cluster, ranks.world)
    device_class, device = _own_device()
    mine = Cluster(classes=(device_class,), devices=(device,))
    told = ranks.gather("devices", mine.model_dump_json())
    return _merge_clusters([Cluster.model_validate_json(text) for text in told])


def _order_devices(cluster: Cluster, world: int) -> tuple[Device, ...]:
    if len(cluster.devices) != world:
        raise InputError(
            f"the cluster has {len(cluster.devices)} devices, the process group {world} ranks",
            code="cluster-rank-count",
            fix="start one process per device",
        )
    return cluster.in_rank_order()


def _own_device() -> tuple[DeviceClass, Device]:
    """Return this rank's device, by UUID: CUDA and NVML may number GPUs differently."""
    here = discover_cluster()
    device = here.devices[0]
    if is_available():
        current = current_device()
        device = here.devices[current.index]
        if device.id.startswith("GPU-"):
            device = here.device(f"GPU-{device_uuid(current)}")
    return here.class_named(device.device_class), device


def _merge_clusters(found: list[Cluster]) -> tuple[Cluster, tuple[Device, ...]]:
    """Merge the clusters of all ranks, in order. Different classes of equal name on different hosts
    (another driver, for example) get a number."""
    classes: dict[str, DeviceClass] = {}
    devices: list[Device] = []
    for one in found:
        (own,), (device,) = one.classes, one.devices
        name, number = own.name, 1
        while classes.setdefault(name, own.model_copy(update={"name": name})) != own.model_copy(
            update={"name": name}
        ):
            number += 1
            name = f"{own.name}-{number}"
        devices.append(device.model_copy(update={"device_class": name}))
    ids = [device.id for device in devices]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise InputError(
            f"{ids.count(twice)} ranks have the device {twice}",
            code="device-used-twice",
            fix="on GPUs call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first; several "
            "ranks on one CPU need `cluster=` with a device for each",
        )
    return Cluster(classes=tuple(classes.values()), devices=tuple(devices)), tuple(devices)
