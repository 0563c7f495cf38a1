"""Hosting of another program's model: measured, planned for and sharded in place.

A job describes training to `gpumix train`; a program passes the objects: the model with its
weights, samples, an optimizer. Every rank of the program makes the same calls.
"""

from __future__ import annotations

import atexit
import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpumix.engine.access_between_steps import unshard
from gpumix.engine.comm.init_distributed import register_leave_at_exit
from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.engine.engine import Engine
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.adapters import enable_adapters
from gpumix.engine.model.equal_weights import check_equal_models
from gpumix.engine.model.rng import preserve_all_rng
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.prepare import prepare
from gpumix.engine.quantised.weight_formats import iterate_quantised_parameters
from gpumix.engine.sharding.initial_weights import check_has_values
from gpumix.engine.sharding.unit_discovery import has_trainable_parameters
from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.hardware import runtime
from gpumix.integrations.common.even_plan import make_even_plan
from gpumix.integrations.common.peft_adapters import patch_state_dict_names
from gpumix.planner.plan import plan as make_plan
from gpumix.planner.undivided import select_strategy
from gpumix.profiler.api import open_device, profile
from gpumix.profiler.cache.program_cache import describe_work
from gpumix.profiler.subject import OptimizerOf
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.dtypes import Precision
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.train.checks.output_folder import check_folder
from gpumix.train.run_log import run_files
from gpumix.train.run_log.loading import measure_loading


@dataclass(frozen=True)
class TrainingSetup:
    """Training of a program, except for its model.

    Attributes:
        make_batch: makes a batch of the given number of samples on the host, as large as any.
        sequence_length: tokens of a sample, at most.
        global_batch: samples of a step, of all ranks.
        loss: as for `gpumix.prepare`.
        optimizer: makes an optimizer like the program's for given parameters.
        precision, torch_compile, space: as for `gpumix.profile`.
        seed: of dropout.
        told: text identifying how losses and updates are computed, for reuse of measurements.
        couples: as for `gpumix.prepare`.
    """

    make_batch: Callable[[int], Any]
    sequence_length: int
    global_batch: int
    loss: Objective | None = None
    optimizer: OptimizerOf | None = None
    precision: Precision = "auto"
    torch_compile: bool = False
    space: Space = EVERYTHING
    seed: int = 0
    told: str = ""
    couples: str = ""


