"""Construction of a running engine from a model and a plan, in one visible place.

Order: dissect the model; check that the plan fits and that all ranks agree. Next come *tensor*
(each rank of a tensor-parallel group computes a part of every module), *stages* (stand-ins replace
units of other stages), *shards* (flat buffers for every unit, in the plan's *precision*) and
*compile*. Finally unit calls are intercepted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpumix.cost.loading_memory import predict_host_bytes
from gpumix.cost.model_match import check_root_ends, check_unit_names
from gpumix.engine.comm import version_check
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.failure_report import FailureReports
from gpumix.engine.comm.init_distributed import ensure_process_group
from gpumix.engine.comm.process_groups import get_own_device, make_communicator, needs_gpu
from gpumix.engine.engine import Engine, ShardedParts
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.loss.objective import make_objective
from gpumix.engine.loss.reduction import Objective, wrap_objective
from gpumix.engine.model.equal_weights import broadcast_weights
from gpumix.engine.model.forward_coroutine import ModelError, UnitCallHandlers, intercept
from gpumix.engine.model.frozen_base import (
    DigestingSource,
    find_source_name,
    has_frozen_base,
    make_base,
)
from gpumix.engine.model.kernel_selection import apply_efficiency
from gpumix.engine.model.model_settings import find_layer_drop_rates
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.schedule.pipeline_parallel import PipelineStage
from gpumix.engine.schedule.point_to_point import PointToPointChannels
from gpumix.engine.schedule.stage_setup import (
    install_placeholders,
    make_stage_shard_layouts,
    make_tensor_parallel_groups,
    select_rank_part,
    select_stage_part,
)
from gpumix.engine.sharding.flat_group import Dtypes
from gpumix.engine.sharding.initial_weights import (
    load_buffers,
    make_source,
    make_valueless_error,
)
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.engine.sharding.parameter_index import ParameterIndex
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.unit_discovery import ModelUnits, split_into_units
from gpumix.engine.tensor_parallel.parallelize import ModuleChanges, parallelize_model
from gpumix.engine.tensor_parallel.plans import resolve_tensor_plan
from gpumix.engine.unit import split_backward
from gpumix.engine.unit.regional_compile import compile_units
from gpumix.engine.unit.sharded_units import ShardedUnits, Storage, make_shared_bucket, shard
from gpumix.hardware import runtime
from gpumix.hardware.host.environment import available_host_bytes
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.job.coupled_losses import HOW_TO_COUPLE, NO_RULE, WHOLE_BATCH
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.dtypes import get_nvidia_dtype_support
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Worker
from gpumix.schema.units import show_bytes

# Registries of modules; recurrent modules look up replaced weights there.
MODULE_REGISTRIES = frozenset({"_parameters", "_modules", "_buffers", "_flat_weights"})


def prepare(
    model: nn.Module,
    plan: Plan,
    *,
    comm: Communicator | None = None,
    weights: Path | None = None,
    loss: Objective | None = None,
    units: Sequence[str] = (),
    tensor: Mapping[str, Any] | None = None,
    seed: int = 0,
    couples: str = "",
) -> Engine:
    """Shard `model` in place according to `plan`, over the ranks of the default process group.

    Args:
        model: any module; a model made by `gpumix.build` is never complete on any rank.
        comm: default: all ranks of the default process group. If there is none, the ranks started
            by torchrun create one; a process started alone is a single rank.
        weights: safetensors file or folder with initial values; default: the model's own values.
        loss: function(model, micro-batch) returning (summed loss, count); default: the result of
            forward: a loss, alone or with further values, or (summed loss, count).
        units: class or module names of the units; default: detected.
        tensor: tensor-parallel styles by patterns of module names (`engine.tensor_parallel.plans`);
            default: the model's own plan.
        seed: seed of dropout.
        couples: for a loss that couples samples of a batch: "micro-batch" if each micro-batch may
            have a separate loss, "batch" if no batch may be cut. Default: refuse a coupling loss
            where the plan cuts batches.

    Raises:
        InputError: the plan is for another model or number of ranks, or cuts batches that must not
            be cut; or ranks disagree.
    """
    if comm is None:
        ensure_process_group(on_gpus=needs_gpu(plan))
        comm = make_communicator(get_own_device(plan), plan.collectives)
    plan = _order_workers(plan, comm)
    anatomy = _dissect_as_planned(model, plan, units)
    _check_plan(plan, anatomy, comm)
    _check_host_memory(plan, comm)
    _check_coupling(model, plan, couples)
    _check_parameter_holders(model)
    broadcast_weights(model, comm)
    worker = plan.workers[comm.rank]
    _check_compute_dtype(worker, comm.device)
    apply_efficiency(model, worker.efficiency, comm.device)
    comm.words = FailureReports.of_default_group(
        rank=comm.rank, world=comm.world, on_gloo=comm.on_gloo
    )
    inventory = ParameterIndex.of(model, anatomy, plan)
    head = _head_in_chunks(model, anatomy, plan, comm.rank)
    forwards = _own_forwards(anatomy)
    tp_groups = make_tensor_parallel_groups(plan, comm)
    anatomy, changes = _apply_tensor_parallel(plan, anatomy, comm.rank, tp_groups, tensor, head)
    dtypes = Dtypes(TORCH_DTYPE[worker.compute_dtype], TORCH_DTYPE[plan.communication_dtype])
    packed = any(isinstance(s.parameter, QuantisedParameter) for u in anatomy.all for s in u.slots)
    source = make_source(model, weights)
    digesting = DigestingSource(source) if has_frozen_base(model, packed) else None
    storage = Storage(comm.device, dtypes, digesting or source, head)
    parts, places = _make_stages(plan, anatomy, changes, comm, storage, tp_groups)
    if weights is not None:
        load_buffers(model, weights)
    _move_buffers(model, comm.device)
    calls = UnitCallHandlers(model)
    if worker.compile:
        own_units = [unit for one in parts for unit in one.units.values()]
        compile_units(own_units, sizes=worker.micro_batches, device=comm.device)
    for unit in anatomy.units:
        intercept(unit.name, unit.module, calls)
    objective = make_objective(model) if loss is None else wrap_objective(loss)
    sharded = ShardedParts(parts, places, inventory, calls, changes, forwards)
    engine = Engine(model, plan, sharded, comm, objective, seed=seed, couples=couples)
    if digesting is not None:
        own_sum = digesting.make_own_sum(engine.frozen_intervals())
        engine.base = make_base(find_source_name(model, weights), own_sum, comm)
    return engine


def _check_host_memory(plan: Plan, comm: Communicator) -> None:
    """Refuse a plan that takes more memory of a host than is free, on all ranks: for what it keeps
    there, and for reading weights."""
    host, free = plan.workers[comm.rank].host, available_host_bytes()
    told = torch.tensor([predict_host_bytes(plan).get(host, 0), free], device=comm.device)
    for rank, (wanted, there) in enumerate(comm.exchanged(told, "comparison of memory").tolist()):
        if wanted > there:
            raise MachineError(
                f"the plan takes {show_bytes(wanted)} of the memory of host "
                f"'{plan.workers[rank].host}', {show_bytes(there)} are free",
                code="host-memory-short",
                why="what it keeps there, and weights while they are read; limits of a container "
                "or a job count too",
                fix="free memory, raise the limit of the container or job, or plan with less on "
                "hosts: without `parameters_on: host`, without offload",
            )


def _check_coupling(model: nn.Module, plan: Plan, couples: str) -> None:
    if couples not in ("", NO_RULE, WHOLE_BATCH):
        raise InputError(
            f"there is no couples='{couples}'",
            code="couples-unknown",
            fix=f"use '{WHOLE_BATCH}', '{NO_RULE}', or none",
        )
    if couples == WHOLE_BATCH and not plan.is_uncut:
        raise InputError(
            f"the plan cuts batches, and couples='{WHOLE_BATCH}' says that none may be cut",
            code="couples-whole-batch",
            fix="plan with `--strategy undivided`, or give no plan",
        )
    # Rehearsals show it only if their samples share tokens.
    by_frequency = next(
        (name for name, one in model.named_modules() if getattr(one, "scale_grad_by_freq", False)),
        None,
    )
    if by_frequency is not None and not plan.is_uncut and couples != NO_RULE:
        raise ModelError(
            f"module '{by_frequency}' has scale_grad_by_freq=True, and the plan cuts batches",
            code="grad-by-frequency",
            why="its gradient is divided by the counts of tokens in the whole batch",
            fix=f"leave it out; {HOW_TO_COUPLE}",
        )


def _own_forwards(anatomy: ModelUnits) -> dict[str, Callable[..., Any]]:
    """Return the forwards of units that override the forward of the class, by unit name."""
    named = {unit.name: vars(unit.module).get("forward") for unit in anatomy.units}
    return {name: forward for name, forward in named.items() if forward is not None}


def _dissect_as_planned(model: nn.Module, plan: Plan, units: Sequence[str]) -> ModelUnits:
    """Dissect the model into the units of the plan; further units are left out if the profiled
    samples did not call them."""
    anatomy = split_into_units(model, units)
    planned = [name for stage in plan.stages for name in stage.units]
    known = {unit.name for unit in anatomy.units}
    if units or plan.model == anatomy.fingerprint() or not known.issuperset(planned):
        return anatomy
    of_plan = split_into_units(model, planned)
    return of_plan if plan.model == of_plan.fingerprint() else anatomy


def _head_in_chunks(
    model: nn.Module, anatomy: ModelUnits, plan: Plan, rank: int
) -> ChunkedCrossEntropy | None:
    """Return the chunked cross-entropy of a rank with the last stage, if planned."""
    last = plan.stages_of(rank)[-1]
    worker = plan.worker_of(rank, last)
    if last < len(plan.stages) - 1 or worker.mode.head != "chunked":
        return None
    units = (unit.module for unit in anatomy.units)
    return ChunkedCrossEntropy(model, units, fused=worker.efficiency.loss == "triton")


def _apply_tensor_parallel(
    plan: Plan,
    anatomy: ModelUnits,
    rank: int,
    tp_groups: Mapping[int, Communicator],
    styles: Mapping[str, Any] | None,
    head: ChunkedCrossEntropy | None,
) -> tuple[ModelUnits, ModuleChanges]:
    """Return the model with this rank's tensor-parallel parts; undivided without a group."""
    tp_group = next(iter(tp_groups.values()), None)
    if tp_group is None:
        return anatomy, ModuleChanges()
    own = [plan.stages[number] for number in tp_groups]
    return parallelize_model(
        anatomy,
        tp_group,
        resolve_tensor_plan(anatomy.root.module, styles),
        part=select_rank_part(anatomy, plan, rank),
        whole=[head.layer] if head is not None and head.layer is not None else [],
        sequence={name for stage in own if stage.sequence for name in stage.units},
        degree=own[0].tensor,
    )


