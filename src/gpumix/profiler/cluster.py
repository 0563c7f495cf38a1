"""Profiles a cluster: one device of each class measures compute, all ranks the links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from gpumix.engine.models import model_of
from gpumix.engine.ranks import Ranks
from gpumix.hardware.runtime import DeviceRuntime
from gpumix.profiler.cache import MeasurementCache, assemble
from gpumix.profiler.compute import MakeBatch
from gpumix.profiler.measure import OptimizerOf, measure_class
from gpumix.profiler.network import measure_links
from gpumix.spec.cluster import Cluster, Device
from gpumix.spec.errors import GpumixError
from gpumix.spec.job import Job
from gpumix.spec.plan import DTYPE_BYTES
from gpumix.spec.profile import ClassMeasurement, LinkMeasurement, ModelProfile, Profile

Progress = Callable[[str], None]


class ClusterProfiler:
    """Measures what is not in the cache. Collective: every rank of the run makes one.

    Args:
        devices: the device of each rank.
        make_batch: a batch of so many samples, on the host.
        optimizer_of: makes the job's optimizer for given parameters.
        fresh: measure everything again.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        *,
        folder: Path,
        ranks: Ranks,
        devices: tuple[Device, ...],
        runtime: DeviceRuntime,
        fresh: bool = False,
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._folder = folder
        self._ranks = ranks
        self._devices = devices
        self._runtime = runtime
        self._cache = MeasurementCache(job, cluster, folder)
        self._fresh = fresh

    def run(self, make_batch: MakeBatch, optimizer_of: OptimizerOf, progress: Progress) -> Profile:
        """The profile, the same on every rank.

        Raises:
            GpumixError: a device failed to measure; the same error on every rank.
        """
        known = self._known_classes()
        mine = self._measure_mine(known, make_batch, optimizer_of, progress)
        measured = {m.device_class.device_class: m for m in mine}
        classes = known | measured
        links = self._links(classes, progress)
        if self._ranks.rank == 0:
            self._cache.save(measured, links)
        return assemble(self._job, self._cluster, classes, links)

    def _known_classes(self) -> dict[str, ClassMeasurement]:
        """What rank 0 finds in its cache; hosts may hold different ones."""
        found = [] if self._fresh else list(self._cache.measured().values())
        text = "\n".join(m.model_dump_json() for m in found)
        told = self._ranks.share("known classes", text if self._ranks.rank == 0 else None)
        known = [ClassMeasurement.model_validate_json(line) for line in told.splitlines()]
        return {m.device_class.device_class: m for m in known}

    def _measure_mine(
        self,
        known: Mapping[str, ClassMeasurement],
        make_batch: MakeBatch,
        optimizer_of: OptimizerOf,
        progress: Progress,
    ) -> list[ClassMeasurement]:
        """All classes that were missing, each measured by the first rank that has it."""
        name = self._devices[self._ranks.rank].device_class
        first = [d.device_class for d in self._devices].index(name)
        text, failure = "", None
        if name not in known and first == self._ranks.rank:
            try:
                text = self._measure(name, make_batch, optimizer_of, progress).model_dump_json()
            except GpumixError as error:
                failure = error
        self._ranks.agree("profile", failure, patience_s=10 * self._job.profile.budget)
        told = self._ranks.gather("class measurements", text)
        return [ClassMeasurement.model_validate_json(line) for line in told if line]

    def _measure(
        self, name: str, make_batch: MakeBatch, optimizer_of: OptimizerOf, progress: Progress
    ) -> ClassMeasurement:
        job = self._job
        return measure_class(
            model_of(job.model, folder=self._folder, seed=job.seed),
            self._runtime,
            make_batch,
            device_class=name,
            compute_dtype=job.precision,
            largest=job.global_batch,
            budget_s=job.profile.budget,
            optimizer_of=optimizer_of,
            units=job.model.units,
            progress=progress,
        )

    def _links(
        self, classes: Mapping[str, ClassMeasurement], progress: Progress
    ) -> LinkMeasurement:
        cached = None if self._fresh else self._cache.links()
        told = self._ranks.share(
            "known links", cached.model_dump_json() if cached is not None else ""
        )
        if told:
            return LinkMeasurement.model_validate_json(told)
        model = next(iter(classes.values())).model
        with torch.no_grad():
            return measure_links(
                self._ranks.communicator(),
                largest_bytes=_largest_buffer_bytes(model, self._job),
                progress=progress if self._ranks.rank == 0 else lambda line: None,
            )


def _largest_buffer_bytes(model: ModelProfile, job: Job) -> int:
    """The largest buffer that a collective moves: a unit's parameters, or its fp32 gradient."""
    largest = max(model.root.trainable, *(k.trainable for k in model.kinds))
    return largest * max(4, DTYPE_BYTES[job.precision])
