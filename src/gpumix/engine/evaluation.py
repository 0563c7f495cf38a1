"""Engine that computes losses and outputs without gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpumix.engine.batch.batch_split import Loss, MicroBatchTask
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.model.rng import preserve_torch_rng, use_eval_mode
from gpumix.engine.rehearsal.rehearsing_engine import RehearsingEngine
from gpumix.engine.rehearsal.samples import is_true_on_any_rank
from gpumix.engine.schedule.layered_schedule import Schedule
from gpumix.engine.schedule.remote_stage_values import refuse_without_values
from gpumix.engine.sharding.bucket import release_buckets

Function = Callable[[nn.Module, Any], Any]


class EvaluatingEngine(RehearsingEngine):
    """Engine base class for evaluations."""

    _schedule: Schedule
    _heads: Sequence[ChunkedCrossEntropy]
    _evaluation_repeats: bool | None = None  # units, as far as known

    @abstractmethod
    def _cut(
        self, batch: Any, rows: Sequence[range], objective: Function | None = None
    ) -> list[MicroBatchTask]: ...

    @abstractmethod
    def _exchange_losses(
        self, results: list[Loss], scale: torch.Tensor, *, in_step: bool = True
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]: ...

    def evaluate(self, batch: Any, samples: int | None = None) -> torch.Tensor:
        """Compute the loss of a global batch without gradients and dropout; see `step`.

        All ranks use the buffers of `state_dict`.

        Args:
            batch: this rank's samples, any number; with several stages its share of a batch of
                `samples`, as returned by `gpumix.evaluation_batches`.
            samples: of the global batch; default: the plan's.
        """
        self.look_back()
        self.settle(batch, samples)
        with use_eval_mode(self.model), self._in_step(trains=False):
            rows = self._rows_given(batch, samples)
            results = self._forward_only(self._state.objective, batch, rows, is_trial=False)
            table, gradient_scale = self._exchange_losses(results, torch.ones(()), in_step=False)
            gradient_scale()
        self._check_evaluated()
        return table[:, 0].sum() / table[:, 1].sum()

    def outputs(
        self,
        function: Function,
        batch: Any,
        samples: int | None = None,
        *,
        as_trained: bool = False,
    ) -> dict[range, Any]:
        """Run `function` on this rank's samples by micro-batch, without gradients and dropout.
        Collective.

        Args:
            function: called with the model and a micro-batch.
            batch, samples: as in `evaluate`.
            as_trained: use the dropout of the next step, whose batch this is, as in `step`; on a
                rank without samples, `batch` may have others as a stand-in.

        Returns:
            The results by the places of each micro-batch's samples: in `batch`, or with several
                stages and with `as_trained` in the global batch. With several stages, ranks of the
                last stage have results, and each rank of a tensor-parallel group has the same.
        """
        rows = (as_trained and self._rows_of_step(samples)) or self._rows_given(batch, samples)
        made: dict[range, Any] = {}

        def keep(of: range, compute: Callable[[], Any]) -> Loss:
            made[of] = compute()
            for leaf in tree_leaves(made[of]):
                refuse_without_values(leaf, "output")
            return torch.zeros(()), torch.zeros(())

        with ExitStack() as stack, self._in_step(trains=as_trained):
            if not as_trained:
                stack.enter_context(use_eval_mode(self.model))
            for head in self._heads:
                stack.enter_context(head.whole())
            self._forward_only(function, batch, rows, keep, as_trained=as_trained, is_trial=False)
        if not as_trained:
            self._check_evaluated()
        return {of: made[of] for of in sorted(made, key=lambda of: of.start)}

    def _forward_only(
        self,
        objective: Function,
        batch: Any,
        rows: Sequence[range],
        keep: Callable[[range, Callable[[], Any]], Loss] | None = None,
        *,
        as_trained: bool = False,
        is_trial: bool = True,
    ) -> list[Loss]:
        """Run forward by micro-batch; return results of `objective`, or of `keep` around it.

        The first evaluation may call units again, after the calls of a training step; later ones
        may if the first did, which no trial shows.
        """
        cut = self._cut(batch, rows, objective)
        if keep is not None:
            cut = [
                replace(one, compute_loss=partial(keep, of, one.compute_loss))
                for of, one in zip(rows, cut)
            ]
        self.agree_on_buffers()
        self.round_ahead()
        with preserve_torch_rng(self.device), self._allow_random_draws(), torch.no_grad():
            if as_trained or self._evaluation_repeats is False:
                results = self._schedule.run_forward(cut, rows)
            else:
                results, repeats = self._schedule.run_repeatedly(
                    cut, rows, partial(is_true_on_any_rank, self)
                )
                if not is_trial and self._evaluation_repeats is None:
                    self._evaluation_repeats = repeats
        release_buckets(self._buckets)
        return results
