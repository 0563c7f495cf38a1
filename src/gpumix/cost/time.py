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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches
from gpumix.cost.network import Links
from gpumix.spec.profile import ROOT, ModelProfile, Profile, UnitTimes

NOTHING = ""  # in the place of a unit kind: no collective runs


def forward_seconds(
    model: ModelProfile, times: Mapping[str, UnitTimes], links: Links, micro: MicroBatches
) -> FloatArray:
    """Seconds of the forward pass for each worker, or each choice, of `micro`."""
    compute = {name: micro.total(times[name].forward) for name in set(model.kind_of_call)}
    first = links.gather_s[model.kind_of_call[0]]
    total = np.maximum(micro.total(times[ROOT].forward), first)
    for (kind, gathered), count in _forward_calls(model).items():
        total = total + count * np.maximum(compute[kind], links.gather_s.get(gathered, 0.0))
    return total


def backward_seconds(
    model: ModelProfile, times: Mapping[str, UnitTimes], links: Links, micro: MicroBatches
) -> FloatArray:
    """Seconds of the head, the loss and the backward pass, recompute included."""
    compute = {name: micro.total(times[name].backward) for name in set(model.kind_of_call)}
    last = links.gather_s[model.kind_of_call[-1]]
    total = np.maximum(micro.total(times[ROOT].backward), last)
    for (kind, gathered, reduced), count in _backward_calls(model).items():
        moved = links.gather_s.get(gathered, 0.0) + links.reduce_s.get(reduced, 0.0)
        total = total + count * np.maximum(compute[kind], moved)
    return total


def exposed_seconds(profile: Profile, links: Links) -> float:
    """Seconds of a step that no computing hides, whatever the workers' samples are."""
    first = profile.model.kind_of_call[0]
    ends = links.gather_s[ROOT] + links.reduce_s[first] + links.reduce_s[ROOT]
    return ends + profile.step_overhead_s


def optimizer_seconds(profile: Profile, device_class: str) -> float:
    """Seconds that a device of this class would need to update the whole model."""
    return profile.of_class(device_class).optimizer_s_per_element * profile.model.parameters


def _forward_calls(model: ModelProfile) -> Counter[tuple[str, str]]:
    """How often (kind of a call, kind that is gathered meanwhile) occurs."""
    calls, kinds = model.calls, model.kind_of_call
    found: Counter[tuple[str, str]] = Counter()
    for k, kind in enumerate(kinds):
        more = k + 1 < len(calls) and calls[k + 1] != calls[k]
        found[kind, kinds[k + 1] if more else NOTHING] += 1
    return found


def _backward_calls(model: ModelProfile) -> Counter[tuple[str, str, str]]:
    """How often (kind of a call, kind gathered meanwhile, kind reduced meanwhile) occurs."""
    calls, kinds = model.calls, model.kind_of_call
    first_call = {name: k for k, name in reversed(list(enumerate(calls)))}
    found: Counter[tuple[str, str, str]] = Counter()
    for k, kind in enumerate(kinds):
        more = k > 0 and calls[k - 1] != calls[k]
        reduces = k + 1 < len(calls) and first_call[calls[k + 1]] == k + 1
        gathered = kinds[k - 1] if more else NOTHING
        found[kind, gathered, kinds[k + 1] if reduces else NOTHING] += 1
    return found