def _make_stages(
    plan: Plan,
    anatomy: ModelUnits,
    changes: ModuleChanges,
    comm: Communicator,
    storage: Storage,
    tp_groups: Mapping[int, Communicator],
) -> tuple[list[ShardedUnits], list[PipelineStage]]:
    """Make this rank's parts of the plan's stages; a single stage has no place. Collective."""
    if len(plan.stages) == 1:
        whole, [stage] = ShardLayout.of(plan, comm, tp_groups.get(0)), plan.stages
        if find_layer_drop_rates(anatomy.root.module).on:  # the head may come after any unit
            stage = stage.model_copy(update={"after": ()})
        return [shard(anatomy, stage, whole, storage)], []
    elsewhere = install_placeholders(anatomy, changes, plan, comm.rank, storage)
    layout = make_stage_shard_layouts(plan, comm, tp_groups)
    wires = PointToPointChannels(plan, comm, storage.dtypes.communication)
    slots = {slot.name: slot for slot in anatomy.root.slots}
    shared = {
        one.names: make_shared_bucket([slots[name] for name in one.names], one.layout, storage)
        for one in layout.shared
    }
    parts, places = [], []
    for number, alone in layout.alone.items():
        stage = plan.stages[number]
        used = [bucket for names, bucket in shared.items() if names[0] in (stage.root or ())]
        last = number == len(plan.stages) - 1
        own = storage if last else replace(storage, head=None)
        parts.append(
            shard(select_stage_part(anatomy, stage, layout), stage, alone, own, shared=used)
        )
        place = PipelineStage(
            plan,
            number,
            comm.rank,
            parts=parts[-1],
            shared=tuple(shared.values()),
            wires=wires,
            elsewhere=elsewhere,
        )
        places.append(place)
    return parts, places


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise make_valueless_error(f"buffer '{name}'")
    for owner in model.modules():
        for name, held in owner._buffers.items():
            if held is not None:
                owner._buffers[name] = held.to(device)


