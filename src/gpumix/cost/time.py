"""How long a step of a plan takes. One formula, for the planner's search and for the report.

What happens in a step of layered accumulation with ZeRO-3 (`engine.layered`), and what it costs:

* The root is gathered first, and nothing hides that. The code before the first unit then runs while
  the first call is gathered: max(root forward, G_first).
* Forward. All of a worker's micro-batches run through unit call k while the parameters of call k+1
  are gathered, so call k takes the longer of the two: max(F_k, G_{k+1}), where F_k is the sum over
  the micro-batches.
* Head and loss of each micro-batch run forward and backward while the last call is gathered again:
  max(root backward, G_last).
* Backward. While call k is recomputed and differentiated, call k-1 is gathered and the gradient of
  call k+1 is reduced. Both use the same links, so their times add: max(B_k, G_{k-1} + R_{k+1}).
  A unit that is called in succession is gathered once; one that is called again is reduced once,
  after the first of its calls.
* Nothing hides the reductions of the first call and of the root, which end the step.
* The optimizer updates what a worker stores: its share x parameters x seconds per element.

    step = exposed + max_w forward_w + max_w backward_w + max_w optimizer_w
    exposed = G_root + R_first + R_root + overhead of a step

The maxima are taken apart because ranks wait for one another at the turn from forward to backward
(nobody's first backward reduction ends before everybody has come there) and before the optimizer.
Within a pass every rank's own sum counts: ranks drift by a call or so and need not meet at each.
A rank without samples still takes part in every collective. All times are seconds.

Below ZeRO stage 3 parameters stay gathered, so the backward gathers nothing; at stage 0 nothing is
gathered at all, and R is an all-reduce. At stages 0 and 1 every rank has room for all gradients, so
no reduction has to end before the next unit goes on, and ranks meet only at the end: there the
longest sum of forward and backward counts. A worker that runs its micro-batches one after the other
(`sequential`) hides gathers behind its first forward only, reductions behind its last backward; if
one is smaller it goes first, for there is more to reduce than to gather.

What runs at the same time is not free: max(a, b) above stands for max(a, b) + c min(a, b), where
the profile's contention c is between 0 (perfect overlap) and 1 (none). Inputs that are kept on the
host are copied beside it all: a call takes no less than its copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches, bytes_at, seconds_at
from gpumix.cost.network import Links
from gpumix.spec.curve import Curve
from gpumix.spec.plan import Mode, ZeroStage
from gpumix.spec.profile import ROOT, ClassProfile, ModelProfile, Profile

Names = tuple[str, ...]
T = TypeVar("T")
Counts = tuple[tuple[T, int], ...]

NOTHING = ""  # in the place of a unit kind: no collective runs


def pass_seconds(
    profile: Profile, name: str, links: Links, micro: MicroBatches, mode: Mode
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the forward and of the backward pass, the head and loss with the latter, for each
    worker, or each choice, of `micro` on a device of class `name`."""
    computing = Computing(profile.model, profile.of_class(name), micro, mode)
    work = _Work(computing, links)
    return work.forward_seconds(), work.backward_seconds()


def work_seconds(profile: Profile, name: str, micro: MicroBatches, mode: Mode) -> FloatArray:
    """Seconds of all that a device of class `name` computes and copies in both passes, one after
    the other: of ways that take as long, the one with the least work is the better one."""
    computing = Computing(profile.model, profile.of_class(name), micro, mode)
    total = computing.forward_s(ROOT) + computing.backward_s(ROOT)
    for kind, count in Counter(profile.model.kind_of_call).items():
        both = computing.forward_s(kind) + computing.backward_s(kind)
        total = total + count * (both + 2 * computing.copied_s(kind))
    return total


def passes_meet(zero_stage: ZeroStage) -> bool:
    """Whether all ranks wait for one another between forward and backward."""
    return zero_stage >= 2


def exposed_seconds(profile: Profile, links: Links) -> float:
    """Seconds of a step that no computing hides, whatever the workers' samples are."""
    first = profile.model.kind_of_call[0]
    ends = links.gather_s[ROOT] + links.reduce_s[first] + links.reduce_s[ROOT]
    return ends + profile.step_overhead_s


def moved_seconds(profile: Profile, links: Links) -> tuple[float, float]:
    """Seconds of the two passes of a rank without samples: it waits for the collectives."""
    model = profile.model
    calls, kinds = model.calls, model.kind_of_call
    forward = links.gather_s[kinds[0]]
    for (_, gathered), count in _forward_counts(calls, kinds):
        forward += count * links.gather_s.get(gathered, 0.0)
    backward = links.regather_s[kinds[-1]]
    for (_, gathered, reduced), count in _backward_counts(calls, kinds):
        moved = links.regather_s.get(gathered, 0.0) + links.reduce_s.get(reduced, 0.0)
        backward += count * moved
    return forward, backward


def optimizer_seconds(profile: Profile, device_class: str) -> float:
    """Seconds that a device of this class would need to update the whole model."""
    return profile.of_class(device_class).optimizer_s_per_element * profile.model.parameters


