"""Detection of devices computing wrong without an error: ranks whose gradients alone jump, and, if
the job wants it, ranks deviating on a batch computed by all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpumix.engine.comm.step_exchange import StepTable
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.gradient_fingerprint import GradientFingerprints
from gpumix.schema.plan.plan import Plan
from gpumix.train.monitor.gradient_spikes import Spike, SpikeDetector
from gpumix.train.monitor.replay_verdict import (
    Verdict,
    explain_no_replay,
    find_deviating_ranks,
    get_tolerance,
    group_comparable_ranks,
)
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.run_log.metrics import RunEvent


class CorruptionMonitor:
    """Detection on one rank.

    Attributes:
        why_not: why no batch is replayed, though the job wants it.
    """

    def __init__(self, context: RankContext, plan: Plan, engine: Engine) -> None:
        self._context = context
        self._plan = plan
        self._engine = engine
        self._spikes = SpikeDetector()
        self._counts: Sequence[float] | None = None  # of the step before
        self._every_steps = context.job.advanced.replay_steps
        self._batch: Any = None
        self.no_replay_reason = ""
        if self._every_steps and (reason := explain_no_replay(plan)):
            self._every_steps, self.no_replay_reason = 0, reason

    def after_step(self, step: int, exchanged: StepTable) -> list[RunEvent]:
        """Return the findings after `step`, in which all ranks exchanged `exchanged`. Collective
        where a batch is replayed."""
        spikes: list[Spike] = []
        if self._counts is not None:
            spikes = self._spikes.after_step(exchanged.own_norms, self._counts)
        # fp16 gradients overflow now and then: such a step is left out.
        self._counts = None if self._engine.overflowed else exchanged.counts
        told = [self._make_spike_event(one, step - 1) for one in spikes]
        if self._every_steps and (spikes or step % self._every_steps == 0):
            told += self._replay()
        return told

    def _replay(self) -> list[RunEvent]:
        ranks, plan = self._context.ranks, self._engine.plan
        prints = GradientFingerprints()
        computes = plan.workers[ranks.rank].samples > 0
        if computes and self._batch is None:
            self._batch = self._context.batch(1)
        times = self._engine.replay(self._batch if computes else None, prints.see)
        every = ranks.gather("replay", json.dumps(prints.by_bucket(times) if computes else {}))
        found = [json.loads(text) for text in every]
        wrong = [
            find_deviating_ranks(
                {rank: found[rank] for rank in same}, get_tolerance([plan.workers[r] for r in same])
            )
            for same in group_comparable_ranks(plan)
        ]
        return [self._make_verdict_event(one) for one in wrong if one is not None]

    def _make_spike_event(self, spike: Spike, step: int) -> RunEvent:
        name = self._context.ranks.names[spike.rank]
        device = self._plan.workers[spike.rank].device
        fields = asdict(spike) | {
            "device": device,
            "of_step": step,
            "times": _finite_or_none(spike.times),
        }
        return RunEvent(
            "norm-spike",
            fields,
            f"the gradient of {name} in step {step} was {spike.times:.0f} times as large as usual, "
            f"that of the others {spike.others:.1f} times: bad samples, or a device that computes "
            "wrong; advanced.replay_steps tells them apart",
        )

    def _make_verdict_event(self, wrong: Verdict) -> RunEvent:
        names = " and ".join(self._context.ranks.names[rank] for rank in wrong.ranks)
        devices = [self._plan.workers[rank].device for rank in wrong.ranks]
        fields = asdict(wrong) | {"devices": devices, "deviation": _finite_or_none(wrong.deviation)}
        who = f"{names} computes wrong" if wrong.sure else f"one of {names} computes wrong"
        return RunEvent(
            "replay",
            fields,
            f"{who}: of the same batch its gradient, from '{wrong.where}' backward, is "
            f"{wrong.deviation:.0%} off. Stop, run `gpumix check`, look at its memory errors "
            "(nvidia-smi -q -d ECC), and go on without it from a checkpoint of before",
        )


def _finite_or_none(number: float) -> float | None:
    """Return None for numbers without a form in JSON."""
    return number if math.isfinite(number) else None
