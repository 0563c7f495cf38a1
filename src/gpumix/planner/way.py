"""What a plan of several stages is put together from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from gpumix.cost.wire import forms_for
from gpumix.planner.arrange import Group, Row
from gpumix.spec.dtypes import communication_dtype
from gpumix.spec.plan import Mode, Plan, Schedule, Stage, Worker, ZeroStage
from gpumix.spec.profile import Profile

Cut = tuple[int, ...]
"""The call behind each stage's last one."""

Deal = tuple[int, ...]
"""Micro-batches of each worker of a group."""

Counts = tuple[Deal, ...]
"""The same of all groups."""


@dataclass(frozen=True)
class Way:
    """All but where the model is cut: a row of groups, each of which has `rounds` stages (more than
    one where they are interleaved), a mode for each stage, a schedule and a micro-batch size."""

    row: Row
    modes: tuple[Mode, ...]
    schedule: Schedule
    micro_batch: int
    rounds: int = 1

    @property
    def stages(self) -> tuple[Group, ...]:
        """The devices of each stage."""
        return self.row * self.rounds

    @cached_property
    def classes(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Of each group, how many devices of each class it has."""
        return tuple(
            tuple(sorted(Counter(device.device_class for device in group).items()))
            for group in self.row
        )


def assemble_stages(
    profile: Profile,
    batch: int,
    way: Way,
    cut: Cut,
    counts: Counts,
    *,
    strategy: str,
    zero_stage: ZeroStage = 0,
    waves: int = 1,
) -> Plan:
    """The plan without its prediction. Workers of a stage have equal shares of its state.

    Args:
        batch: samples of a step.
        counts: micro-batches of each worker.

    Raises:
        ValueError: waves that do not cut the micro-batches of all stages alike.
    """
    model = profile.model
    stages = []
    for number, (begin, end) in enumerate(pairwise((0, *cut))):
        group, needs = way.stages[number], model.needs_of(begin, end)
        samples = _samples(counts[number % len(way.row)], way.micro_batch, batch)
        classes = {d.device_class: profile.of_class(d.device_class) for d in group}
        workers = tuple(
            Worker(
                device=device.id,
                device_class=device.device_class,
                host=device.host,
                samples=n,
                micro_batch=min(way.micro_batch, n),
                state_share=1.0 / len(group),
                mode=way.modes[number],
                compile=classes[device.device_class].compiled,
                compute_dtype=classes[device.device_class].compute_dtype,
            )
            for device, n in zip(group, samples)
        )
        stages.append(
            Stage(
                units=model.calls[begin:end], workers=workers, takes=needs.outputs, root=needs.root
            )
        )
    used = sorted({device.device_class for group in way.row for device in group})
    return Plan(
        strategy=strategy,
        model=model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=batch,
        communication_dtype=communication_dtype(profile.of_class(n).compute_dtype for n in used),
        stages=tuple(stages),
        schedule=way.schedule,
        waves=waves,
        zero_stage=zero_stage,
        collectives=forms_for(profile),
        emulated=any(profile.cluster.class_named(name).emulated for name in used),
        estimated=tuple(name for name in used if profile.of_class(name).estimated),
    )


def _samples(counts: Sequence[int], micro_batch: int, batch: int) -> list[int]:
    """Samples of so many micro-batches each; the last of all may be smaller."""
    samples = [count * micro_batch for count in counts]
    last = max(place for place, count in enumerate(counts) if count)
    samples[last] -= sum(samples) - batch
    return samples
