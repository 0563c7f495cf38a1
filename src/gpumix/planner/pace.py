"""How long calls take on device classes, added up over calls: what a search over cuts asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.time import Computing
from gpumix.spec.plan import Mode
from gpumix.spec.profile import ROOT, Profile


@dataclass(frozen=True)
class Pace:
    """One micro-batch of `size` samples on one device of a class.

    Attributes:
        forward_s, both_s: of all calls before each, and of all: [calls + 1] seconds; of the forward
            pass, and of both.
        first_s: what the first stage computes beside its calls.
        last_s: the same of the last stage.
    """

    forward_s: FloatArray
    both_s: FloatArray
    first_s: float
    last_s: float

    @classmethod
    def of(cls, profile: Profile, name: str, size: int, mode: Mode) -> Pace:
        """Of class `name`."""
        device = profile.of_class(name)
        micro = MicroBatches.of([size], [size])
        computing = Computing(profile.model_of(name), device, micro, mode)
        kinds = profile.model.kind_of_call
        forward = {kind: float(computing.forward_s(kind)[0]) for kind in set(kinds)}
        backward = {kind: float(computing.backward_s(kind)[0]) for kind in set(kinds)}
        before = device.units[ROOT].gradient
        before_s = 0.0 if before is None else float(micro.seconds(before)[0])
        head_s = max(0.0, float(computing.backward_s(ROOT)[0]) - before_s)
        return cls(
            _added_up([forward[kind] for kind in kinds]),
            _added_up([forward[kind] + backward[kind] for kind in kinds]),
            float(computing.forward_s(ROOT)[0]) + before_s,
            head_s,
        )

    @property
    def calls(self) -> int:
        return len(self.both_s) - 1

    def stage_s(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Both passes of stages of calls [begin, end), whole numbers."""
        seconds = self.both_s[end] - self.both_s[begin]
        seconds = seconds + np.where(begin == 0, self.first_s, 0.0)
        return np.asarray(seconds + np.where(end == self.calls, self.last_s, 0.0))

    def passed_s(self, begin: IntArray, end: IntArray) -> FloatArray:
        """The forward pass alone, of units."""
        return np.asarray(self.forward_s[end] - self.forward_s[begin])


def _added_up(seconds: list[float]) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(seconds)])
