"""Check of the arguments of Accelerate's `Accelerator`: no argument is ignored."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import accelerate
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    DynamoBackend,
    TorchDynamoPlugin,
)

from gpumix.integrations.common.unsupported_arguments import FieldSupport, make_no_meaning_error

FIX_PLAN_DECIDES = "leave it out: the plan decides who computes and who stores what"
SHARED = "leave it out: the plan says who reads which samples of a batch"
MOVED = "leave it out: batches go to this rank's device as they are needed"
COMPILED = "leave it out, or give dynamo_backend='inductor': each block is compiled"
ACCELERATOR_FIELDS = FieldSupport.of(
    heard="mixed_precision dataloader_config cpu dynamo_backend dynamo_plugin kwargs_handlers",
    theirs="""
        gradient_accumulation_steps gradient_accumulation_plugin log_with project_dir project_config
        step_scheduler_with_optimizer
    """,
    refused={
        "device_placement": MOVED,
        "split_batches": SHARED,
        "deepspeed_plugin": FIX_PLAN_DECIDES,
        "deepspeed_plugins": FIX_PLAN_DECIDES,
        "fsdp_plugin": FIX_PLAN_DECIDES,
        "torch_tp_plugin": FIX_PLAN_DECIDES,
        "megatron_lm_plugin": FIX_PLAN_DECIDES,
        "parallelism_config": FIX_PLAN_DECIDES,
        "rng_types": "leave it out: orders of samples are the first rank's on all ranks",
    },
)
LOADER_FIELDS = FieldSupport.of(
    # No sample is read twice: the last batch stays uneven whatever `even_batches` says.
    heard="use_seedable_sampler data_seed even_batches",
    theirs="",
    refused={
        "split_batches": SHARED,
        "dispatch_batches": SHARED,
        "non_blocking": MOVED,
        "use_stateful_dataloader": "leave it out: accelerator.skip_first_batches goes on inside of "
        "an epoch",
    },
)
HANDLERS = ("InitProcessGroupKwargs", "ProfileKwargs")
WHERE = "Accelerator"
# Read at import: a program may replace Accelerate's class by gpumix's later.
ACCELERATOR_SIGNATURE = inspect.signature(accelerate.Accelerator)
REFUSED_LAUNCH_TYPES = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise InputError if an argument without a meaning here is set."""
    for name, value in given.items():
        default = ACCELERATOR_SIGNATURE.parameters[name].default
        # The default of a deprecated parameter is a bare object, meaning: not given.
        ACCELERATOR_FIELDS.check(
            name, value, None if type(default) is object else default, where=WHERE
        )
    if (loading := given.get("dataloader_config")) is not None:
        LOADER_FIELDS.check_all(loading, DataLoaderConfiguration)
    for handler in given.get("kwargs_handlers") or ():
        if (kind := type(handler).__name__) not in HANDLERS:
            fix = f"leave it out: of handlers only {' and '.join(HANDLERS)} have one"
            raise make_no_meaning_error(f"kwargs_handlers=[{kind}(...)]", fix, where=WHERE)


def check_launch_type(kind: DistributedType) -> None:
    """Raise InputError if `accelerate launch` has set a distribution that divides the model."""
    if kind in REFUSED_LAUNCH_TYPES:
        raise make_no_meaning_error(
            f"{kind.value} of `accelerate launch`",
            "start the script with `gpumix launch SCRIPT`, or torchrun",
            where=WHERE,
        )


def needs_compile(given: Mapping[str, Any]) -> bool:
    """Return True if the arguments or `accelerate launch` ask for compiled blocks.

    Raises:
        InputError: another backend or mode of compilation is asked for.
    """
    plugin = given.get("dynamo_plugin") or TorchDynamoPlugin(backend=given.get("dynamo_backend"))
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return False
    said = {"mode": plugin.mode != "default", "fullgraph": plugin.fullgraph}
    said |= {"dynamic": plugin.dynamic is not None, "options": plugin.options}
    if plugin.backend != DynamoBackend.INDUCTOR:
        raise make_no_meaning_error(
            f"dynamo_backend={plugin.backend.value!r}", COMPILED, where=WHERE
        )
    for name in (name for name, is_said in said.items() if is_said):
        raise make_no_meaning_error(f"{name} of dynamo_plugin", COMPILED, where=WHERE)
    return True
