"""Warnings about jobs that train, but hardly as intended: less data than a batch, nearly all data
held out, a warm-up longer than the run.

Warnings stop no run: many begin with a trial on a handful of samples.
"""

from __future__ import annotations

from gpumix.data.core.source import Source
from gpumix.schema.job.job import Job
from gpumix.schema.units import format_count

MOST_HELD_OUT_SHARE = 0.5  # of the samples; more is a slip, such as the part to train on


def warn_of_schedule(job: Job) -> list[str]:
    """Warn of a learning rate whose peak is never reached."""
    warmup_steps = job.lr_scheduler.warmup_steps
    if warmup_steps <= job.max_steps:
        return []
    return [
        f"lr_scheduler.warmup_steps is {warmup_steps:,}, but the run has "
        f"{format_count(job.max_steps, 'step')}: the learning rate ends at "
        f"{job.optimizer.lr * job.max_steps / warmup_steps:g}, below optimizer.lr "
        f"{job.optimizer.lr:g}"
    ]


def warn_of_data(train: Source, held_out: Source, global_batch: int) -> list[str]:
    """Warn of odd data, a line per finding; nothing for a stream, whose length is unknown."""
    if train.in_order:
        return []
    count, kept = len(train), len(held_out)
    found = []
    if kept > MOST_HELD_OUT_SHARE * (count + kept):
        found.append(
            f"data.validation_split keeps {kept} of {count + kept} samples for evaluation, {count} "
            f"{'is' if count == 1 else 'are'} left to train on"
        )
    if count < global_batch:
        found.append(
            f"each step trains on the same samples several times: {count} to train on, for a "
            f"global_batch_size of {global_batch}"
        )
    return found
