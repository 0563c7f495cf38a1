"""Memory limits of devices for rebalancing. Pure.

The state stored on a device bounds its samples. State can move to devices with room, and samples to
where they are computed soonest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpumix.cost.input_time import compute_host_read_rates
from gpumix.cost.network.link_times import build_link_model, count_devices_by_host
from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import is_within_memory
from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.profile.profile import Profile
from gpumix.train.elastic.device_pace import DevicePace, predict_pace
from gpumix.train.elastic.rebalancer import WINDOW_STEPS, MovedShares, Rebalancer, SplitLimits
from gpumix.train.elastic.sample_dealer import SampleDealer, with_samples

# Part used of the predicted room for state: cuts are rounded.
USED_ROOM_SHARE = 0.98
# Parts to try of the samples gained by moves: all, then less.
TRIED_MOVE_SHARES = (1.0, 0.75, 0.5, 0.25)


def limit_samples_by_memory(profile: Profile, plan: Plan) -> tuple[int, ...]:
    """Return the most samples fitting each group's memory by the cost model, at least the plan's.
    Groups without samples may get some."""
    (stage,) = plan.stages

    def fits(samples: Sequence[int]) -> list[bool]:
        expected = predict(profile, with_samples(plan, samples)).workers
        fits = [worker.peak_bytes <= worker.memory_limit_bytes for worker in expected]
        return [all(fits[rank] for rank in ranks) for ranks in plan.list_tp_groups(0)]

    return _bisect_limits(
        [tp_group[0].samples for tp_group in stage.tp_groups], plan.global_batch, fits
    )


def _bisect_limits(
    least: Sequence[int], batch: int, fits: Callable[[Sequence[int]], list[bool]]
) -> tuple[int, ...]:
    """Return the most samples fitting each group, by bisection."""
    low = list(least)
    high = [batch for _ in least]
    while any(a < b for a, b in zip(low, high)):
        tried = [(a + b + 1) // 2 for a, b in zip(low, high)]
        for number, fitting in enumerate(fits(tried)):
            if fitting:
                low[number] = tried[number]
            else:
                high[number] = max(low[number], tried[number] - 1)
    return tuple(low)


def idle_paces(profile: Profile, plan: Plan) -> dict[int, DevicePace]:
    """Return the predicted paces, by number, of groups without samples in the plan."""
    (stage,) = plan.stages
    counts = [tp_group[0].samples for tp_group in stage.tp_groups]
    if all(counts):
        return {}
    busy = with_samples(plan, [count or 1 for count in counts])
    busy = busy.model_copy(update={"prediction": predict(profile, busy)})
    leaders = [tp_group[0] for tp_group in busy.stages[0].tp_groups]
    return {n: predict_pace(busy, leaders[n]) for n, count in enumerate(counts) if not count}


class PredictedSplitLimits(SplitLimits):
    """Room of the devices of a one-stage plan by the cost model, without moves of state."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile = profile
        self._plan = plan
        super().__init__(limit_samples_by_memory(profile, plan))

    def fits(self, samples: Sequence[int]) -> bool:
        """Return whether there is memory for a split within `most`. In several waves smaller
        micro-batches may make room for more samples: what fits is no range."""
        if self._plan.waves == 1:
            return True
        return is_within_memory(predict(self._profile, with_samples(self._plan, samples)).workers)


