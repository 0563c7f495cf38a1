"""Checkpoints of a trainer: transformers' folders containing the sharded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpumix.engine.engine import Engine
from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.integrations.common.run_recorder import TrainingRecorder
from gpumix.integrations.common.saver import Saver
from gpumix.integrations.transformers.given_arguments import FoldedArgumentsMixin
from gpumix.train.run_log.run_files import SCRIPT_FOLDER


class CheckpointMixin(FoldedArgumentsMixin):
    """Saving and loading part of a trainer."""

    state: Any
    optimizer: Any
    lr_scheduler: Any
    _engine: Engine | None
    _record: TrainingRecorder
    _saver: Saver
    model: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does; all ranks call it."""
        if self._engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        saver = self._saver
        gather = saver.gather_model_state if _internal_call else saver.request_model_state
        state = gather(quantised=not hasattr(self.model, "peft_config"))
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _end(self) -> None:
        """End the training."""
        if self._engine is not None:
            self._engine.look_back()
        self._record.finish(self.state.global_step)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._unfolded():
            super()._save(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        step = self.state.global_step
        self._record.checkpoint(step, Path(self.args.output_dir) / f"checkpoint-{step}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._saver.save(Path(output_dir), self.state.global_step, self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Initialize with the given arguments, to compare with a checkpoint's; return the epochs
        and the steps done in the current epoch."""
        with self._unfolded():
            epochs, batches = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        return epochs, batches // self._accumulation_steps

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights if the model is not sharded; otherwise only without a sharded state, which
        brings the weights later. Weights in files are not read for those of a sharded state."""
        has_state = (Path(resume_from_checkpoint) / SCRIPT_FOLDER).is_dir()
        if self._engine is not None:
            if not has_state:
                self._saver.load(Path(resume_from_checkpoint), None)
            return
        given = self.model if model is None else model
        in_files = any(map(has_source, given.parameters()))
        if in_files and not hasattr(given, "peft_config"):  # only adapters are loaded into those
            if has_state:
                return
            read_all_values(given)
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._saver.load(Path(checkpoint), self.optimizer)
        path = Path(checkpoint) / "scheduler.pt"
        if path.is_file():
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
            rates = self.lr_scheduler.get_last_lr()
            for group, rate in zip(self.optimizer.param_groups, rates):
                group["lr"] = rate

    def _load_best_model(self) -> None:
        self._saver.load(Path(self.state.best_model_checkpoint), None)
