"""Counts of tokens and of floating-point operations in a trainer's log and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpumix.engine.engine import Engine

ALL = "all"  # of `TrainingArguments.include_num_input_tokens_seen`


class TokenCounts:
    """Trainer part counting tokens of this rank's samples; transformers adds up the ranks."""

    args: Any
    model: Any
    state: Any
    accelerator: Any
    _engine: Engine | None
    _flops_per_token: int

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations by the parameter count of the full model, padding included."""
        tokens = self._counted(inputs).get(self._main_input)
        return self._flops_per_token * (tokens.numel() if tokens is not None else 0)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count tokens seen. "all" counts padding as in the global batch, whose samples have the
        width of the longest; ranks pad to the longest of their own samples."""
        counted = self._counted(inputs)
        tokens = counted.get(self._main_input)
        if self.args.include_num_input_tokens_seen != ALL or tokens is None:
            super()._track_num_input_tokens(counted)  # type: ignore[misc]
            return
        rows, elements = len(tokens), tokens.shape[1:].numel()
        own = torch.tensor([[rows, elements]], device=self.args.device)
        of_ranks = self.accelerator.gather(own)
        self.state.num_input_tokens_seen += int(of_ranks[:, 0].sum() * of_ranks[:, 1].max())

    @property
    def _main_input(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    def _counted(self, inputs: Any) -> dict[str, Any]:
        """Return this rank's samples, or none if another rank counts them: all stages, and all
        ranks of a tensor-parallel group, have equal samples."""
        assert self._engine is not None
        plan, rank = self._engine.plan, self._engine.comm.rank
        stage = plan.stages_of(rank)[0]
        if stage == 0 and plan.get_tp_group(rank, stage)[0] == rank:
            return dict(inputs)
        return {name: t[:0] if isinstance(t, Tensor) else t for name, t in inputs.items()}


def flops_per_token(model: Any) -> int:
    """Return transformers' count: 6 for each parameter outside embeddings."""
    if not hasattr(model, "num_parameters"):
        return 0
    return 6 * int(model.num_parameters(exclude_embeddings=True))
