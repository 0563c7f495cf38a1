"""Other names of a job's keys: of other trainers, and of earlier versions.

Only names that spelling does not lead to the right key; see `schema.reading.error_text`.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "sequence_length": ("max_seq_length", "seq_len", "max_length", "block_size", "context_length"),
    "global_batch_size": (
        "global_batch",
        "batch_size",
        "train_batch_size",
        "micro_batch_size",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    ),
    "max_steps": ("steps", "train_steps", "num_train_epochs", "max_epochs", "epochs"),
    "max_grad_norm": (
        "optimizer.clip_norm",
        "optimizer.max_grad_norm",
        "clip_norm",
        "clip_grad_norm",
        "grad_clip",
        "gradient_clipping",
        "gradient_clip_val",
    ),
    "optimizer.lr": ("learning_rate",),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.eps": ("adam_epsilon", "optimizer.adam_epsilon"),
    "optimizer.name": ("optim", "optimizer.type"),
    "lr_scheduler": ("schedule", "scheduler"),
    "lr_scheduler.type": ("lr_scheduler_type", "lr_scheduler.kind", "lr_scheduler.name"),
    "lr_scheduler.min_lr_ratio": ("min_lr", "lr_scheduler.final_ratio", "lr_scheduler.min_lr"),
    "lr_scheduler.warmup_steps": ("warmup_ratio", "lr_scheduler.warmup_ratio"),
    "precision": ("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype"),
    "torch_compile": ("compile",),
    "model.weights": ("model_name_or_path",),
    "data.num_workers": ("data.workers", "workers", "dataloader_num_workers"),
    "data.validation_split": ("data.held_out", "held_out", "val_split"),
    "techniques.zero_stages": ("deepspeed", "fsdp", "zero_optimization", "zero_stage"),
    "techniques.gradient_checkpointing": (
        "techniques.recompute",
        "techniques.activation_checkpointing",
        "activation_checkpointing",
        "recompute",
    ),
    "techniques.checkpoints_on": ("techniques.boundaries",),
    "techniques.cross_entropy": ("techniques.heads",),
    "techniques.tensor_parallel_size": (
        "techniques.tensor",
        "tensor_parallel_degree",
        "tensor_model_parallel_size",
        "tp_size",
    ),
    "techniques.sequence_parallel": ("techniques.sequence",),
    "techniques.max_pipeline_stages": (
        "techniques.most_stages",
        "pipeline_parallel_size",
        "pipeline_parallel_degree",
        "pipeline_model_parallel_size",
    ),
    "techniques.min_pipeline_stages": ("techniques.least_stages",),
    "techniques.pipeline_schedules": ("techniques.schedules",),
    "output_dir": ("output",),
    "logging_steps": ("log_every_steps", "log_interval"),
    "report_to": ("trackers", "log_with"),
    "eval_steps": ("evaluation", "eval_strategy", "evaluation_strategy"),
    "save_steps": ("checkpoint", "checkpointing_steps", "save_strategy"),
    "advanced.profile_budget": ("profile",),
    "advanced.replay_steps": ("replay_every_steps",),
    "advanced.max_restarts": ("restarts",),
    "advanced.timeout": ("ddp_timeout",),
    "advanced.grace_period": ("grace",),
}
"""The aliases of each key."""

KEY_BY_ALIAS: Mapping[str, str] = {
    alias: key for key, aliases in ALIASES.items() for alias in aliases
}
