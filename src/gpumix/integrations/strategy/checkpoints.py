"""Checkpoints of a strategy: a file as Lightning's, with the whole weights, and beside it a folder
with the sharded state, which any plan on any devices goes on from.

A trainer with another strategy goes on from the file too, and this one from a file of another
strategy: the optimizer then starts with an empty state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from gpumix.hardware.memory import host_memory
from gpumix.integrations.saving import Saver
from gpumix.spec.errors import InputError
from gpumix.spec.files import remove_quietly

_log = logging.getLogger(__name__)
SUFFIX = ".gpumix"
OURS = "gpumix"  # in a checkpoint: where loaders are, which other strategies' do not know
LOADERS = "combined_loader"


class Checkpoints(ParallelStrategy):
    """A strategy whose model is saved by `saver`, once it is sharded."""

    saver: Saver | None = None
    group_sizes: Sequence[int] = ()  # parameters in each of the optimizer's groups
    _loaded_from: Path | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's, on the first rank."""
        if self.saver is None:
            return super().lightning_module_state_dict()
        return self.saver.model_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Its settings; what it keeps of the parameters is in the folder."""
        ends = list(accumulate(self.group_sizes))
        groups = [
            _settings(group) | {"params": list(range(end - size, end))}
            for group, size, end in zip(optimizer.param_groups, self.group_sizes, ends)
        ]
        return {"state": {}, "param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        folder = state_of(filepath)
        if "optimizer_states" in checkpoint and self.optimizers and self.saver is not None:
            self.saver.save(folder, checkpoint["global_step"], self.optimizers[0])
        elif self.is_global_zero:
            remove_quietly(folder)  # another file of this name had it
        loop = _loop_of(checkpoint)
        if LOADERS in loop:
            checkpoint[OURS] = loop.pop(LOADERS)
        with host_memory():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_quietly(state_of(filepath))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._loaded_from = state_of(checkpoint_path)
        with host_memory():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if OURS in checkpoint:
            _loop_of(checkpoint)[LOADERS] = checkpoint.pop(OURS)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The whole weights; those of a run that goes on come with its state."""
        assert self.lightning_module is not None and self._loaded_from is not None
        if self.lightning_module.trainer.training and self._loaded_from.is_dir():
            return
        assert self.saver is not None, "checkpoints are restored after `setup`"
        self.saver.load_weights(checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None and self._loaded_from is not None
        assert self.saver is not None
        optimizer = self.optimizers[0]
        if self._loaded_from.is_dir():
            self.saver.load(self._loaded_from, optimizer)
        else:
            _log.warning(
                "the checkpoint has no folder %s, for another strategy has saved it: weights, "
                "schedulers and progress go on, the optimizer starts with an empty state",
                self._loaded_from.name,
            )
        for saved in list(checkpoint["optimizer_states"])[:1]:
            for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update(_settings(settings))
        # Lightning looks for what loaders said when it makes them, which is done.
        self.lightning_module.trainer.fit_loop._load_combined_loader_states()


def state_of(checkpoint: Any) -> Path:
    """The folder of the state beside a checkpoint, or beside that which it links to.

    Raises:
        InputError: it is not in a file system.
    """
    if "://" in str(checkpoint):
        raise InputError(
            f"{checkpoint} is not in a file system",
            why="each rank writes and reads its part of the state in a folder beside a checkpoint",
            fix="give ModelCheckpoint a dirpath that all hosts share",
        )
    return Path(checkpoint).resolve().with_suffix(SUFFIX)


def _loop_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the loop of training saves beside the progress of its parts."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
