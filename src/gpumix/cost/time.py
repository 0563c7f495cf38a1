"""How long a step of a plan takes. One formula, for the planner's search and for the report.

What happens in a step of layered accumulation with ZeRO-3, and what it costs:

* Forward. All of a worker's micro-batches run through unit call k while the parameters of call k+1
  are gathered, so call k takes the longer of the two: max(F_k, G_{k+1}), where F_k is the sum over
  the micro-batches. The code before the first unit runs before that and hides nothing.
* The head and loss of each micro-batch run forward and backward. The last call's parameters stay
  gathered meanwhile, because the backward pass begins with them.
* Backward. While call k is recomputed and differentiated, call k-1 is gathered and the gradient of
  call k+1 is reduced. Both use the same links, so their times add: max(B_k, G_{k-1} + R_{k+1}).
* Nothing hides the gathers of the root and of the first call, which begin the step, nor the
  reductions of the first call and of the root, which end it.
* The optimizer updates what a worker stores: its share x parameters x seconds per element.

    step = exposed + max_w forward_w + max_w backward_w + max_w optimizer_w
    exposed = G_root + G_first + R_first + R_root + overhead of a step

The maxima are taken apart because ranks wait for one another at the turn from forward to backward
(nobody's first backward reduction ends before everybody has come there) and before the optimizer.
Within a pass every rank's own sum counts: ranks drift by a call or so and need not meet at each.
A rank without samples still takes part in every collective. All times are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches
from gpumix.cost.network import Links
from gpumix.spec.profile import ROOT, ModelProfile, Profile, UnitTimes


def forward_seconds(
    model: ModelProfile, times: Mapping[str, UnitTimes], links: Links, micro: MicroBatches
) -> FloatArray:
    """Seconds of the forward pass for each worker, or each choice, of `micro`."""
    compute = {name: micro.total(times[name].forward) for name in set(model.kind_of_call)}
    total = micro.total(times[ROOT].forward)
    for (_, kind, after), count in _neighbours(model).items():
        total = total + count * np.maximum(compute[kind], links.gather_s.get(after, 0.0))
    return total


def backward_seconds(
    model: ModelProfile, times: Mapping[str, UnitTimes], links: Links, micro: MicroBatches
) -> FloatArray:
    """Seconds of the head, the loss and the backward pass, recompute included."""
    compute = {name: micro.total(times[name].backward) for name in set(model.kind_of_call)}
    total = micro.total(times[ROOT].backward)
    for (before, kind, after), count in _neighbours(model).items():
        moved = links.gather_s.get(before, 0.0) + links.reduce_s.get(after, 0.0)
        total = total + count * np.maximum(compute[kind], moved)
    return total


def exposed_seconds(profile: Profile, links: Links) -> float:
    """Seconds of a step that no computing hides, whatever the workers' samples are."""
    first = profile.model.kind_of_call[0]
    start = links.gather_s[ROOT] + links.gather_s[first]
    end = links.reduce_s[first] + links.reduce_s[ROOT]
    return start + end + profile.step_overhead_s


def optimizer_seconds(profile: Profile, device_class: str) -> float:
    """Seconds that a device of this class would need to update the whole model."""
    return profile.of_class(device_class).optimizer_s_per_element * profile.model.parameters


def _neighbours(model: ModelProfile) -> Counter[tuple[str, str, str]]:
    """How often a call of a kind stands between a call before and one after; '' for none."""
    kinds = ("", *model.kind_of_call, "")
    return Counter(zip(kinds, kinds[1:], kinds[2:]))
