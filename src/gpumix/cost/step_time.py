"""Step time of a plan: one formula, for the planner's search and for the report.

The following happens in a step of layered accumulation at ZeRO stage 3
(`engine.schedule.layered_schedule`).
A *run* is a row of calls that compute with one bucket (`cost.network.buckets`).

* The root is gathered first, parameters used only at its beginning before the rest; nothing hides
  these gathers. The code before the first unit then runs while the first run's bucket is gathered:
  max(root forward, G_first).
* Forward. All of a worker's micro-batches pass through run k while the bucket of run k+1 is
  gathered, so run k takes max(F_k, G_{k+1}), where F_k is the sum over its calls and the
  micro-batches. While the last run computes, parameters used only by the head are gathered.
* Head and loss of each micro-batch run forward and backward. The last run's bucket stays.
* Backward. While run k is recomputed and differentiated, the bucket of run k-1 is gathered and the
  gradient of run k+1 is reduced; during the last run, the gradient of the head's own parameters is
  reduced. Both use the same links, so their times add: max(B_k, G_{k-1} + R_{k+1}). A bucket used
  by several runs is reduced once, after the first of them.
* Nothing hides the reductions of the first run and of the root, which end the step.
* The optimizer updates the state of each worker: its share x parameters x seconds per element.

    step = exposed + max_w forward_w + max_w backward_w + max_w optimizer_w
    exposed = G_root + R_first + R_root + overhead of a step

The maxima are separate because ranks wait for one another between forward and backward (no rank's
first backward reduction ends before all ranks have arrived) and before the optimizer. Within a pass
each rank's own sum counts: ranks may drift apart by about a run. A rank without samples still takes
part in every collective. All times are seconds.

Below ZeRO stage 3 parameters stay gathered, so the backward gathers nothing; at stage 0 nothing is
gathered at all, and R is an all-reduce. There no reduction has to end before the next one begins,
and ranks wait only at the end: the longest sum of forward and backward counts.

A worker running its micro-batches one after another (`sequential`) hides gathers behind its first
forward only, and reductions behind its last backward. A smaller micro-batch goes first, because
there is more to reduce than to gather. Everything except its last head and backward counts as its
forward, since it reduces nothing before. With `kept_graphs`, pairs of call and micro-batch keep
their graph although the mode recomputes; their backward takes the time measured with a kept graph.

With parameters on hosts, G and R are copies over a device's own link, both ways at the same time:
max(B_k, G_{k-1}, R_{k+1}, U_{k+1}), where U is the host's update of the bucket, if the optimizer
can make it at once.

Overlap is not free: max(a, b) above means max(a, b) + c min(a, b), with the profile's
contention c between 0 (perfect overlap) and 1 (none). CPU offload of inputs copies at the same
time: a run takes no less than its copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import (
    FloatArray,
    IntArray,
    MicroBatches,
    interpolate_seconds,
)
from gpumix.cost.network.buckets import AFTER, BEFORE, Names, OverlappedRun
from gpumix.cost.network.collective_times import CollectiveSeconds
from gpumix.cost.peak_memory import SHARD_GRADIENT_BYTES
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, Mode, Place
from gpumix.schema.profile.profile import ROOT, ClassProfile, ModelProfile, Profile


def compute_pass_seconds(
    profile: Profile,
    name: str,
    links: CollectiveSeconds,
    micro: MicroBatches,
    mode: Mode,
    kept_graphs: IntArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of forward and backward (with head and loss) for each worker or choice of
    `micro` on a device of class `name`."""
    computing = ComputeSeconds(profile.model_of(name), profile.of_class(name), micro, mode)
    work = _Work(computing, links.of_class(name), kept_graphs)
    forward, backward = work.forward_seconds(), work.backward_seconds()
    if mode.order == "layered":
        return forward, backward
    early = computing.seconds_before_last()
    return forward + early, backward - early


