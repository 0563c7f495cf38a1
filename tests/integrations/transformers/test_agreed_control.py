"""A callback that sets a flag on one rank sets it on all."""

from __future__ import annotations

import torch.distributed as dist
from transformers import TrainerControl

from gpumix.integrations.transformers.control import CONTROL_FLAGS, ControlSynchronizer
from helpers.processes.harness import run_ranks


def _flags() -> list[list[bool]]:
    found, agreed = [], ControlSynchronizer()
    for stops, saves in ((False, False), (dist.get_rank() == 1, False), (False, True)):
        control = TrainerControl(should_training_stop=stops, should_save=saves)
        agreed.agree(control)
        found.append([getattr(control, name) for name in CONTROL_FLAGS])
    return found


def test_ranks_agree_on_each_flag():
    first, second = run_ranks(_flags, 2)
    assert first == second
    nothing = [False] * len(CONTROL_FLAGS)
    assert first[0] == nothing
    assert [n for n, told in zip(CONTROL_FLAGS, first[1]) if told] == ["should_training_stop"]
    assert [n for n, told in zip(CONTROL_FLAGS, first[2]) if told] == ["should_save"]


def test_one_process_asks_nobody():
    control = TrainerControl(should_save=True)
    ControlSynchronizer().agree(control)
    assert control.should_save and not control.should_training_stop
