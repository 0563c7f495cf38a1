"""Measurement cache, and the assembly of a profile from cached measurements.

A measurement depends on the device class with its driver, on torch, on the model and on the shape
of the work; its file is named after a hash of all these. No torch here: `gpumix plan` reads the
cache.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gpumix.hardware.estimates.stated_peak import find_stated_peak
from gpumix.profiler.cache.measurement_files import (
    MeasurementFiles,
    hash_json,
    load_measurement,
    profiles_folder,
    software_key,
    write_measurement,
)
from gpumix.profiler.cache.source_hash import hash_factory_code
from gpumix.profiler.class_settings import ClassSettings
from gpumix.schema.cluster.cluster import Cluster, DeviceClass
from gpumix.schema.cluster.link_islands import Links, add_found_islands
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.files import read_text
from gpumix.schema.job.job import Job
from gpumix.schema.job.tensor_parallel_degrees import check_degrees_fit, get_allowed_degrees
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.schema.profile.measurements import ClassMeasurement, InputMeasurement, LinkMeasurement
from gpumix.schema.profile.profile import (
    ClassProfile,
    ModelProfile,
    Profile,
    RootUnit,
    TensorParallelProfile,
    UnitKind,
)

U = TypeVar("U", UnitKind, RootUnit)
# Fields of a job's data that determine its samples.
SAMPLE_KEYS = {"pattern", "document", "column", "factory", "arguments", "packing", "tokenize"}
EARLY_OPTIMIZERS = ("adamw", "sgd")  # update each element by itself
HOST_MEMORY_SHARE = 0.8  # of a host's memory; the rest is for loaders, libraries, the system


class MeasurementCache(MeasurementFiles):
    """Measurements of one job's model on one cluster.

    Args:
        job: the job; only the model, the shape, the dtypes and the optimizer matter.
        cluster: its devices.
        folder: the base of relative paths in the job.

    `settings` are the compute settings of each class, `degrees` its tensor-parallel degrees.

    Raises:
        InputError: the job asks a class for something unsupported.
    """

    def __init__(self, job: Job, cluster: Cluster, folder: Path) -> None:
        self._job = job
        self._job_folder = folder
        check_degrees_fit(cluster, job.space)
        super().__init__(
            job.advanced.profile_cache or profiles_folder(),
            work_key(job, folder),
            cluster,
            settings=ClassSettings.choose(
                cluster, job.precision, job.torch_compile, job.advanced.efficiency
            ),
            degrees=get_allowed_degrees(cluster, job.space),
            sequence=job.space.sequence_parallel,
            budget_s=job.advanced.profile_budget,
        )

    def input_file(self) -> Path:
        """Return the file with the cost of reading the job's samples on these hosts."""
        work = {
            **reading_key(self._job, self._job_folder),
            "hosts": sorted({device.host for device in self._cluster.devices}),
            "emulated": self._cluster.emulated,
        }
        return self._folder / f"input-{hash_json(work)}.json"

    def missing(self) -> list[str]:
        """Return the names of unmeasured classes."""
        return [c.name for c in self._cluster.classes if self._known(c) is None]

    def load(self) -> Profile | None:
        """Return the profile; None if any part is unmeasured."""
        found, inputs = self.without_inputs(), self.inputs()
        if found is None or inputs is None:
            return None
        return set_readers(self._job, found.model_copy(update={"inputs": inputs.inputs}))

    def without_inputs(self) -> Profile | None:
        """Return the profile of devices and links without input; None if any is unmeasured."""
        found, links = self.measured(), self.links()
        if links is None or len(found) < len(self._cluster.classes):
            return None
        return self.named(assemble(self._job.sequence_length, self._cluster, found, links))

    def named(self, profile: Profile) -> Profile:
        """Add the hash of the job's model to a profile."""
        return profile.model_copy(update={"job_model": model_hash(self._job, self._job_folder)})

    def save_inputs(self, inputs: InputMeasurement) -> None:
        """Save the cost of reading samples."""
        write_measurement(inputs, self.input_file())

    def inputs(self) -> InputMeasurement | None:
        return load_measurement(InputMeasurement, self.input_file())

    def _known(self, device_class: DeviceClass) -> ClassMeasurement | None:
        found = super()._known(device_class)
        degrees = self._job.space.tensor_parallel_size
        alone = 1 in degrees or not self.degrees.get(device_class.name)
        if found is not None and not found.tp_measurements and not alone:
            return None  # a new measurement says why the model has no tensor-parallel groups
        return found


