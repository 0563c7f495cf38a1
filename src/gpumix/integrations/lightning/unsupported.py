"""Refusals of trainer settings without a meaning under a plan, before any computation."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from gpumix.integrations.common.plan_and_shard import get_world_size
from gpumix.schema.errors import InputError

WHY_FULL_PARAMETERS = "it looks at whole parameters, and a rank has pieces of them"
THAWS = "it thaws parameters while training, and the state of frozen ones is stored nowhere"
FREEZE = "freeze what is not trained before the module is given to the trainer"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
UNSUPPORTED_CALLBACKS = {  # and classes made of them: why, fix
    "StochasticWeightAveraging": (WHY_FULL_PARAMETERS, "leave it out"),
    "WeightAveraging": (WHY_FULL_PARAMETERS, "leave it out"),
    "EMAWeightAveraging": (WHY_FULL_PARAMETERS, "leave it out"),
    "ModelPruning": (WHY_FULL_PARAMETERS, "leave it out"),
    "BaseFinetuning": (THAWS, FREEZE),
    "BatchSizeFinder": (
        "no plan is taken that does not fit, and the plan chooses micro-batches",
        "leave it out",
    ),
}


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raise InputError if a setting of trainer or module has no meaning here."""
    for what, why, fix in _find_unsupported(trainer, module):
        raise InputError(
            f"{what} has no meaning with gpumix",
            code="argument-without-meaning",
            where="Trainer",
            why=why,
            fix=fix,
        )


def _find_unsupported(trainer: Trainer, module: LightningModule) -> Any:
    """Yield (what, why, fix) of each refused setting."""
    if not module.automatic_optimization:
        yield (
            "manual optimization",
            "forward and backward of a step are one, over all micro-batches and ranks",
            "leave automatic_optimization as it is; for a loop of your own see gpumix.Accelerator",
        )
    if is_overridden("backward", module, LightningModule):
        yield (
            f"{type(module).__name__}.backward",
            "the engine goes backward unit by unit",
            "leave it out",
        )
    for step in STEPS:
        if _takes_iterator(getattr(module, step)):
            yield (
                f"{step}(dataloader_iter)",
                "the plan cuts each batch into micro-batches",
                f"{step}(self, batch, batch_idx)",
            )
    if getattr(module, "_compiler_ctx", None) is not None:
        yield (
            "a module that was compiled as a whole",
            "a unit's boundary is where micro-batches stop",
            "GpumixStrategy(torch_compile=True)",
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        yield (
            "sync_batchnorm",
            "batch norm is that of a micro-batch, whose size is the plan's affair",
            "leave it out",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in UNSUPPORTED_CALLBACKS:
                yield (
                    f"the callback {type(callback).__name__}",
                    *UNSUPPORTED_CALLBACKS[kind.__name__],
                )
    devices = trainer._accelerator_connector._devices_flag
    asked = devices if isinstance(devices, int) else len(devices)
    if get_world_size() == 1 and asked * trainer._accelerator_connector._num_nodes_flag > 1:
        yield (
            f"one process for {asked} devices",
            "gpumix trains with one process for each device, of unlike numbers on each host",
            f"start the script with `gpumix launch SCRIPT`, or torchrun --nproc-per-node {asked}",
        )


def _takes_iterator(step: Any) -> bool:
    """Return True if a step reads batches itself; False for an unknown signature (a mock)."""
    try:
        return bool(is_param_in_hook_signature(step, "dataloader_iter", explicit=True))
    except TypeError:
        return False
