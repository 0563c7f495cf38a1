"""Checkpoints of a strategy: a file in Lightning's format with full weights, and next to the file a
folder with the sharded state, for a resume by any plan on any devices.

Another strategy can resume from the file, and this strategy from another's file: the optimizer then
starts with an empty state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.common.saver import Saver
from gpumix.schema.errors import InputError
from gpumix.schema.files import remove_quietly

_log = logging.getLogger(__name__)
STATE_SUFFIX = ".gpumix"
LOADERS_STATE_KEY = (
    "gpumix"  # key of the loaders' state in a checkpoint, hidden from other strategies
)
COMBINED_LOADER_KEY = "combined_loader"


class CheckpointStrategy(ParallelStrategy):
    """Strategy whose model is saved by `saver`, once sharded."""

    saver: Saver | None = None
    group_sizes: Sequence[int] = ()  # parameters per optimizer group
    _loaded_from: Path | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict, on the first rank."""
        if self.saver is None:
            return super().lightning_module_state_dict()
        return self.saver.gather_model_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's settings; its state by parameter is in the folder."""
        ends = list(accumulate(self.group_sizes))
        groups = [
            _drop_params(group) | {"params": list(range(end - size, end))}
            for group, size, end in zip(optimizer.param_groups, self.group_sizes, ends)
        ]
        return {"state": {}, "param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        folder = get_state_folder(filepath)
        if "optimizer_states" in checkpoint and self.optimizers and self.saver is not None:
            self.saver.save(folder, checkpoint["global_step"], self.optimizers[0])
        elif self.is_global_zero:
            remove_quietly(folder)  # left by an earlier file of this name
        loop = _get_fit_loop_state(checkpoint)
        if COMBINED_LOADER_KEY in loop:
            checkpoint[LOADERS_STATE_KEY] = loop.pop(COMBINED_LOADER_KEY)
        with count_as_host_memory():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_quietly(get_state_folder(filepath))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._loaded_from = get_state_folder(checkpoint_path)
        with count_as_host_memory():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if LOADERS_STATE_KEY in checkpoint:
            _get_fit_loop_state(checkpoint)[COMBINED_LOADER_KEY] = checkpoint.pop(LOADERS_STATE_KEY)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights; on a resume weights come with the sharded state instead."""
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
                group.update(_drop_params(settings))
        # Lightning reads loaders' states when making loaders, which has already happened.
        self.lightning_module.trainer.fit_loop._load_combined_loader_states()


def get_state_folder(checkpoint: Any) -> Path:
    """Return the state's folder next to a checkpoint, or next to the target of a link.

    Raises:
        InputError: the checkpoint is not in a file system.
    """
    if "://" in str(checkpoint):
        raise InputError(
            f"{checkpoint} is not in a file system",
            code="checkpoint-not-in-file-system",
            why="each rank writes and reads its part of the state in a folder beside a checkpoint",
            fix="give ModelCheckpoint a dirpath that all hosts share",
        )
    return Path(checkpoint).resolve().with_suffix(STATE_SUFFIX)


def _get_fit_loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the training loop itself, without the progress of its parts."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _drop_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
