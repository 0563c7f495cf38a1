"""What the data costs: the samples of a step are read while the one before is computed, by the
cores of the hosts whose ranks take them. A host that reads them more slowly than its devices
compute sets the pace of all:

    step >= max over hosts (samples of its ranks x core seconds of a sample / cores)

Samples that only wait, for a network say, take no cores: workers are added for those, up to what
the disk or the network gives all of them.
"""

from __future__ import annotations

import math
from collections import Counter

from gpumix.spec.plan import Plan, Prediction
from gpumix.spec.profile import HostInput, Profile

# Of a step, or of a window of them; what waits for its data for less is told from noise by nobody.
STARVED_SHARE = 0.03


def input_seconds(profile: Profile, plan: Plan) -> float:
    """To read the samples of a step, on the host where that takes longest; 0 if nothing is known
    of that."""
    rates = rates_of(profile)
    if not rates:
        return 0.0
    read: Counter[str] = Counter()
    for worker in plan.workers:
        read[worker.host] += worker.samples
    return max((n / rates[host] for host, n in read.items() if host in rates), default=0.0)


def samples_per_s(one: HostInput) -> float:
    """That a host can read, with all of its cores and as many readers as help."""
    by_cores = one.cores / one.cpu_s_per_sample if one.cpu_s_per_sample else math.inf
    return min(by_cores, one.most_samples_per_s or math.inf)


def rates_of(profile: Profile) -> dict[str, float]:
    """Of each host that is known, samples a second."""
    return {one.host: samples_per_s(one) for one in profile.inputs}


def no_faster_than_input(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """What is expected of a step of `plan`, if its samples cannot be read as fast."""
    input_s = input_seconds(profile, plan)
    if input_s <= found.step_s:
        return found.model_copy(update={"input_s": input_s})
    tokens = plan.global_batch * plan.sequence_length
    update = {"input_s": input_s, "step_s": input_s, "tokens_per_s": tokens / input_s}
    return found.model_copy(update=update)
