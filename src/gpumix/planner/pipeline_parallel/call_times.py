"""Seconds of calls on device classes, summed over calls, and of messages and sums over groups, for
a search over cuts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.cost.network.link_times import (
    Messages,
    Operation,
    build_subset_link_model,
    select_collective_forms,
)
from gpumix.cost.step_time import ComputeSeconds
from gpumix.cost.tensor_parallel_groups import make_group_profile
from gpumix.planner.pipeline_parallel.stage_memory import StageMemory
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    GroupKind,
    TensorParallelDegree,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import ROOT, Profile


@dataclass(frozen=True)
class CallTimes:
    """Times of one micro-batch, for each of some sizes, on a device of a class.

    Attributes:
        forward_s, both_s: seconds of all calls before each, and of all, as [sizes, calls + 1]; of
            the forward pass, and of both.
        first_forward_s, first_s: seconds of the first stage in addition to its calls, as [sizes];
            in the forward pass, and in both.
        last_s: seconds of the last stage in addition to its calls, in both passes.
    """

    forward_s: FloatArray
    both_s: FloatArray
    first_forward_s: FloatArray
    first_s: FloatArray
    last_s: FloatArray

    @classmethod
    def of(cls, profile: Profile, name: str, sizes: Sequence[int], mode: Mode) -> CallTimes:
        """Build the pace of class `name`."""
        device = profile.of_class(name)
        micro = MicroBatches.of(sizes, sizes)
        computing = ComputeSeconds(profile.model_of(name), device, micro, mode)
        kinds = profile.model.kind_of_call
        forward = {kind: computing.forward_s(kind) for kind in set(kinds)}
        backward = {kind: computing.backward_s(kind) for kind in set(kinds)}
        before = device.units[ROOT].gradient
        before_s = np.zeros(len(sizes)) if before is None else micro.seconds(before)
        return cls(
            _accumulate([forward[kind] for kind in kinds]),
            _accumulate([forward[kind] + backward[kind] for kind in kinds]),
            computing.forward_s(ROOT),
            computing.forward_s(ROOT) + before_s,
            np.maximum(0.0, computing.backward_s(ROOT) - before_s),
        )

    @property
    def calls(self) -> int:
        return int(self.both_s.shape[1]) - 1

    def stage_s(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Return seconds of both passes of stages of calls [begin, end), as [sizes, *stages]."""
        first = _mask_seconds(begin == 0, self.first_s)
        last = _mask_seconds(end == self.calls, self.last_s)
        return np.asarray(self.both_s[:, end] - self.both_s[:, begin] + first + last)

    def compute_forward_s(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Return seconds of the forward pass alone."""
        first = _mask_seconds(begin == 0, self.first_forward_s)
        return np.asarray(self.forward_s[:, end] - self.forward_s[:, begin] + first)


class CallTimesCache:
    """The paces of a profile's classes, alone and in tensor-parallel groups, and of
    links, each computed once."""

    def __init__(
        self, profile: Profile, degrees: Iterable[TensorParallelDegree] = (NO_TENSOR_PARALLEL,)
    ) -> None:
        self.profiles = {
            tp: make_group_profile(profile, tp.degree, sequence=tp.sequence) for tp in degrees
        }
        self.rooms = {tp: StageMemory(one) for tp, one in self.profiles.items()}
        self._known: dict[tuple[str, TensorParallelDegree, Mode, tuple[int, ...]], CallTimes] = {}
        self._rates: dict[tuple[GroupKind, TensorParallelDegree], float] = {}
        self._messages = Messages(self.profiles[NO_TENSOR_PARALLEL])
        self._sent: dict[tuple[Hashable, tuple[float, ...]], FloatArray] = {}

    def __call__(
        self, name: str, tp: TensorParallelDegree, mode: Mode, sizes: tuple[int, ...]
    ) -> CallTimes:
        """Return the pace of a class, or of its tensor-parallel groups."""
        key = (name, tp, mode, sizes)
        if key not in self._known:
            self._known[key] = CallTimes.of(self.profiles[tp], name, sizes, mode)
        return self._known[key]

    def sent_s(self, giver: Device, taker: Device, sizes: tuple[float, ...]) -> FloatArray:
        """Return seconds of messages of these bytes."""
        key = (self._messages.link(giver, taker), sizes)
        if key not in self._sent:
            seconds = [self._messages.seconds(giver, taker, size) for size in sizes]
            self._sent[key] = np.array(seconds)
        return self._sent[key]

    def compute_reduce_s_per_byte(self, kind: GroupKind, tp: TensorParallelDegree) -> float:
        """Return seconds to sum a byte of gradients over the workers of a group, in large sums."""
        key = (kind, tp)
        if key not in self._rates:
            places = [
                (str(number), name)
                for number, host in enumerate(kind.hosts)
                for name, count in host
                for _ in range(count // tp.degree)
            ]
            profile = self.profiles[tp]
            wire, form = (
                build_subset_link_model(profile, places, kind.near),
                select_collective_forms(profile).reduce,
            )
            size = max(1, profile.model.parameters) * GRADIENT_BYTES
            ways: tuple[tuple[Operation, str], ...] = (("reduce", form), ("sum", "native"))
            known = [way for way in ways if len(places) > 1 and wire.knows(*way, "all")]
            seconds = (wire.seconds(*way, "all", size) for way in known)
            self._rates[key] = min(seconds, default=0.0) / size
        return self._rates[key]


def _accumulate(seconds: list[FloatArray]) -> FloatArray:
    return np.cumsum([np.zeros_like(seconds[0]), *seconds], axis=0).T


def _mask_seconds(there: npt.NDArray[np.bool_], seconds: FloatArray) -> FloatArray:
    return np.asarray(seconds.reshape(-1, *(1,) * there.ndim) * there)
