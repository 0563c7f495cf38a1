"""Remarks on a function: slow code that no change from outside mends, by line. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumix.doctor.function.observations import Observations, OperationCounts, Site
from gpumix.doctor.function.suspects import DELAYABLE_READS, find_remade_optimizers
from gpumix.doctor.report import Remark

SITES = 3  # lines named in a message
BETWEEN_SHARE = 0.1  # fraction of a step allowed before forward passes while the GPU idles
LEAST_SAMPLES = 10  # of lines before forward passes; fewer say nothing
LINE_SHARE = 0.01  # fraction of a step above which a line before forward passes is named
MANY_OPERATIONS = 200  # per step; fewer are no loop worth a remark
SMALL_OPERATION_S = 100e-6  # of a step per operation: above, operations are not small
LOOP_SHARE = 0.5  # fraction of a step's forward operations made in loops


def remark_on_steering_reads(syncs: Sequence[Site]) -> Iterator[Remark]:
    """Remark on reads whose values cannot come late."""
    found = [one for one in syncs if one.what not in DELAYABLE_READS]
    if found:
        named = ", ".join(f"{one.place} ({one.what})" for one in found[:SITES])
        text = f"the host waits for values of the GPU that steer the code, at {named}"
        yield Remark("steering_reads", text)


def remark_on_host_gap(
    seen: Observations, lines: Sequence[Site], kernels_share: float | None = None
) -> Iterator[Remark]:
    """Remark on time before forward passes outside of loaders, unless it is short or the GPU has
    enough work meanwhile.

    Args:
        lines: running in that time, with their parts of it, in this or in another window.
    """
    share = seen.share_of(seen.between_s)
    idle_share = 1.0 - (kernels_share or 0.0)
    if min(share, idle_share) <= BETWEEN_SHARE:
        return
    whose = "of the host's time in a step" if seen.cuda else "of a step"
    known = kernels_share is not None
    gpu = f" (the GPU computes in {kernels_share:.0%} of a step)" if known else ""
    if sum(one.calls for one in lines) < LEAST_SAMPLES:
        lines = ()
    sampled_s = sum(one.seconds for one in lines)
    named = [
        f"{one.place} `{one.what}` {line_share:.0%}"
        for one in lines
        if (line_share := share * one.seconds / sampled_s) > LINE_SHARE
    ]
    yield Remark(
        "between",
        f"{share:.0%} {whose} passes between the update (or a backward pass) and the next forward "
        f"pass, in no DataLoader{gpu}{': ' if named else ''}{', '.join(named)}; write logs and "
        "files every some steps, or in a thread; have batches made ahead, by the workers of a "
        "DataLoader or by gpumix.Loader, which reads generators too",
    )


def remark_on_loops(counts: OperationCounts | None, step_s: float) -> Iterator[Remark]:
    """Remark on Python loops of small operations.

    Args:
        step_s: without waits for data and work between steps.
    """
    if counts is None or counts.total < MANY_OPERATIONS:
        return
    each_s = step_s / counts.total
    looped = sum(one.operations for one in counts.lines)
    if each_s > SMALL_OPERATION_S or looped < LOOP_SHARE * counts.forward:
        return
    named = ", ".join(
        f"{one.place} ({one.operations:,} in {one.repeats} rounds)" for one in counts.lines[:SITES]
    )
    yield Remark(
        "loop",
        f"a step takes {counts.total:,} operations of {each_s * 1e6:.0f} us each; of the "
        f"{counts.forward:,} outside of backward passes a loop of Python makes {looped:,}, at "
        f"{named}: they are too small for the hardware; use one operation for all rounds (nn.LSTM "
        "in place of a loop of nn.LSTMCell, one batched product in place of many), or "
        "torch.compile",
    )


def remark_on_remade_optimizers(seen: Observations) -> Iterator[Remark]:
    """Remark on optimizers losing their state in every step, whether that takes time or not."""
    if remade := find_remade_optimizers(seen):
        named = ", ".join(f"{one.place} ({one.name})" for one in remade)
        yield Remark(
            "remade_optimizer",
            f"an optimizer is made anew in every step, at {named}: its state is lost each time, so "
            "its moments, and with them what it trains, are not those of the algorithm",
        )
