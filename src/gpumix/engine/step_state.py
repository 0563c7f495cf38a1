"""State of an engine that steps use and change, apart from parameters, buffers and gradients."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace

import torch

from gpumix.engine.comm.step_exchange import StepTable
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.rehearsal.loss_watch import LossWatch
from gpumix.engine.sharding.bucket import SampledGradientNorm
from gpumix.engine.sharding.mixed_precision import LossScaler
from gpumix.engine.update_guard import UpdateGuard

# Steps that can be taken back: a bad step, and a step issued before the result was known.
MAX_UNDONE_STEPS = 2


@dataclass(frozen=True)
class StepUndo:
    """Copies of the buffers, if the model has any, and of `Engine.losses_counted`, from before a
    step."""

    buffers: BufferCopies | None
    losses_counted: torch.Tensor


@dataclass
class StepState:
    """State of one engine; a trial step has its own.

    Attributes:
        rows: this rank's samples of a global batch, by micro-batch.
        objective: returns the summed loss and the count of a micro-batch.
        trims: whether padding columns are cut off.
        settled: whether the rule by which losses add up is known.
        scaler: of fp16 losses.
        losses_counted: denominator of the last step's loss, a float64 scalar on the device.
        own_norm: norm of this rank's gradients in the step.
        exchanged: values of all ranks in the last step.
        compares_samples: whether ranks that need the same samples compare them in the next step.
        steps: number of steps done.
        overflowed: whether the last step's fp16 gradients overflowed, and were dropped.
        computed: samples and padded tokens per sample of each micro-batch of the last step.
        guard: holds back bad updates.
        undos: of the last steps.
        watch: on the losses of steps.
    """

    rows: tuple[range, ...]
    objective: Objective
    trims: bool
    settled: bool
    scaler: LossScaler
    losses_counted: torch.Tensor
    own_norm: SampledGradientNorm
    exchanged: StepTable
    compares_samples: bool
    steps: int = 0
    overflowed: bool = False
    computed: list[tuple[int, int | None]] = field(default_factory=list)
    guard: UpdateGuard | None = None
    undos: tuple[StepUndo, ...] = ()
    watch: LossWatch | None = None

    def make_trial(self) -> StepState:
        """Return the state of a trial step, which no guard and no watch sees."""
        own_norm = SampledGradientNorm(self.losses_counted.device)
        return replace(self, own_norm=own_norm, scaler=copy(self.scaler), guard=None, watch=None)
