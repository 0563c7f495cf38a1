"""Optimizers that transformers makes by name, where gpumix has its own."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from gpumix.engine.optimizers.adamw_8bit import AdamW8bit

# Stock trainers take bitsandbytes' for them; `paged` is the plan's choice here.
ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


class OptimizerChoice:
    """The choice of an optimizer by `optim` of a trainer's arguments."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return class and settings; of AdamW in 8 bits one that fits any plan."""
        if args.optim not in ADAMW_8BIT_NAMES:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW8bit, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
