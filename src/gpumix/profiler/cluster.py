"""Profiler of a cluster: one device of each class measures compute, all ranks the links."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.engine.rank_group import RankGroup
from gpumix.hardware.device import DeviceRuntime
from gpumix.profiler.cache.measurement_cache import assemble
from gpumix.profiler.cache.measurement_files import MeasurementFiles
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.compute.sweep import Progress
from gpumix.profiler.network import measure_links
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import GpumixError
from gpumix.schema.profile.measurements import ClassMeasurement, LinkMeasurement
from gpumix.schema.profile.profile import ModelProfile, Profile


class ClusterProfiler:
    """Measurement of everything missing in the cache. Collective: every rank of the run makes one.

    Args:
        devices: the device of each rank.
        cache: the place of measurements; None keeps none.
        fresh: measure everything again.
    """

    def __init__(
        self,
        subject: Workload,
        cluster: Cluster,
        *,
        ranks: RankGroup,
        devices: tuple[Device, ...],
        runtime: DeviceRuntime,
        cache: MeasurementFiles | None = None,
        fresh: bool = False,
    ) -> None:
        self._subject = subject
        self._cluster = cluster
        self._ranks = ranks
        self._devices = devices
        self._runtime = runtime
        self._cache = cache
        self._fresh = fresh or cache is None

    def run(self, progress: Progress) -> Profile:
        """Return the profile, equal on every rank.

        Raises:
            GpumixError: a device failed to measure; the same error on every rank.
        """
        known = self._share_known_classes()
        mine = self._measure_own_class(known, progress)
        measured = {m.device_class.device_class: m for m in mine}
        classes = known | measured
        if self._ranks.rank == 0:
            _tell_doubt(measured, progress, "are kept for an hour only")
            _tell_doubt(known, progress, "were kept")
        links = self._links(classes, progress)
        if self._ranks.rank == 0 and self._cache is not None:
            self._cache.save(measured, links)
        return assemble(self._subject.sequence_length, self._cluster, classes, links)

    def _share_known_classes(self) -> dict[str, ClassMeasurement]:
        """Return the classes in rank 0's cache; caches of hosts may differ."""
        found = list(self._cache.measured().values()) if self._cache and not self._fresh else []
        text = "\n".join(m.model_dump_json() for m in found)
        told = self._ranks.share("known classes", text if self._ranks.rank == 0 else None)
        known = [ClassMeasurement.model_validate_json(line) for line in told.splitlines()]
        return {m.device_class.device_class: m for m in known}

    def _measure_own_class(
        self,
        known: Mapping[str, ClassMeasurement],
        progress: Progress,
    ) -> list[ClassMeasurement]:
        """Measure all missing classes, each on its first rank."""
        name = self._devices[self._ranks.rank].device_class
        first = [d.device_class for d in self._devices].index(name)
        text, failure = "", None
        if name not in known and first == self._ranks.rank:
            try:
                text = measure_class(
                    self._subject, self._runtime, device_class=name, progress=progress
                ).model_dump_json()
            except GpumixError as error:
                failure = error
        self._ranks.agree("profile", failure, patience_s=10 * self._subject.budget_s)
        told = self._ranks.gather("class measurements", text)
        return [ClassMeasurement.model_validate_json(line) for line in told if line]

    def _links(
        self, classes: Mapping[str, ClassMeasurement], progress: Progress
    ) -> LinkMeasurement:
        cached = self._cache.links() if self._cache and not self._fresh else None
        told = self._ranks.share(
            "known links", cached.model_dump_json() if cached is not None else ""
        )
        if told:
            return LinkMeasurement.model_validate_json(told)
        model = next(iter(classes.values())).model
        with torch.no_grad():
            links = measure_links(
                self._ranks.communicator(),
                largest_bytes=_largest_buffer_bytes(model, self._cluster),
                progress=progress if self._ranks.rank == 0 else lambda line: None,
                devices=self._devices,
                # Links of emulated devices are all equal.
                each_two=not self._cluster.emulated,
                synchronize=self._runtime.synchronize,
                degrees=self._subject.degrees,
            )
        # Each rank's own clock gives a different duration.
        return LinkMeasurement.model_validate_json(
            self._ranks.share("links", links.model_dump_json())
        )


def _tell_doubt(measured: Mapping[str, ClassMeasurement], progress: Progress, kept: str) -> None:
    """Tell which classes were measured on a busy machine."""
    spoiled = [name for name, m in measured.items() if m.device_class.overruns]
    if spoiled:
        progress(
            f"this machine was busy while it measured {', '.join(spoiled)}: times may be far too "
            f"long, and {kept}"
        )


def _largest_buffer_bytes(model: ModelProfile, cluster: Cluster) -> int:
    """Return the bytes of the largest buffer of a collective, a unit's fp32 gradient, at most an
    eighth of the smallest device's memory."""
    largest = max(model.root.trainable, *(k.trainable for k in model.kinds))
    smallest = min(c.memory_bytes for c in cluster.classes)
    return min(largest * GRADIENT_BYTES, smallest // 8)
