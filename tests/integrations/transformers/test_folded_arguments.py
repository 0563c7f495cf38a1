"""Arguments of a trainer while the loop runs with one batch per step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import TrainingArguments

from gpumix.integrations.transformers.given_arguments import FoldedArgumentsMixin


class Loop(FoldedArgumentsMixin):
    def __init__(self, args: Any) -> None:
        self.args = args

    def call(self, change: Any) -> None:
        self._call_callbacks(lambda event, args: change(args), "on_step_end", self.args)


def loop(tmp_path: Any) -> Loop:
    return Loop(
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            use_cpu=True,
            report_to="none",
        )
    )


def test_changes_of_callbacks_reach_the_loop_and_changes_of_the_loop_callbacks(tmp_path):
    trainer = loop(tmp_path)
    given, seen = trainer.args, []
    with trainer._folded():
        trainer.call(lambda args: setattr(args, "max_grad_norm", 0.05))
        trainer.call(lambda args: setattr(args, "alpha", 1))
        assert (trainer.args.max_grad_norm, trainer.args.alpha) == (0.05, 1)
        trainer.args.alpha = 2
        trainer.call(lambda args: seen.append((args.alpha, args.gradient_accumulation_steps)))
        assert trainer.args.gradient_accumulation_steps == 1
        assert trainer.args.per_device_train_batch_size == 6
        trainer.args.alpha = 3
    assert seen == [(2, 3)]
    assert trainer.args is given
    assert (given.alpha, given.gradient_accumulation_steps) == (3, 3)


def test_a_loss_sees_the_given_counts_and_its_changes_stay(tmp_path):
    trainer = loop(tmp_path)
    with trainer._folded():
        with trainer._given_counts():
            assert trainer.args.gradient_accumulation_steps == 3
            assert trainer.args.per_device_train_batch_size == 2  # one process
            trainer.args.alpha = 1
        assert trainer.args.alpha == 1
        assert trainer.args.gradient_accumulation_steps == 1