class OwnDevice:
    """Device of this process, opened for each model of the program in turn."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._used = False
        atexit.register(self.give_back)

    def use(self) -> None:
        if not self._used:
            self._open.enter_context(open_device())
            self._used = True

    def give_back(self) -> None:
        self._open.close()
        self._used = False


@cache
def own_device() -> OwnDevice:
    return OwnDevice()


def shard_by_plan(
    model: nn.Module,
    training: TrainingSetup,
    *,
    plan: Plan | None = None,
    own: Objective | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = print,
) -> Engine:
    """Shard `model` in place, by `plan` or by a plan made for the devices of all ranks. Collective.
    From then on this process uses its device.

    Args:
        own: the loss to train on, if `training.loss` is just for measurements.
        folder: of plan and profile, written by the first rank.
        say: gets lines of progress and of the plan, on the first rank.

    Raises:
        InputError: the plan is for another model, batch or number of devices, `folder` has files of
            a run that may not be replaced, or the model is quantised in an unknown way.
        NoFeasiblePlanError: no plan fits the devices.
    """
    check_loaded_weights(model)
    unshard(model)  # of an earlier training
    first = get_rank() == 0
    if first and folder is not None:
        check_folder(folder)
    check_equal_models(model, make_communicator(get_group_device()))
    if plan is None:
        with preserve_all_rng(), enable_adapters(model):
            plan = _measure_and_plan(
                model, training, folder if first else None, say if first else lambda _: None
            )
    elif plan.global_batch != training.global_batch:
        raise InputError(
            f"the plan is for steps of {plan.global_batch} samples, the program trains with "
            f"{training.global_batch}",
            code="global-batch-mismatch",
            fix="plan for this program, or give no plan",
        )
    elif first:
        _tell_of_dtypes(plan, training.precision, say)
    if first and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / run_files.PLAN)
    own_device().use()
    register_leave_at_exit()
    # An earlier training may survive in reference cycles of the program, with its memory.
    gc.collect()
    in_files = any(has_source(parameter) for parameter in model.parameters())
    with measure_loading() as meter, enable_adapters(model):
        engine = prepare(
            model, plan, loss=own or training.loss, seed=training.seed, couples=training.couples
        )
    if in_files:
        told = meter.describe(engine)
        if first:
            say(told)
    patch_state_dict_names(model, everywhere=False)
    return engine


def check_loaded_weights(model: nn.Module) -> None:
    """Check that the weights of a model, as it was loaded, can be divided.

    Raises:
        InputError: they are quantised in another way than bitsandbytes', or spread over devices; or
            the model has no weights.
    """
    check_has_values(model)
    flags = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    quantised = any(getattr(model, flag, False) is True for flag in flags)
    if quantised and not any(True for _ in iterate_quantised_parameters(model)):
        method = getattr(model, "quantization_method", None)
        by = f" by {getattr(method, 'value', method)}" if method is not None else ""
        raise InputError(
            f"the weights of {type(model).__name__} are quantised{by}",
            code="model-already-quantised",
            why="each rank stores a piece of every weight, with its constants; this is known of "
            "the 4-bit and 8-bit weights of bitsandbytes",
            fix="load it with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4') or "
            "(load_in_8bit=True), or in bf16",
        )
    places = getattr(model, "hf_device_map", None)
    if isinstance(places, dict) and len({str(place) for place in places.values()}) > 1:
        raise InputError(
            f"{type(model).__name__} was spread over devices when it was loaded",
            code="model-already-dispatched",
            why="the plan says which device stores what",
            fix="load it without device_map",
        )


def _tell_of_dtypes(plan: Plan, asked: Precision, say: Callable[[str], None]) -> None:
    """Report devices that compute in another dtype than the program asks for, except if it asks for
    "fp32", which may just be the default."""
    others = sorted({worker.compute_dtype for worker in plan.workers} - {asked})
    if others and asked in ("bf16", "fp16"):
        say(f"devices compute in {' and '.join(others)}, as the plan says, not in {asked}")


def refuse_gpu(device: torch.device, said: str, *, where: str) -> None:
    """Raise InputError if the device is a GPU, of a program set to CPUs by the setting `said`."""
    if runtime.is_gpu(device):
        raise InputError(
            f"{said} on a host whose GPUs the plan is for",
            code="cpu-on-gpu-host",
            where=where,
            fix="leave it out",
        )


def _measure_and_plan(
    model: nn.Module, training: TrainingSetup, folder: Path | None, say: Callable[[str], None]
) -> Plan:
    if not has_trainable_parameters(model):
        return _even(model, training)
    own_device().give_back()  # the profiler opens it itself
    allowed = _restrict_space(training)
    found = profile(
        partial(without_weights, model),
        training.make_batch,
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
        loss=training.loss,
        space=allowed,
        torch_compile=training.torch_compile,
        progress=say,
        same_as=describe_work(model, training.make_batch(1), training.told),
    )
    plan = make_plan(
        found,
        training.global_batch,
        strategy=select_strategy(training.couples),
        space=allowed.with_all_devices(),
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        found.save(folder / run_files.PROFILE)
    for line in describe_plan(plan):
        say(line)
    return plan


def _even(model: nn.Module, training: TrainingSetup) -> Plan:
    assert training.loss is not None
    read_all_values(model)  # every rank has all of it, and it is called here
    run = partial(training.loss, model, training.make_batch(1))
    dtype = precision_of_weights(model)
    if isinstance(training.precision, str) and training.precision != "auto":
        dtype = training.precision
    return make_even_plan(
        model,
        run,
        world=get_world_size(),
        global_batch=training.global_batch,
        compute_dtype=dtype,
    )


def _restrict_space(training: TrainingSetup) -> Space:
    """Return the search space for the optimizer: without tensor-parallel groups, whose parts may
    cut blocks, for an optimizer of blocks of elements."""
    trial = training.optimizer and training.optimizer([nn.Parameter(torch.empty(0))])
    if isinstance(trial, AdamW8bit):
        return training.space.without_tensor_parallel()
    return training.space


def describe_plan(plan: Plan) -> Iterator[str]:
    """Yield a short line on each device of a plan."""
    several = len(plan.stages) > 1
    for number, stage in enumerate(plan.stages, 1):
        blocks = "1 block" if len(stage.units) == 1 else f"{len(stage.units)} blocks"
        what = f"stage {number} of {len(plan.stages)}, {blocks}: "
        of = "the stage's state" if several else "the state"
        for worker in stage.workers:
            share = f"{worker.state_share:.0%}" if plan.zero_stage else "all"
            yield (
                f"{worker.device}: {what if several else ''}{worker.samples} samples a step, "
                f"{share} of {of}"
            )


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters that take no memory."""
    packed = [one for _, one in iterate_quantised_parameters(model)]
    quantised = {id(one.original) for one in packed}
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
        if id(p) not in quantised
    }
    for one in packed:
        tensors = one.tensors() or {}
        memo |= {id(t): torch.empty_like(t, device="meta") for t in tensors.values()}
        memo[id(one.original)] = one.without_values()
    return copy.deepcopy(model, memo)


def precision_of_weights(model: nn.Module) -> ComputeDtype:
    """Return the default compute dtype: the dtype of the trained parameters, or of all parameters
    if none is trained."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    trained = [p for p in parameters if p.requires_grad] or parameters
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trained}
    return "bf16" if dtypes == {"bfloat16"} else "fp16" if dtypes == {"float16"} else "fp32"


def load_plan(given: Plan | Path | str | None) -> Plan | None:
    """Return a plan, read from a file if a path is given.

    Raises:
        InputError: the file cannot be read, or is no plan.
    """
    return Plan.load(Path(given)) if isinstance(given, Path | str) else given


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1
