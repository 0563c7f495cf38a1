"""Actions of a trainer after a step, equal on all ranks: a callback may request an action on a
single rank, which would then wait for the rest in vain when stopping, saving or evaluating."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.hardware.runtime import is_gpu

CONTROL_FLAGS = (
    "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log",
)  # fmt: skip


class ControlSynchronizer:
    """Flags of transformers' `TrainerControl`, set on all ranks once any rank sets them."""

    def agree(self, control: Any) -> None:
        """Set flags set on any rank. Collective; does not wait for GPUs."""
        if self._comm.world == 1:
            return
        flags = torch.tensor([getattr(control, name) for name in CONTROL_FLAGS], dtype=torch.uint8)
        self._comm.start_all_reduce(flags, "a trainer's control flags", flags=True).wait()
        for name, told in zip(CONTROL_FLAGS, flags.tolist(), strict=True):
            setattr(control, name, bool(told))

    @cached_property
    def _comm(self) -> Communicator:
        """Communicator between hosts of all ranks. Collective, the first time."""
        if not is_gpu(get_group_device()):
            return make_communicator(torch.device("cpu"))
        group, rank, world = dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size()
        return Communicator(group, rank=rank, world=world)
