"""What the data costs: the samples of a step are read while the one before is computed, by the
cores of the hosts whose ranks take them. A host that reads them more slowly than its devices
compute sets the pace of all:

    step >= max over hosts (samples of its ranks x core seconds of a sample / cores)

Samples that only wait, for a network say, take no cores: workers are added for those, up to what
the disk or the network gives all of them. Where their number is given, a rank gets no more than so
many read one after the other, whatever its host could do:

    step >= max over ranks (samples x seconds of a sample / workers)
"""

from __future__ import annotations

import math
from collections import Counter

from gpumix.spec.plan import Plan, Prediction
from gpumix.spec.profile import HostInput, Profile

# Of a step, or of a window of them; what waits for its data for less is told from noise by nobody.
STARVED_SHARE = 0.03


def input_seconds(profile: Profile, plan: Plan) -> float:
    """To read the samples of a step, on the host or for the rank where that takes longest; 0 if
    nothing is known of that."""
    of_hosts, of_ranks = rates_of(profile), rates_of_ranks(profile)
    read: Counter[str] = Counter()
    most: Counter[str] = Counter()  # of one rank
    for worker in plan.workers:
        read[worker.host] += worker.samples
        most[worker.host] = max(most[worker.host], worker.samples)
    return max(
        (max(read[h] / of_hosts[h], most[h] / of_ranks[h]) for h in read if h in of_hosts),
        default=0.0,
    )


def rates_of(profile: Profile) -> dict[str, float]:
    """Of each host that is known, samples a second that it can read, with all of its cores and the
    readers of all ranks that it has devices for."""
    ranks = Counter(device.host for device in profile.cluster.devices)
    of_ranks = rates_of_ranks(profile)
    return {
        one.host: min(
            one.cores / one.cpu_s_per_sample if one.cpu_s_per_sample else math.inf,
            one.most_samples_per_s or math.inf,
            ranks[one.host] * of_ranks[one.host] if ranks[one.host] else math.inf,
        )
        for one in profile.inputs
    }


def rates_of_ranks(profile: Profile) -> dict[str, float]:
    """Of each host that is known, samples a second that one rank's readers can read."""
    return {one.host: _rate_of_rank(one) for one in profile.inputs}


def _rate_of_rank(one: HostInput) -> float:
    takes_s = max(one.cpu_s_per_sample, one.wait_s_per_sample)
    return math.inf if one.readers is None or not takes_s else one.readers / takes_s


def no_faster_than_input(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """What is expected of a step of `plan`, if its samples cannot be read as fast."""
    input_s = input_seconds(profile, plan)
    if input_s <= found.step_s:
        return found.model_copy(update={"input_s": input_s})
    tokens = plan.global_batch * plan.sequence_length
    update = {"input_s": input_s, "step_s": input_s, "tokens_per_s": tokens / input_s}
    return found.model_copy(update=update)
