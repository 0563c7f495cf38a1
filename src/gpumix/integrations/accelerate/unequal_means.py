"""Warning of numbers that a loop averages over processes with unequal numbers of samples.

A process's own mean, such as a loss computed from its outputs, counts as much as that of a process
with fewer samples. Stock loops have equal parts, and so never see the difference.
"""

from __future__ import annotations

import logging

from torch import Tensor

from gpumix.integrations.accelerate.loader import get_current_part

_LOG = logging.getLogger(__name__)
MAX_CHECKS = 16


class UnequalMeans:
    """Check of the first numbers that a loop gathers or averages.

    Args:
        world: number of processes.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._left = MAX_CHECKS

    def check(self, own: Tensor, combined: Tensor, where: str) -> None:
        """Warn once if processes with unequal numbers of samples have combined unlike numbers.

        Args:
            own: of this process.
            combined: mean over processes, or gathered values.
            where: the loop's call.
        """
        given = get_current_part()
        if not self._left or given is None or not own.is_floating_point():
            return
        if own.dim() and len(own) == max(1, given.own):
            return  # a row for each sample
        if given.own * self._world == given.samples or not own.numel():
            return
        self._left -= 1
        if bool((combined - own.flatten()[0]).abs().max() <= 1e-6 * combined.abs().max()):
            return
        self._left = 0
        _LOG.warning(
            "%s combines a number of each process, and processes have unequal parts of a batch "
            "(this process %d of %d samples): a mean of such numbers is not the mean over the "
            "batch. Gather values of samples, accelerator.gather_for_metrics(losses), or reduce "
            "sums and counts, accelerator.reduce(torch.stack([sum, count]), 'sum'); a loss that "
            "the model computes itself, model(..., labels=labels), is of the whole batch already",
            where,
            given.own,
            given.samples,
        )