@dataclass(frozen=True)
class Computing:
    """What devices of one class compute and copy in a step, collectives left out: seconds of all
    micro-batches of each worker, or each choice, of `micro`."""

    model: ModelProfile
    device: ClassProfile
    micro: MicroBatches
    mode: Mode

    def forward_s(self, kind: str) -> FloatArray:
        """Of a call; of the code before the first unit for `ROOT`."""
        return self.micro.seconds(self.forward_curve(kind))

    def backward_s(self, kind: str) -> FloatArray:
        """Of a call; of head and loss, forward and backward, for `ROOT`."""
        return self.micro.seconds(self.backward_curve(kind))

    def copied_s(self, kind: str) -> FloatArray:
        """To copy what a call leaves behind to the host, or back."""
        if self.mode.boundary == "device":
            return np.zeros(self.micro.size.shape)
        assert self.device.host_copy is not None, "the mode copies, which was not measured"
        kept, copy = self.model.kind(kind).kept, self.device.host_copy
        return self.micro.over_all(lambda sizes: seconds_at(copy, bytes_at(kept, sizes)))

    def forward_curve(self, kind: str) -> Curve:
        """Of one micro-batch by its samples."""
        return self.device.units[kind].forward

    def backward_curve(self, kind: str) -> Curve:
        """Of one micro-batch by its samples."""
        times = self.device.units[kind]
        if self.mode.recompute or kind == ROOT:
            return times.backward
        assert times.gradient is not None, "the mode keeps graphs, which were not measured"
        return times.gradient


@dataclass(frozen=True)
class _Work:
    """What devices of one class do in a step, with these links."""

    computing: Computing
    links: Links

    def forward_seconds(self) -> FloatArray:
        computing, gathers = self.computing, self.links.gather_s
        kinds, beside = computing.model.kind_of_call, computing.micro.smallest_seconds
        total = self._beside(computing.forward_curve(ROOT), gathers[kinds[0]], beside)
        for (kind, gathered), count in self._forward_counts:
            moved = gathers.get(gathered, 0.0)
            computed = self._beside(computing.forward_curve(kind), moved, beside)
            total = total + count * np.maximum(computed, computing.copied_s(kind))
        return total

    def backward_seconds(self) -> FloatArray:
        computing = self.computing
        kinds, beside = computing.model.kind_of_call, computing.micro.largest_seconds
        gathers, reductions = self.links.regather_s, self.links.reduce_s
        total = self._beside(computing.backward_curve(ROOT), gathers[kinds[-1]], beside)
        for (kind, gathered, reduced), count in self._backward_counts:
            moved = gathers.get(gathered, 0.0) + reductions.get(reduced, 0.0)
            computed = self._beside(computing.backward_curve(kind), moved, beside)
            total = total + count * np.maximum(computed, computing.copied_s(kind))
        return total

    @property
    def _forward_counts(self) -> Counts[tuple[str, str]]:
        model = self.computing.model
        return _forward_counts(model.calls, model.kind_of_call)

    @property
    def _backward_counts(self) -> Counts[tuple[str, str, str]]:
        model = self.computing.model
        return _backward_counts(model.calls, model.kind_of_call)

    def _beside(
        self, curve: Curve, moved_s: float, at_once: Callable[[Curve], FloatArray]
    ) -> FloatArray:
        """All micro-batches, with a collective beside them: in layers, beside all of them; one
        after the other, beside the one that `at_once` tells of."""
        computed = self.computing.micro.seconds(curve)
        if moved_s == 0.0:
            return computed
        if self.computing.mode.order == "layered":
            at_once = self.computing.micro.seconds
        hiding = at_once(curve)
        both = np.maximum(hiding, moved_s)
        both = both + self.links.contention * np.minimum(hiding, moved_s)
        return computed + (both - hiding)


def can(profile: Profile, device_class: str, mode: Mode) -> bool:
    """Whether enough was measured of a class to predict what it does in this mode."""
    device = profile.of_class(device_class)
    if mode.boundary == "host" and device.host_copy is None:
        return False
    if mode.recompute:
        return True
    kinds = set(profile.model.kind_of_call)
    return all(
        profile.model.kind(k).saved is not None and device.units[k].gradient is not None
        for k in kinds
    )


@lru_cache(maxsize=64)  # a search asks for the same few models, thousands of times
def _forward_counts(calls: Names, kinds: Names) -> Counts[tuple[str, str]]:
    return tuple(Counter(forward_calls(calls, kinds)).items())


@lru_cache(maxsize=64)
def _backward_counts(calls: Names, kinds: Names) -> Counts[tuple[str, str, str]]:
    return tuple(Counter(backward_calls(calls, kinds)).items())


def forward_calls(calls: Names, kinds: Names) -> list[tuple[str, str]]:
    """Of each call: its kind, and the kind that is gathered meanwhile."""
    found = []
    for k, kind in enumerate(kinds):
        more = k + 1 < len(calls) and calls[k + 1] != calls[k]
        found.append((kind, kinds[k + 1] if more else NOTHING))
    return found


def backward_calls(calls: Names, kinds: Names) -> list[tuple[str, str, str]]:
    """Of each call, in the order of the forward pass: its kind, and the kinds that are gathered and
    reduced meanwhile."""
    first_call = {name: k for k, name in reversed(list(enumerate(calls)))}
    found = []
    for k, kind in enumerate(kinds):
        more = k > 0 and calls[k - 1] != calls[k]
        reduces = k + 1 < len(calls) and first_call[calls[k + 1]] == k + 1
        gathered = kinds[k - 1] if more else NOTHING
        found.append((kind, gathered, kinds[k + 1] if reduces else NOTHING))
    return found
