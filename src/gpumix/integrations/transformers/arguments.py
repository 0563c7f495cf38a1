"""Check of `TrainingArguments`: arguments without a meaning are refused, none is ignored.

A step has the samples of all devices together: per_device_train_batch_size times
gradient_accumulation_steps times processes. The plan decides how many samples each device computes,
and the size of micro-batches.
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import ParallelMode

from gpumix.hardware.host.environment import world_size
from gpumix.integrations.common.plan_and_shard import precision_of_weights
from gpumix.integrations.common.unsupported_arguments import FieldSupport, make_no_meaning_error
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.dtypes import Precision

FIX_PLAN_DECIDES = "leave it out: the plan decides that for each device by itself"
FIX_ENGINE_COMMUNICATES = "leave it out: gpumix sends what has to be sent itself"
FIX_PLAN_SHARDS = "leave it out: the plan divides parameters, gradients and optimizer state"
FIX_EVALUATES_AS_TRAINED = "leave it out: evaluations compute as the training does"
KERNELS = "leave it out: kernels are chosen for each class of devices, and checked"
TRAINING_FIELDS = FieldSupport.of(
    heard="""
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs torch_compile torch_compile_backend bf16 fp16
        per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
        max_grad_norm optim accelerator_config seed data_seed use_cpu
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        train_sampling_strategy include_num_input_tokens_seen prediction_loss_only
        eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics
        save_only_model load_best_model_at_end push_to_hub output_dir
    """,
    theirs="""
        num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
        optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon
        label_smoothing_factor neftune_noise_alpha tf32 use_cache full_determinism
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
        log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
        trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start
        save_strategy save_steps save_total_limit enable_jit_checkpoint hub_token hub_private_repo
        hub_model_id hub_strategy hub_always_push hub_revision metric_for_best_model
        greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
        remove_unused_columns label_names length_column_name ddp_backend ddp_timeout
        skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    """,
    refused={
        "fsdp": FIX_PLAN_SHARDS,
        "fsdp_config": FIX_PLAN_SHARDS,
        "deepspeed": FIX_PLAN_SHARDS,
        "parallelism_config": FIX_PLAN_DECIDES,
        "auto_find_batch_size": "leave it out: no plan is taken that does not fit",
        "average_tokens_across_devices": "leave it out: losses are summed over all devices and "
        "divided by their number, so that the result does not depend on the devices",
        "use_liger_kernel": KERNELS,
        "liger_kernel_config": KERNELS,
        "bf16_full_eval": FIX_EVALUATES_AS_TRAINED,
        "fp16_full_eval": FIX_EVALUATES_AS_TRAINED,
        "torch_empty_cache_steps": FIX_PLAN_DECIDES,
        "torch_compile_mode": "leave it out: `torch_compile` compiles each block",
        "ddp_find_unused_parameters": FIX_ENGINE_COMMUNICATES,
        "ddp_bucket_cap_mb": FIX_ENGINE_COMMUNICATES,
        "ddp_broadcast_buffers": FIX_ENGINE_COMMUNICATES,
        "ddp_static_graph": FIX_ENGINE_COMMUNICATES,
        "eval_use_gather_object": "leave it out: predictions of any shape are gathered as tensors",
        "dataloader_in_order": "leave it out: each rank reads its part of the same batches",
        "save_on_each_node": "leave it out: the whole model comes together on the first rank only",
        "debug": "leave it out: it looks at whole parameters, and a rank has pieces of them",
    },
)
SEQ2SEQ_FIELDS = FieldSupport.of(
    heard="predict_with_generate",
    theirs="sortish_sampler generation_max_length generation_num_beams generation_config",
    refused={},
).merge_base(TRAINING_FIELDS)
ACCELERATOR_FIELDS = FieldSupport.of(
    # No sample is read twice: the last batch stays uneven whatever `even_batches` says.
    heard="use_seedable_sampler even_batches",
    theirs="use_configured_state",
    refused={
        "split_batches": FIX_PLAN_DECIDES,
        "dispatch_batches": FIX_PLAN_DECIDES,
        "non_blocking": FIX_ENGINE_COMMUNICATES,
        "gradient_accumulation_kwargs": "say gradient_accumulation_steps",
    },
)
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
SAMPLERS = ("random", "sequential", "group_by_length")
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
# Fields of arguments that `fold_accumulation` changes.
FOLDED = (*COUNTS, *CHECKPOINTING, "average_tokens_across_devices")
BLOCKS = "leave it out: whole blocks are computed again, by the plan"
ARGUMENTS = "TrainingArguments"


def check_arguments(args: Any, kind: type, fields: FieldSupport) -> None:
    """Check the arguments of a trainer.

    Args:
        kind: the class of arguments with `fields`.

    Raises:
        InputError: an argument without a meaning here is set, or a batch has no samples.
    """
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise InputError(
                f"{name}={getattr(args, name)}: a batch without samples trains nothing",
                code="batch-size-zero",
                where=ARGUMENTS,
                fix="give 1 or more",
            )
    if world_size() > 1 and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise InputError(
            f"they take this process for the only one, and there are {world_size()}",
            code="arguments-of-one-process",
            where=ARGUMENTS,
            fix="make them after the import of gpumix, or with use_cpu=True",
        )
    # Arguments of a base class lack some fields.
    fields.check_all(args, kind if isinstance(args, kind) else transformers.TrainingArguments)
    ACCELERATOR_FIELDS.check_all(args.accelerator_config, AcceleratorConfig)
    for name in CHECKPOINTING:
        _check_kwargs(f"{name}_kwargs", getattr(args, f"{name}_kwargs", None))
    if args.torch_compile and args.torch_compile_backend != "inductor":
        what = f"torch_compile_backend={args.torch_compile_backend!r}"
        raise make_no_meaning_error(
            what, "leave it out: `torch_compile` compiles each block", where=ARGUMENTS
        )
    if args.n_gpu > 1:
        raise InputError(
            f"one process has {args.n_gpu} GPUs",
            code="several-gpus-per-process",
            why="gpumix trains with one process for each device",
            fix="start the script with `gpumix launch SCRIPT`, or with torchrun --nproc-per-node "
            f"{args.n_gpu}",
        )
    if args.train_sampling_strategy not in SAMPLERS:
        what = f"train_sampling_strategy={args.train_sampling_strategy!r}"
        raise make_no_meaning_error(what, f"take one of {', '.join(SAMPLERS)}", where=ARGUMENTS)


def _check_kwargs(name: str, given: dict[str, Any] | None) -> None:
    """Check checkpointing settings: torch's method does not matter, the recomputed parts do."""
    for key, value in (given or {}).items():
        if value and key != "use_reentrant":
            raise make_no_meaning_error(f"{name}={{{key!r}: {value!r}}}", BLOCKS, where=ARGUMENTS)


def fold_accumulation(args: Any) -> Any:
    """Return a copy with one batch per step: the plan cuts the batch into micro-batches."""
    own = copy.copy(args)
    own.per_device_train_batch_size *= own.gradient_accumulation_steps
    own.gradient_accumulation_steps = 1
    own.average_tokens_across_devices = False  # the loss of a micro-batch is local
    for name in CHECKPOINTING:
        if getattr(own, name, None):
            setattr(own, name, False)
    return own


def space_of(args: Any) -> Space:
    """Return the search space of plans; with activation checkpointing if it is asked for."""
    if any(getattr(args, name, None) for name in CHECKPOINTING):
        return EVERYTHING.model_copy(update={"gradient_checkpointing": (True,)})
    return EVERYTHING


def precision_of(args: Any, model: Any) -> Precision:
    """Return the precision of the arguments, or of the model's parameters."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return precision_of_weights(model)
