"""Subject of a measurement: a model, its optimizer, and a shape of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpumix.engine.loss.reduction import Objective
from gpumix.engine.sharding.unit_discovery import check_trainable
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.compute.sweep import MakeBatch

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Workload:
    """Subject of a measurement: a model and a shape of work.

    Args:
        build: makes the model, optionally without its weights.
        make_batch: makes a batch of a number of samples, on the host.
        optimizer_of: makes the optimizer for given parameters.
        sequence_length: tokens of a sample.
        global_batch: the most samples measured at once.
        budget_s: the time limit for measuring one device.
        loss, units, tensor: as for `engine.prepare`.
        settings: compute settings of each class.
        degrees: the tensor-parallel degrees of each class.
        sequence: without and with sequence parallelism.
        requires_tensor_parallel: raise an error if no degree can divide the model.
    """

    build: Callable[[], nn.Module]
    make_batch: MakeBatch
    optimizer_of: OptimizerOf
    sequence_length: int
    global_batch: int
    budget_s: float
    settings: ClassSettings
    loss: Objective | None = None
    units: tuple[str, ...] = ()
    tensor: Mapping[str, Any] | None = None
    degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sequence: tuple[bool, ...] = (False, True)
    requires_tensor_parallel: bool = False

    def model(self) -> nn.Module:
        """Build the model.

        Raises:
            InputError: it has nothing to train.
        """
        model = self.build()
        check_trainable(model)
        return model