def assemble(
    sequence_length: int,
    cluster: Cluster,
    classes: Mapping[str, ClassMeasurement],
    links: LinkMeasurement,
) -> Profile:
    """Assemble the profile of a cluster from its parts.

    Raises:
        InputError: the measurements are of different models.
    """
    devices = add_found_islands(cluster.in_rank_order(), links.pairs)
    cluster = cluster.model_copy(update={"devices": devices})
    models = {m.model.fingerprint for m in classes.values()}
    if len(models) > 1:
        raise InputError(
            "the device classes were measured with different models",
            code="classes-of-different-models",
            fix="measure again: `gpumix profile JOB.yaml --fresh`",
        )
    ordered = [classes[c.name] for c in cluster.classes]
    model, *others = _by_dtype(measured.model for measured in ordered)
    return Profile(
        sequence_length=sequence_length,
        optimizer_bytes_per_element=max(m.optimizer_bytes_per_element for m in classes.values()),
        optimizer_state=ordered[0].optimizer_state,
        exchanges_matrices=ordered[0].exchanges_matrices,
        torch_version=importlib.metadata.version("torch"),
        cluster=cluster,
        model=model,
        other_models=tuple(others),
        classes=tuple(
            _with_peak(_with_host_bytes(one, one.device_class, cluster), cluster) for one in ordered
        ),
        tp_profiles=tuple(_merge_groups(ordered, cluster)),
        collectives=links.collectives,
        network=links.network,
        links=Links.of(devices, links.pairs),
        step_overhead_s=links.step_overhead_s,
        contention=links.contention,
        # Classes are measured at the same time.
        seconds_spent=max(m.seconds_spent for m in classes.values()) + links.seconds_spent,
    )


def _with_peak(found: ClassProfile, cluster: Cluster) -> ClassProfile:
    """Replace a measured peak by the stated one: a single product may not reach the real peak."""
    device_class, tf32 = cluster.class_named(found.device_class), found.efficiency.tf32
    stated = find_stated_peak(device_class, found.compute_dtype, tf32=tf32)
    return found if stated is None else found.model_copy(update={"peak": stated})


def _by_dtype(models: Iterable[ModelProfile]) -> list[ModelProfile]:
    """Return one model of each dtype."""
    found: dict[ComputeDtype, list[ModelProfile]] = {}
    for model in models:
        found.setdefault(model.compute_dtype, []).append(model)
    return [_merge_models(of_dtype) for of_dtype in found.values()]


def _merge_groups(
    measured: Sequence[ClassMeasurement], cluster: Cluster
) -> Iterator[TensorParallelProfile]:
    """Yield tensor-parallel measurements by degree and sequence parallelism."""
    every = [(one, t) for one in measured for t in one.tp_measurements]
    for degree, sequence in sorted({(t.degree, t.sequence) for _, t in every}):
        of_degree = [(o, t) for o, t in every if (t.degree, t.sequence) == (degree, sequence)]
        model, *others = _by_dtype(t.model for _, t in of_degree)
        yield TensorParallelProfile(
            degree=degree,
            sequence=sequence,
            enters=of_degree[0][1].enters,
            leaves=of_degree[0][1].leaves,
            model=model,
            other_models=tuple(others),
            classes=tuple(_with_host_bytes(o, t.device_class, cluster) for o, t in of_degree),
            told={t.device_class.device_class: t.told for _, t in of_degree},
        )