def _order_workers(plan: Plan, comm: Communicator) -> Plan:
    """Return the plan with workers in rank order; GPUs are matched by UUID."""
    named_by_uuid = all(w.device.startswith("GPU-") for w in plan.workers)
    if not runtime.is_gpu(comm.device) or not named_by_uuid or len(plan.workers) != comm.world:
        return plan
    mine = uuid.UUID(runtime.device_uuid(comm.device))
    own = torch.tensor(list(mine.bytes), device=comm.device)
    table = comm.exchanged(own, "exchange of device names")
    return plan.for_devices([f"GPU-{uuid.UUID(bytes=bytes(row))}" for row in table.tolist()])


def _check_plan(plan: Plan, anatomy: ModelUnits, comm: Communicator) -> None:
    if plan.model != anatomy.fingerprint():
        raise InputError(
            "the plan was made for another model",
            code="plan-of-another-model",
            where=f"plan for model {plan.model}, this one is {anatomy.fingerprint()}",
            fix="make a plan for this model: gpumix plan JOB.yaml",
        )
    check_unit_names(plan, [unit.name for unit in anatomy.units])
    root = [slot.name for slot in anatomy.root.slots]
    check_root_ends(plan, root, root)
    _check_root_parameters(plan, root)
    space = EVERYTHING.model_copy(update={"tensor_parallel_size": plan.degrees})
    if missing := space.missing(plan):
        raise InputError(
            f"the engine does not run this plan: {missing}",
            code="plan-not-runnable",
            fix="make a plan that it runs: gpumix plan JOB.yaml",
        )
    if len(plan.workers) != comm.world:
        raise InputError(
            f"the plan is for {len(plan.workers)} ranks, {comm.world} are running",
            code="plan-rank-count",
            fix="start one process per device of the plan, or plan for these devices",
        )
    told, digest = version_check.own_versions(), int(plan.digest(), 16)
    version_check.publish_versions(told, comm.rank)
    own = torch.tensor([digest, version_check.hash_versions(told)], device=comm.device)
    table = comm.exchanged(own, "comparison of plans")
    if len({row[1] for row in table.tolist()}) > 1:
        version_check.check_equal_versions(version_check.read_all_versions(comm.world))
    others = [rank for rank, row in enumerate(table.tolist()) if row[0] != digest]
    if others:
        raise InputError(
            f"ranks disagree about the plan: rank {comm.rank} has another one than rank(s) "
            f"{', '.join(map(str, others))}",
            code="plans-differ-by-rank",
            fix="give the same job and plan file to every host",
        )
    if plan.schedule == "zero-bubble":
        split_backward.check_supported()