class MovableSplitLimits(PredictedSplitLimits):
    """Room of the devices of a one-stage plan without tensor parallelism, with movable state."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        self._dealer = SampleDealer.of(plan)
        self._shares = plan.stages[0].shares
        self._least = [int(worker.samples > 0) for worker in plan.workers]
        self._slopes = self._bytes_per_share()
        self._most_without = _bisect_limits(
            self.most,
            plan.global_batch,
            lambda samples: [room >= 0 for room in self._room(samples)],
        )

    def moved(self, paces: Sequence[DevicePace]) -> MovedShares | None:
        for part in TRIED_MOVE_SHARES:
            every = zip(self.most, self._most_without)
            most = [here + int(part * (without - here)) for here, without in every]
            batch = self._plan.global_batch
            for samples in self._dealer.find_splits(batch, paces, most, self._least):
                shares = self._fit_state_shares(samples)
                if shares is not None:
                    return MovedShares(samples, shares, self._seconds(shares))
        return None

    def _fit_state_shares(self, samples: Sequence[int]) -> tuple[float, ...] | None:
        """Return state shares with as little moved as possible; None without room for all state."""
        most = [USED_ROOM_SHARE * min(room, self._largest) for room in self._room(samples)]
        if min(most) < 0 or sum(most) < 1.0:
            return None
        kept = [min(share, limit) for share, limit in zip(self._shares, most)]
        free = [limit - share for limit, share in zip(most, kept)]
        left = 1.0 - sum(kept)
        shares = tuple(k + left * f / sum(free) if left > 0 else k for k, f in zip(kept, free))
        return shares if is_within_memory(self._expected(samples, shares).workers) else None

    @property
    def _largest(self) -> float:
        """Largest share that the plan's collectives support."""
        forms = self._plan.collectives
        return forms.padding / len(self._shares) if forms.is_padded else 1.0

    def _room(self, samples: Sequence[int]) -> list[float]:
        """Return the share of the state fitting each device next to samples; negative if the
        samples alone do not fit."""
        found = []
        expected = self._expected(samples, self._shares).workers
        for worker, share, slope in zip(expected, self._shares, self._slopes):
            free = worker.memory_limit_bytes - (worker.peak_bytes - slope * share)
            found.append(free / slope if slope else (1.0 if free >= 0 else -1.0))
        return found

    def _bytes_per_share(self) -> list[float]:
        """Return each device's peak with all of the state, less the peak with none."""
        ranks = len(self._shares)
        equal, half = (1.0 / ranks,) * ranks, (ranks + 1) // 2
        other = (1.0 / half,) * half + (0.0,) * (ranks - half)
        samples = [worker.samples for worker in self._plan.workers]
        one, two = (self._expected(samples, shares).workers for shares in (equal, other))
        return [
            max(0.0, (b.peak_bytes - a.peak_bytes) / (after - before))
            for a, b, before, after in zip(one, two, equal, other)
        ]

    def _expected(self, samples: Sequence[int], shares: Sequence[float]) -> Prediction:
        return predict(self._profile, with_shares(with_samples(self._plan, samples), shares))

    def _seconds(self, shares: Sequence[float]) -> float:
        """Estimate the time of a move as a reduction with equal messages between ranks."""
        every = zip(shares, self._shares, self._slopes)
        most = max(abs(after - before) * slope for after, before, slope in every)
        ranks = len(shares)
        workers = self._plan.workers
        wire = build_link_model(
            self._profile, count_devices_by_host((w.host, w.device_class) for w in workers)
        )
        form = self._plan.collectives.reduce
        size = most * ranks / (ranks - 1)
        return wire.seconds("reduce", "native" if form == "padded" else form, "all", size)


def predict_rebalanced_plan(profile: Profile, plan: Plan) -> Plan:
    """Return the plan after a run's first steps, if devices are as fast as profiled."""
    if len(plan.stages) > 1 or len(plan.workers) == 1 or plan.prediction is None:
        return plan
    rebalancer = Rebalancer(
        plan,
        PredictedSplitLimits(profile, plan),
        steps=WINDOW_STEPS,
        read_per_s=compute_host_read_rates(profile),
        idle=idle_paces(profile, plan),
    )
    times = {worker.device: worker.busy_s for worker in plan.prediction.workers}
    for _ in range(WINDOW_STEPS):
        change = rebalancer.observe([times[worker.device] for worker in plan.workers])
        if change is not None:
            resplit = with_samples(plan, change.samples)
            return resplit.model_copy(update={"prediction": predict(profile, resplit)})
    return plan


def with_shares(plan: Plan, shares: Sequence[float]) -> Plan:
    """Return a one-stage plan with new state shares and no prediction."""
    (stage,) = plan.stages
    workers = tuple(
        worker.model_copy(update={"state_share": share})
        for worker, share in zip(stage.workers, shares, strict=True)
    )
    changed = stage.model_copy(update={"workers": workers})
    return plan.model_copy(update={"stages": (changed,), "prediction": None, "reasons": None})