def compute_split_backward(
    profile: Profile, name: str, links: CollectiveSeconds, micro: MicroBatches, mode: Mode
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the two parts of a split backward pass: activations, and then the
    parameters' gradients with reductions.

    Raises:
        InputError: the parts were not measured.
    """
    computing = ComputeSeconds(profile.model_of(name), profile.of_class(name), micro, mode)
    return _Work(computing, links).split_seconds()


def compute_work_seconds(
    profile: Profile, name: str, micro: MicroBatches, mode: Mode
) -> FloatArray:
    """Return the seconds of all computation and copies of a device of class `name` in both passes,
    without overlap. Among equally fast choices, the planner prefers the least work."""
    computing = ComputeSeconds(profile.model_of(name), profile.of_class(name), micro, mode)
    total = computing.forward_s(ROOT) + computing.backward_s(ROOT)
    for kind, count in Counter(profile.model.kind_of_call).items():
        both = computing.forward_s(kind) + computing.backward_s(kind)
        total = total + count * (both + 2 * computing.copied_s(kind))
    return total


def needs_sync_between_passes(zero_stage: ZeroStage) -> bool:
    """Check if all ranks wait for one another between forward and backward."""
    return zero_stage >= 1


def compute_exposed_seconds(
    profile: Profile, links: CollectiveSeconds, waves: float = 1.0
) -> float:
    """Return the seconds of a step that computation never hides, whatever the workers' samples; of
    a wave of `waves` on average, if `links` are averages."""
    once_s = links.gather_s[ROOT] + profile.step_overhead_s / waves
    return once_s + compute_exposed_wave_seconds(links)


def compute_exposed_wave_seconds(links: CollectiveSeconds) -> float:
    """Return the seconds of a further wave that computation never hides; the root's parameters in
    use throughout stay gathered."""
    last = (links.buckets.kind(0), ROOT, BEFORE)
    ends = sum(links.reduce_s[name] + links.update_s.get(name, 0.0) for name in last)
    return links.gather_s[BEFORE] + ends


def _sum_backward_collectives(links: CollectiveSeconds, overlap: OverlappedRun) -> float:
    return links.backward_s(overlap.gathered, overlap.reduced)


def compute_optimizer_seconds(
    profile: Profile,
    device_class: str,
    zero_stage: ZeroStage,
    state_on: Place = "device",
    gathered: ComputeDtype = "fp32",
    parameters_on: Place = "device",
) -> float:
    """Return the seconds to update the whole model on one device of this class. With offload, the
    host updates: gradients are copied to it in fp32 and parameters back, once for each gather.
    Copies count as not hidden, although they run concurrently with computation. With parameters on
    the host, copies are counted in place of collectives; and updates too, if they are hidden.

    Args:
        gathered: the dtype in which parameters are gathered and copied to the device.
    """
    device, elements = profile.of_class(device_class), profile.model_of(device_class).parameters
    if state_on == "device":
        return device.optimizer_s_per_element * elements
    assert device.host_optimizer_s_per_element is not None, "no state on the host was measured"
    assert device.host_copy is not None, "copies to the host were not measured"
    if parameters_on == "host":
        hidden = profile.updates_early
        return 0.0 if hidden else device.host_optimizer_s_per_element * elements
    out, back = SHARD_GRADIENT_BYTES * elements, DTYPE_BYTES[gathered] * elements
    gathers = 2 if zero_stage == 3 else 1
    copied = interpolate_seconds(device.host_copy, out) + gathers * interpolate_seconds(
        device.host_copy, back
    )
    return device.host_optimizer_s_per_element * elements + float(copied)


def can_keep_state_on_host(profile: Profile, device_class: str) -> bool:
    """Check if a class was measured with its state on the host."""
    device = profile.of_class(device_class)
    return device.host_copy is not None and device.host_optimizer_s_per_element is not None


@dataclass(frozen=True)
class ComputeSeconds:
    """Computation and copies of devices of one class in a step, without collectives: seconds of all
    micro-batches of each worker, or each choice, of `micro`."""

    model: ModelProfile
    device: ClassProfile
    micro: MicroBatches
    mode: Mode

    def forward_s(self, kind: str) -> FloatArray:
        """Return the seconds of a call; for `ROOT`, of the code before the first unit."""
        return self.micro.seconds(self.forward_curve(kind))

    def backward_s(self, kind: str) -> FloatArray:
        """Return the backward seconds of a call; for `ROOT`, of head and loss, forward and
        backward."""
        return self.micro.seconds(self.backward_curve(kind))

    def copied_s(self, kind: str) -> FloatArray:
        """Return the seconds to copy a call's kept activations to the host, or back."""
        if self.mode.boundary == "device":
            return np.zeros(self.micro.size.shape)
        assert self.device.host_copy is not None, "the mode copies, which was not measured"
        return self.micro.copied_seconds(self.model.kind(kind).kept, self.device.host_copy)

    def backward_with_graphs(self, kind: str, kept: IntArray, call: int) -> FloatArray:
        """Return the backward seconds of call number `call`, if the last `kept` pairs of call and
        micro-batch in forward order keep their graph."""
        times, micro = self.device.units[kind], self.micro
        assert times.gradient is not None, "graphs are kept, which were not measured"
        later = (len(self.model.calls) - 1 - call) * micro.count
        full, rest = micro.count_last_by_size(np.clip(kept - later, 0, micro.count))
        less = [
            interpolate_seconds(times.backward, sizes) - interpolate_seconds(times.gradient, sizes)
            for sizes in (micro.size, micro.rest)
        ]
        return np.asarray(micro.seconds(times.backward) - full * less[0] - rest * less[1])

    def forward_curve(self, kind: str) -> Curve:
        """Return the seconds of a micro-batch's forward, by samples."""
        return self.device.units[kind].forward

    def backward_curve(self, kind: str) -> Curve:
        """Return the seconds of a micro-batch's backward, by samples."""
        times = self.device.units[kind]
        if kind == ROOT and self.mode.head == "chunked":
            assert self.device.chunked_cross_entropy is not None, (
                "chunked cross-entropy was not measured"
            )
            return self.device.chunked_cross_entropy
        if self.mode.recompute or kind == ROOT:
            return times.backward
        assert times.gradient is not None, "the mode keeps graphs, which were not measured"
        return times.gradient

    def split_curves(self, kind: str) -> tuple[Curve, Curve]:
        """Return the curves of a micro-batch's split backward: towards inputs and parameters."""
        times = self.device.units[kind]
        if times.inputs is None or times.weights is None:
            raise InputError(
                "the profile does not say how long the parts of a split backward take",
                code="split-backward-not-measured",
                where=f"device class '{self.device.device_class}'",
                fix="measure again: `gpumix profile JOB.yaml --fresh`, or leave out the "
                "schedule 'zero-bubble'",
            )
        return times.inputs, times.weights

    def seconds_before_last(self) -> FloatArray:
        """Return the seconds of head and backward of all micro-batches except the last to run."""
        micro, total = self.micro, np.zeros(self.micro.size.shape)
        for kind, count in ((ROOT, 1), *Counter(self.model.kind_of_call).items()):
            curve = self.backward_curve(kind)
            total = total + count * (micro.seconds(curve) - micro.largest_seconds(curve))
        return total


@dataclass(frozen=True)
class _Work:
    """Work of devices of one class in a step, with the given links."""

    computing: ComputeSeconds
    links: CollectiveSeconds
    kept_graphs: IntArray | None = None

    def forward_seconds(self) -> FloatArray:
        computing, gathers = self.computing, self.links.gather_s
        first = gathers[self.links.buckets.kind(0)]
        total = self._beside([computing.forward_curve(ROOT)], first, self._first)
        for overlap, count in self.links.buckets.forward_counts:
            moved = gathers.get(overlap.gathered, 0.0)
            curves = [computing.forward_curve(kind) for kind in overlap.kinds]
            total = total + count * self._no_less_than_copies(
                self._beside(curves, moved, self._first), overlap.kinds
            )
        return total

    def backward_seconds(self) -> FloatArray:
        if self.kept_graphs is not None and self.kept_graphs.any():
            return self._backward_with_graphs(self.kept_graphs)
        total = self.computing.backward_s(ROOT)
        for overlap, count in self.links.buckets.backward_counts:
            total = total + count * self._backward_of(overlap)
        return total

    def split_seconds(self) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of both parts. The head's own parameters are reduced during the first
        part, units during the second; each part gathers its parameters."""
        computing, links = self.computing, self.links
        inputs, weights = computing.backward_s(ROOT), np.zeros(computing.micro.size.shape)
        for overlap, count in links.buckets.backward_counts:
            gathered = links.regather_s.get(overlap.gathered, 0.0)
            reduced = links.reduce_s.get(overlap.reduced, 0.0)
            of_head = reduced if overlap.reduced == AFTER else 0.0
            first, second = zip(*map(computing.split_curves, overlap.kinds))
            inputs = inputs + count * self._beside([*first], gathered + of_head, self._last)
            moved = gathered + reduced - of_head
            weights = weights + count * self._beside([*second], moved, self._last)
        # The parameters of the last run were freed with the first part.
        last = links.buckets.kind(len(links.buckets.runs) - 1)
        return inputs, weights + links.regather_s.get(last, 0.0)

    def _backward_of(self, overlap: OverlappedRun) -> FloatArray:
        curves = [self.computing.backward_curve(kind) for kind in overlap.kinds]
        taken = self._beside(curves, _sum_backward_collectives(self.links, overlap), self._last)
        return self._no_less_than_copies(taken, overlap.kinds)

    def _backward_with_graphs(self, kept: IntArray) -> FloatArray:
        """Sum run by run: each may keep other graphs."""
        computing, total = self.computing, self.computing.backward_s(ROOT)
        call = len(computing.model.calls)
        for overlap in reversed(self.links.buckets.backward):
            computed = np.zeros(computing.micro.size.shape)
            for kind in reversed(overlap.kinds):
                call -= 1
                computed = computed + computing.backward_with_graphs(kind, kept, call)
            hiding = computed
            if computing.mode.order == "sequential":
                curves = [computing.backward_curve(kind) for kind in overlap.kinds]
                hiding = np.minimum(sum(map(self._last, curves), np.zeros(1)), computed)
            moved = _sum_backward_collectives(self.links, overlap)
            taken = computed + self._overlap_seconds(hiding, moved) - hiding
            total = total + self._no_less_than_copies(taken, overlap.kinds)
        return total

    def _no_less_than_copies(self, taken: FloatArray, kinds: Names) -> FloatArray:
        if self.computing.mode.boundary == "device":
            return taken
        copied = sum((self.computing.copied_s(kind) for kind in kinds), np.zeros(1))
        return np.maximum(taken, copied)

    @property
    def _first(self) -> Callable[[Curve], FloatArray]:
        """Seconds that hide a gather: layered, all micro-batches; sequential, the first to run."""
        micro = self.computing.micro
        in_layers = self.computing.mode.order == "layered"
        return micro.seconds if in_layers else micro.smallest_seconds

    @property
    def _last(self) -> Callable[[Curve], FloatArray]:
        """Seconds that hide a reduction: layered, all micro-batches; sequential, the last to
        run."""
        micro = self.computing.micro
        in_layers = self.computing.mode.order == "layered"
        return micro.seconds if in_layers else micro.largest_seconds

    def _beside(
        self, curves: list[Curve], moved_s: float, at_once: Callable[[Curve], FloatArray]
    ) -> FloatArray:
        """Return the seconds of all micro-batches, with a collective during the `at_once` part."""
        computed = _sum(self.computing.micro.seconds, curves)
        if moved_s == 0.0:
            return computed
        hiding = _sum(at_once, curves)
        return computed + (self._overlap_seconds(hiding, moved_s) - hiding)

    def _overlap_seconds(self, computed: FloatArray, moved_s: float) -> FloatArray:
        shorter = np.minimum(computed, moved_s)
        return np.maximum(computed, moved_s) + self.links.contention * shorter


def _sum(seconds: Callable[[Curve], FloatArray], curves: list[Curve]) -> FloatArray:
    total = seconds(curves[0])
    for curve in curves[1:]:
        total = total + seconds(curve)
    return total


def can_predict_mode(profile: Profile, device_class: str, mode: Mode) -> bool:
    """Check if enough was measured of a class to predict this mode."""
    device = profile.of_class(device_class)
    if mode.boundary == "host" and device.host_copy is None:
        return False
    if mode.head == "chunked" and device.chunked_cross_entropy is None:
        return False
    if mode.recompute:
        return True
    model = profile.model_of(device_class)
    kinds = set(model.kind_of_call)
    return all(
        model.kind(k).saved is not None and device.units[k].gradient is not None for k in kinds
    )


def is_chunked_cross_entropy_free(profile: Profile, device_class: str) -> bool:
    """Check if chunked cross-entropy was measured to take no more time and memory than the
    head with full logits, at any number of samples."""
    device, root = profile.of_class(device_class), profile.model_of(device_class).root
    if device.chunked_cross_entropy is None or root.chunked_cross_entropy is None:
        return False
    whole = (device.units[ROOT].backward, root.head)
    return all(
        map(_is_never_above, (device.chunked_cross_entropy, root.chunked_cross_entropy), whole)
    )


def _is_never_above(one: Curve, other: Curve) -> bool:
    return one.sizes == other.sizes and all(a <= b for a, b in zip(one.values, other.values))