def _with_host_bytes(
    measured: ClassMeasurement, found: ClassProfile, cluster: Cluster
) -> ClassProfile:
    """Set each device's share of host memory, on the fullest host of a class; devices that are CPUs
    also take their memory from it."""
    if measured.host_memory_bytes is None:
        return found
    memory = {c.name: c.memory_bytes if c.accelerator == "cpu" else 0 for c in cluster.classes}
    room = []
    for host in {d.host for d in cluster.devices if d.device_class == found.device_class}:
        devices = [d.device_class for d in cluster.devices if d.host == host]
        taken = sum(memory[name] for name in devices)
        room.append((HOST_MEMORY_SHARE * measured.host_memory_bytes - taken) / len(devices))
    return found.model_copy(update={"host_bytes": max(0, int(min(room, default=0)))})


def _merge_models(models: list[ModelProfile]) -> ModelProfile:
    """Return the largest memory of any device at each size: kernels and their working sets differ.
    A small device runs out of memory early, and says nothing of larger sizes."""
    widest = max(models, key=lambda m: len(m.root.kept.sizes))
    kinds = tuple(_merge_units(kind, [m.kind(kind.name) for m in models]) for kind in widest.kinds)
    root = _merge_units(widest.root, [m.root for m in models])
    return widest.model_copy(update={"kinds": kinds, "root": root})


def _merge_units(value: U, others: list[U]) -> U:
    curves = {
        name: _take_maximum(curve, [found for other in others if (found := getattr(other, name))])
        for name, curve in value
        if isinstance(curve, Curve)
    }
    return value.model_copy(update=curves)


def _take_maximum(widest: Curve, curves: list[Curve]) -> Curve:
    at = [dict(zip(curve.sizes, curve.values)) for curve in curves]
    values = tuple(max(found.get(size, 0.0) for found in at) for size in widest.sizes)
    return Curve(sizes=widest.sizes, values=values)


def work_key(job: Job, folder: Path) -> dict[str, object]:
    """Return everything that a measurement depends on besides the device."""
    return {
        **software_key(),
        "model": _model(job, folder),
        "code": [hash_factory_code(f, folder) for f in (job.model.factory, job.data.factory)],
        "data": (job.data.factory, job.data.arguments) if job.data.factory else "tokens",
        # Attention uses another kernel for packed or padded documents.
        **({} if job.data.packing == "concatenate" else {"packing": job.data.packing}),
        "tokenizer": str(job.tokenizer),
        "sequence_length": job.sequence_length,
        "global_batch": job.global_batch_size,
        "optimizer": (job.optimizer.name, bool(job.optimizer.momentum), job.optimizer.ns_steps),
    }


def reading_key(job: Job, folder: Path) -> dict[str, object]:
    """Return everything that reading a sample depends on besides the hosts: not workers, prefetch
    or order, nor the later use of samples."""
    data = job.data.model_dump(mode="json", include=SAMPLE_KEYS)
    return {
        **software_key(),
        "data": data,
        "text": [str(folder / path) for path in job.data.text],
        "dataset": str(folder / job.data.dataset) if job.data.dataset else "",
        "code": hash_factory_code(job.data.factory, folder),
        "tokenizer": str(job.tokenizer),
        "sequence_length": job.sequence_length,
    }


def set_readers(job: Job, profile: Profile) -> Profile:
    """Set what the job says in a profile: the number of data workers per rank, and whether weights
    are updated before all gradients are known."""
    wanted = job.data.num_workers
    readers = None if wanted == "auto" else max(1, wanted)
    inputs = [
        one.model_copy(update={"readers": readers if one.parallel else 1}) for one in profile.inputs
    ]
    early = job.optimizer.name in EARLY_OPTIMIZERS and job.max_grad_norm is None
    return profile.model_copy(update={"inputs": tuple(inputs), "updates_early": early})


def model_hash(job: Job, folder: Path) -> str:
    """Hash the model of a job without building it."""
    return hash_json([_model(job, folder), hash_factory_code(job.model.factory, folder)])


def _model(job: Job, folder: Path) -> dict[str, object]:
    model: dict[str, object] = job.model.model_dump(mode="json", exclude={"weights"})
    if isinstance(job.model.config, Path):
        model["config"] = read_text(folder / job.model.config)
    return model