def _check_root_parameters(plan: Plan, root: Sequence[str]) -> None:
    """Refuse a plan of several stages if some root parameter is in none of the stages."""
    roots = [stage.root for stage in plan.stages]
    if len(roots) == 1 or None in roots:
        return
    lacking = set(root).difference(*(names or () for names in roots))
    if lacking:
        name = min(lacking)
        raise InputError(
            f"no stage of the plan has parameter '{name}'",
            code="parameter-in-no-stage",
            why="no stage computes with it, but it is a part of the model that is saved",
            fix="profile and plan again for this model, or add it to 'root' of the first stage",
        )


def _check_compute_dtype(worker: Worker, device: torch.device) -> None:
    """Refuse a compute dtype that the device lacks; a slow dtype is the plan's choice."""
    if not runtime.is_gpu(device) or not runtime.is_nvidia():
        return
    major, minor = runtime.capability(device)
    support = get_nvidia_dtype_support(f"{major}.{minor}")
    if worker.compute_dtype in support.unable:
        raise InputError(
            f"device '{worker.device}' does not compute in {worker.compute_dtype}",
            code="dtype-unsupported-by-device",
            where=f"{runtime.device_name(device)}, compute capability {major}.{minor}",
            why=support.unable[worker.compute_dtype],
            fix="make a plan for these devices: gpumix plan JOB.yaml",
        )


def _check_parameter_holders(model: nn.Module) -> None:
    """Refuse gradient hooks, parameters outside of registries, and modules compiled as a whole.

    Parameters are replaced in registries only; references elsewhere would keep the old parameters.
    """
    ours = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise InputError(
                f"parameter '{name}' has a hook on its gradient, which would not be called",
                code="parameter-gradient-hook",
                why="a rank has the gradient of its own samples, and then a part of the sum",
                fix="remove the hook; look at gradients after engine.step, or in a callback before "
                "the optimizer's step; to train some rows only, make them a parameter of their "
                "own, as PEFT's trainable_token_indices does",
            )
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in MODULE_REGISTRIES or not isinstance(value, list | tuple | dict):
                continue
            items = value.values() if isinstance(value, dict) else value
            held = [ours[id(item)] for item in items if id(item) in ours]
            if held:
                raise InputError(
                    f"module '{path}' holds parameter '{held[0]}' in its attribute '{attribute}' "
                    "too, which would not be trained",
                    code="parameter-held-twice",
                    fix=f"use it by its name, or make '{attribute}' an nn.ParameterList",
                )
        if module._compiled_call_impl is not None:
            raise InputError(
                f"module '{path}' is compiled as a whole, with the stop at its boundary",
                code="module-compiled-whole",
                fix="do not call `.compile()` on it; `module.forward = torch.compile(module."
                "forward)` before `prepare` is fine",
            )
