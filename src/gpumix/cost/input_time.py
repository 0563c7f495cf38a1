"""Input cost: the time to read a step's samples while the previous step computes.

The cores of each host read the samples of its ranks. A host reading more slowly than its devices
compute is the bottleneck of all ranks:

    step >= max over hosts (samples of its ranks x core seconds of a sample / cores)

Samples that only wait, on a network for example, use no cores: workers are added up to the limit of
the disk or network. With a given number of workers, a rank reads at most that many samples at a
time, whatever its host could do:

    step >= max over ranks (samples x seconds of a sample / workers)
"""

from __future__ import annotations

import math
from collections import Counter

from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.profile.profile import HostInput, Profile

# Share of a step, or of a window of steps; a shorter wait for data is indistinguishable from noise.
MIN_STARVED_SHARE = 0.03


def compute_input_seconds(profile: Profile, plan: Plan) -> float:
    """Return the seconds to read a step's samples on the slowest host or rank; 0 if unmeasured."""
    if not profile.inputs:
        return 0.0
    of_hosts, of_ranks = compute_host_read_rates(profile), compute_rank_read_rates(profile)
    read: Counter[str] = Counter()
    most: Counter[str] = Counter()  # of one rank
    for worker in plan.workers:
        read[worker.host] += worker.samples
        most[worker.host] = max(most[worker.host], worker.samples)
    return max(
        (max(read[h] / of_hosts[h], most[h] / of_ranks[h]) for h in read if h in of_hosts),
        default=0.0,
    )


def compute_host_read_rates(profile: Profile) -> dict[str, float]:
    """Return the samples per second of each known host, using all cores and the readers of all
    ranks with a device there."""
    ranks = Counter(device.host for device in profile.cluster.devices)
    of_ranks = compute_rank_read_rates(profile)
    return {
        one.host: min(
            one.cores / one.cpu_s_per_sample if one.cpu_s_per_sample else math.inf,
            one.most_samples_per_s or math.inf,
            ranks[one.host] * of_ranks[one.host] if ranks[one.host] else math.inf,
        )
        for one in profile.inputs
    }


def compute_rank_read_rates(profile: Profile) -> dict[str, float]:
    """Return the samples per second of one rank's readers, for each known host."""
    return {one.host: _compute_rank_read_rate(one) for one in profile.inputs}


def _compute_rank_read_rate(one: HostInput) -> float:
    takes_s = max(one.cpu_s_per_sample, one.wait_s_per_sample)
    return math.inf if one.readers is None or not takes_s else one.readers / takes_s


def limit_to_input_rate(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """Limit a prediction of `plan` to the input rate."""
    input_s = compute_input_seconds(profile, plan)
    if input_s <= found.step_s:
        return found.model_copy(update={"input_s": input_s})
    tokens = plan.global_batch * plan.sequence_length
    update = {"input_s": input_s, "step_s": input_s, "tokens_per_s": tokens / input_s}
    return found.model_copy(update=update)
