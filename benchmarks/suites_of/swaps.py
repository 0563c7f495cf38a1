"""gpumix's classes in the place of those that a suite tests.

Each function is called before the tests are imported, with what is to be called whenever a test
makes an object of gpumix's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Note = Callable[[], None]


def _noted(made: type, note: Note) -> None:
    begin = made.__init__  # type: ignore[misc]

    @wraps(begin)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note()
        begin(self, *args, **kwargs)

    made.__init__ = noted  # type: ignore[misc]


def plan_by_hands() -> None:
    """Measure nothing: two micro-batches on one rank, unlike shares on two, the model whole."""
    from torch import nn

    from gpumix.integrations.common import plan_and_shard
    from gpumix.schema.plan.plan import Plan
    from scripts_of.running import plan_by_hand

    def planned(model: nn.Module, training: plan_and_shard.TrainingSetup, *_: Any) -> Plan:
        return plan_by_hand("E" if plan_and_shard.get_world_size() == 1 else "D", model, training)

    plan_and_shard._measure_and_plan = planned


def of_transformers(note: Note) -> None:
    import transformers
    import transformers.trainer

    from gpumix.integrations.transformers import Seq2SeqTrainer, Trainer

    for ours in (Trainer, Seq2SeqTrainer):
        setattr(transformers, ours.__name__, ours)
        _noted(ours, note)


def of_accelerate(note: Note) -> None:
    import accelerate
    import transformers.trainer  # noqa: F401 - which keeps Accelerate's own

    import gpumix
    import gpumix.integrations.transformers

    _noted(gpumix.Accelerator, note)
    accelerate.Accelerator = gpumix.Accelerator
    accelerate.accelerator.Accelerator = gpumix.Accelerator


def of_trl(note: Note) -> None:
    import trl

    from gpumix.integrations.trl import SFTTrainer

    _noted(SFTTrainer, note)
    trl.SFTTrainer = SFTTrainer


def of_lightning(note: Note) -> None:
    """A trainer without a strategy of its own gets gpumix's."""
    import lightning.pytorch

    from gpumix.integrations.lightning import GpumixStrategy

    _noted(GpumixStrategy, note)
    trainer = lightning.pytorch.Trainer
    begin = trainer.__init__

    @wraps(begin)
    def planned(self: Any, *args: Any, **kwargs: Any) -> None:
        devices, strategy = kwargs.get("devices", "auto"), kwargs.get("strategy", "auto")
        if strategy == "auto" and devices in ("auto", 1) and not kwargs.get("barebones"):
            kwargs["strategy"] = GpumixStrategy()
        begin(self, *args, **kwargs)

    trainer.__init__ = planned


SWAPS = {
    "transformers": of_transformers,
    "accelerate": of_accelerate,
    "trl": of_trl,
    "lightning": of_lightning,
}
