"""What a trainer does after a step, the same on all ranks: a callback may ask for it on one alone,
and ranks that stop, save or evaluate by themselves would wait for the others in vain."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from gpumix.engine.comm import Communicator
from gpumix.engine.groups import all_ranks, device_of_group
from gpumix.hardware.runtime import is_gpu

FLAGS = (
    "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log",
)  # fmt: skip


class AgreedControl:
    """Flags of transformers' `TrainerControl`: set on all ranks as soon as one sets them."""

    def agree(self, control: Any) -> None:
        """Set what any rank has set. Collective; no GPU is waited for."""
        if self._comm.world == 1:
            return
        own = torch.tensor([float(getattr(control, name)) for name in FLAGS])
        table = self._comm.exchanged(own, "comparison of a trainer's control flags")
        for name, told in zip(FLAGS, table.T.tolist(), strict=True):
            setattr(control, name, any(told))

    @cached_property
    def _comm(self) -> Communicator:
        """Of all ranks' hosts. Collective, the first time."""
        if not is_gpu(device_of_group()):
            return all_ranks(torch.device("cpu"))
        group, rank, world = dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size()
        return Communicator(group, rank=rank, world=world)
