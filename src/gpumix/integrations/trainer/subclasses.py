"""What a program's own subclass of a trainer changes: most of it works as ever, some cannot.

What cannot is refused when the trainer is made: a method that nobody calls would leave out what it
was written for without a word.
"""

from __future__ import annotations

from typing import Any

from gpumix.spec.errors import InputError

LOSSES = "override compute_loss, which is called for each micro-batch"
NOT_CALLED = {
    "compute_loss_context_manager": f"{LOSSES}, and enter the context there",
    "autocast_smart_context_manager": "say bf16=True or fp16=True",
    "_prepare_inputs": "change the batch in the data collator, or in compute_loss",
}
LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


def overrides(trainer: Any, name: str, base: type) -> bool:
    """Whether a class of the program, before `base`, has its own method of that name."""
    kinds = type(trainer).__mro__
    own = kinds[: kinds.index(base)]
    return any(name in vars(one) for one in own if not one.__module__.startswith("gpumix."))


def refuse_not_called(trainer: Any, base: type) -> None:
    """
    Raises:
        InputError: the program overrides what is not called with gpumix.
    """
    for name, fix in NOT_CALLED.items():
        if overrides(trainer, name, base):
            raise InputError(
                f"{name} of {type(trainer).__name__} is not called with gpumix",
                why="losses and predictions are computed micro-batch by micro-batch, by several "
                "devices together",
                fix=fix,
            )


def computes_by_itself(trainer: Any) -> InputError:
    """A `training_step` calls the model."""
    return InputError(
        f"training_step of {type(trainer).__name__} computes the step by itself",
        why="no device has the whole model: a step is what all devices compute together",
        fix=f"call super().training_step(...) in it; for a loss of your own {LOSSES}",
    )
