"""What `TrainingArguments` mean here: those that have no meaning are refused, none is ignored.

The samples of a step are those of all devices together: per_device_train_batch_size times
gradient_accumulation_steps times processes. Who computes how many of them, in micro-batches of what
size, is the plan's affair.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from gpumix.integrations.hosted import precision_of_weights
from gpumix.spec.dtypes import Precision
from gpumix.spec.errors import InputError
from gpumix.spec.space import EVERYTHING, Space

PLANNED = "leave it out: the plan decides that for each device by itself"
OURS = "leave it out: gpumix sends what has to be sent itself"
DIVIDED = "leave it out: the plan divides parameters, gradients and optimizer state"
NO_MEANING = {
    "fsdp": DIVIDED,
    "deepspeed": DIVIDED,
    "parallelism_config": PLANNED,
    "auto_find_batch_size": "leave it out: no plan is taken that does not fit",
    "average_tokens_across_devices": "leave it out: losses are summed over all devices and divided "
    "by their number, so that the result does not depend on the devices",
    "use_liger_kernel": "leave it out: kernels are chosen for each class of devices, and checked",
    "liger_kernel_config": "leave it out: kernels are chosen for each class of devices",
    "bf16_full_eval": "leave it out: evaluations compute as the training does",
    "fp16_full_eval": "leave it out: evaluations compute as the training does",
    "torch_empty_cache_steps": PLANNED,
    "torch_compile_backend": "leave it out: `torch_compile` compiles each block",
    "torch_compile_mode": "leave it out: `torch_compile` compiles each block",
    "ddp_find_unused_parameters": OURS,
    "ddp_bucket_cap_mb": OURS,
    "ddp_broadcast_buffers": OURS,
    "ddp_static_graph": OURS,
    "eval_use_gather_object": "leave it out: predictions of any shape are gathered as tensors",
}
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
SAMPLERS = ("random", "sequential", "group_by_length")
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def refuse_without_meaning(args: Any) -> None:
    """
    Raises:
        InputError: an argument is set that has no meaning here, or a batch has no samples.
    """
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise InputError(
                f"{name}={getattr(args, name)}: a batch without samples trains nothing",
                where="TrainingArguments",
                fix="give 1 or more",
            )
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    for name, fix in NO_MEANING.items():
        given = getattr(args, name, None)
        if name in defaults and given and given != defaults[name]:
            raise _refused(f"{name}={given!r}", fix)
    if not args.average_tokens_across_devices:
        raise _refused(
            "average_tokens_across_devices=False", NO_MEANING["average_tokens_across_devices"]
        )
    if args.n_gpu > 1:
        raise InputError(
            f"one process has {args.n_gpu} GPUs",
            why="gpumix trains with one process for each device",
            fix="start the script with `gpumix launch SCRIPT`, or with torchrun --nproc-per-node "
            f"{args.n_gpu}",
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise _refused(f"accelerator_config={{'{name}': ...}}", PLANNED)
    if args.train_sampling_strategy not in SAMPLERS:
        raise _refused(
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            f"take one of {', '.join(SAMPLERS)}",
        )


def _refused(what: str, fix: str) -> InputError:
    return InputError(f"{what} has no meaning with gpumix", where="TrainingArguments", fix=fix)


def folded(args: Any) -> Any:
    """A copy by which one batch is one step: the plan cuts it into micro-batches."""
    own = copy.copy(args)
    own.per_device_train_batch_size *= own.gradient_accumulation_steps
    own.gradient_accumulation_steps = 1
    own.average_tokens_across_devices = False  # a loss of one micro-batch is nobody else's affair
    for name in CHECKPOINTING:
        if getattr(own, name, None):
            setattr(own, name, False)
    return own


def space_of(args: Any) -> Space:
    """What plans may use: who asks for checkpointing of activations has them computed again."""
    if any(getattr(args, name, None) for name in CHECKPOINTING):
        return EVERYTHING.model_copy(update={"recompute": (True,)})
    return EVERYTHING


def precision_of(args: Any, model: Any) -> Precision:
    """What is computed in: as the arguments say, else as the model's parameters are."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return precision_of_weights(model)
