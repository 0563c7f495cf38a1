"""Check of a program's subclass of a trainer: most overrides work, some cannot.

Impossible overrides are refused when the trainer is made: a method never called would be lost
silently.
"""

from __future__ import annotations

from typing import Any

from gpumix.schema.errors import InputError

FIX_OVERRIDE_COMPUTE_LOSS = "override compute_loss, which is called for each micro-batch"
UNCALLED_METHODS = {
    "compute_loss_context_manager": f"{FIX_OVERRIDE_COMPUTE_LOSS}, and enter the context there",
    "autocast_smart_context_manager": "say bf16=True or fp16=True",
    "_prepare_inputs": "change the batch in the data collator, or in compute_loss",
}
LOADER_METHODS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


def is_overridden(trainer: Any, name: str, base: type) -> bool:
    """Return True if a class of the program, before `base`, overrides a method."""
    kinds = type(trainer).__mro__
    own = kinds[: kinds.index(base)]
    return any(name in vars(one) for one in own if not one.__module__.startswith("gpumix."))


def check_overrides(trainer: Any, base: type) -> None:
    """Raise InputError if a program's subclass overrides a method not called with gpumix."""
    for name, fix in UNCALLED_METHODS.items():
        if is_overridden(trainer, name, base):
            raise InputError(
                f"{name} of {type(trainer).__name__} is not called with gpumix",
                code="method-not-called",
                why="losses and predictions are computed micro-batch by micro-batch, by several "
                "devices together",
                fix=fix,
            )


def make_own_step_error(trainer: Any) -> InputError:
    """Return the error for a `training_step` that calls the model."""
    return InputError(
        f"training_step of {type(trainer).__name__} computes the step by itself",
        code="training-step-overridden",
        why="no device has the whole model: a step is what all devices compute together",
        fix=f"call super().training_step(...) in it; for a loss of your own "
        f"{FIX_OVERRIDE_COMPUTE_LOSS}",
    )
