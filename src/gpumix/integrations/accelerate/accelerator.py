"""Accelerate's `Accelerator` on top of a plan: preparation, and the calls of a training loop.

The plan has one pipeline stage: every rank calls the model and reads its outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import accelerate
import torch
from accelerate import accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import extract_model_from_parallel, load
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from gpumix.engine.access_between_steps import unshard
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.engine.engine import Engine
from gpumix.engine.rehearsal.additivity import padding_counts
from gpumix.engine.sharding.unit_discovery import has_trainable_parameters
from gpumix.engine.weights.whole_values import check_has_been_read, read_all_values
from gpumix.hardware.host.environment import get_local_world_size
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.integrations.accelerate.arguments import (
    ACCELERATOR_SIGNATURE,
    check_arguments,
    check_launch_type,
    needs_compile,
)
from gpumix.integrations.accelerate.call_signature import FIX_NAME_PARTS, KWARGS, bind_batch
from gpumix.integrations.accelerate.clipping import select_clipped_pieces
from gpumix.integrations.accelerate.loader import LoopLoader, get_current_part
from gpumix.integrations.accelerate.loop_recorder import LoopRecorder
from gpumix.integrations.accelerate.outputs import stand_in_loss
from gpumix.integrations.accelerate.prepared_objects import PreparedObjects
from gpumix.integrations.accelerate.unequal_means import UnequalMeans
from gpumix.integrations.accelerate.wrapped_model import LABELS, LoopLoss, WrappedModel
from gpumix.integrations.common.batch_rows import PlannedRows, get_loop_rows, split_rows_equally
from gpumix.integrations.common.gather import gather_integers, gather_objects, gather_rows
from gpumix.integrations.common.optimizer_adapter import (
    make_factory_from_optimizer,
    take_over_optimizer,
)
from gpumix.integrations.common.plan_and_shard import (
    TrainingSetup,
    check_loaded_weights,
    get_world_size,
    load_plan,
    refuse_gpu,
    shard_by_plan,
)
from gpumix.integrations.common.saver import (
    Saver,
    find_newest_state,
    get_parameter_dtypes,
    patch_save_pretrained,
)
from gpumix.integrations.common.skipped_steps import get_reported_norm, has_visible_skips
from gpumix.integrations.dataloader.example_batch import find_example
from gpumix.integrations.dataloader.inspect import Batching
from gpumix.integrations.dataloader.samplers import get_shared_seed, prepare_sampler
from gpumix.integrations.dataloader.sharded_loader import PaddingScope, TreeCollator, collate_tree
from gpumix.profiler.api import announce_cpu_ranks, join_ranks
from gpumix.schema.errors import InputError, format_in_one_line
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.batch_shares import get_micro_batch_rows
from gpumix.schema.plan.dtypes import Precision
from gpumix.schema.plan.plan import Plan
from gpumix.train.processes.script_errors import show_errors_without_traceback
from gpumix.train.run_log import run_files

__all__ = ["Accelerator"]

PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
ROW_OFFSET_PER_RANK = 2**40


class GatheredRows(NamedTuple):
    """Row counts to keep of a gathered batch: the first `own` of each rank, and of all together the
    first `together` (None: all)."""

    own: Sequence[int]
    together: int | None


class Optimizer(AcceleratedOptimizer):
    """Optimizer stepping only after the backward, and not with gradients that overflowed."""

    model: WrappedModel | None = None
    record: LoopRecorder

    def step(self, closure: Any = None) -> None:
        """Update the parameters; without any gradients do nothing, as torch does.

        Raises:
            InputError: the model is not prepared yet, or a backward is missing.
        """
        if self.model is None:
            groups = self.optimizer.param_groups
            if all(one.grad is None for group in groups for one in group["params"]):
                super().step(closure)
                return
            raise InputError(
                "the optimizer steps before its model and a loader are prepared",
                code="optimizer-step-too-early",
                fix="accelerator.prepare(model, optimizer, loader)",
            )
        self.model.check_done()
        if not self.gradient_state.sync_gradients:
            return
        self._is_overflow = self.model.overflowed and has_visible_skips(self.optimizer)
        if not self.model.overflowed:
            super().step(closure)
        self.model.stepped()
        self.record.stepped(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients and self.model is not None:
            self.model.overflowed = False


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` training by a plan.

    Args:
        plan: a plan, or the file of a plan; by default the devices are measured and a plan is made
            when the model is prepared.
        couples: for a loss coupling samples of a batch: "batch" has a single device compute each
            batch, "micro-batch" accepts a separate loss per micro-batch; by default refused.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | Path | str | None = None,
        couples: str = "",
        **kwargs: Any,
    ) -> None:
        show_errors_without_traceback()
        announce_cpu_ranks()
        self._couples = couples
        self._width = PaddingScope()
        given = dict(ACCELERATOR_SIGNATURE.bind(*args, **kwargs).arguments)
        check_arguments(given)
        self._compile, self._on_cpu = needs_compile(given), given.get("cpu", False)
        # Set by `accelerate launch`.
        told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        said = str(given.pop("mixed_precision", None) or told)
        if said not in PRECISIONS:
            raise InputError(
                f"there is no mixed_precision '{said}' with gpumix",
                code="mixed-precision-unknown",
                where="Accelerator",
                fix=f"take one of {', '.join(PRECISIONS)}",
            )
        self._precision = PRECISIONS[said]
        super().__init__(**given)
        check_launch_type(self.distributed_type)
        self._given = load_plan(plan)
        self._engine: Engine | None = None
        self._wrapped_model: WrappedModel | None = None
        self._awaited = PreparedObjects()
        self._unequal_means = UnequalMeans(self.num_processes)
        self._alone: list[nn.Module] = []  # models called without a plan

    @property
    def plan(self) -> Plan | None:
        """The plan of the training; None until the model is prepared."""
        return None if self._engine is None else self._engine.plan

    # -- preparing ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects as Accelerate does.

        The model runs by a plan once its optimizer and the loader of its training data are known:
        the loader shows the shapes of batches. A model prepared together with a loader needs no
        optimizer.

        Raises:
            InputError: several models are to be trained.
            NoFeasiblePlanError: no plan fits the devices.
        """
        models = [
            one for one in args if isinstance(one, nn.Module) and has_trainable_parameters(one)
        ]
        if len(models) > 1:
            raise _several_models()
        prepared = super().prepare(*args, device_placement=device_placement)
        if models and self._engine is None and any(isinstance(one, DataLoader) for one in args):
            given = prepared if isinstance(prepared, tuple) else (prepared,)
            self._host(next(one for one in given if isinstance(one, WrappedModel)))
        return prepared

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does. A model without anything to train stays an ordinary
        module on each rank's device; a model not trained yet is called directly."""
        if isinstance(model, WrappedModel):
            return model
        if not has_trainable_parameters(model) or kwargs.get("evaluation_mode"):
            kwargs["evaluation_mode"] = True
            return super().prepare_model(read_all_values(model), *args, **kwargs)
        looped = self._awaited.known(model)
        if looped is None:
            check_loaded_weights(model)
            looped = WrappedModel(model, self._prepare_direct_call)
            self._awaited.models.append(looped)
            self._shard_when_ready()
        return looped

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        if isinstance(optimizer, Optimizer):
            return optimizer
        prepared = Optimizer(optimizer, device_placement=False, scaler=None)
        self._optimizers.append(prepared)
        self._awaited.optimizers.append(prepared)
        self._shard_when_ready()
        if self._wrapped_model is not None and prepared.model is None:
            self._take_over(prepared, self._wrapped_model)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> LoopLoader:
        if self._awaited.loader is None:
            is_prepared = isinstance(data_loader, LoopLoader)
            self._awaited.loader = data_loader.source_loader if is_prepared else data_loader
            self._shard_when_ready()
        if isinstance(data_loader, LoopLoader):
            return data_loader
        given = Batching.of(data_loader)
        collate = TreeCollator(data_loader.collate_fn, self._width, stand_ins=True)
        config = self.dataloader_config
        if config.use_seedable_sampler:
            seed = get_shared_seed() if config.data_seed is None else config.data_seed
            given = replace(given, sampler=prepare_sampler(given.sampler, seedable=True, seed=seed))
        rows = PlannedRows(
            lambda: self._engine, get_loop_rows, rank=self.process_index, world=get_world_size()
        )
        loader = given.make_rank_loader(
            given.batch_size * get_world_size(), rows, collate, LoopLoader
        )
        loader.device, loader.next_of = self.device, self._next_of
        loader.source_loader = data_loader
        return loader

    def _shard_when_ready(self) -> None:
        """Run a model by a plan if an optimizer updates it and a loader is known. Collective."""
        trained = self._awaited.trained()
        if len(trained) > 1 or (trained and self._engine is not None):
            raise _several_models()
        if trained and self._awaited.loader is not None:
            self._host(trained[0])

    def _prepare_direct_call(self, looped: WrappedModel) -> None:
        """Ready a model for a call without a plan; raise InputError if it is being trained."""
        if looped.training and torch.is_grad_enabled():
            if self._engine is not None:
                raise _several_models()
            if looped in self._awaited.trained():
                raise InputError(
                    "the model is called before the loader of what it is trained on is prepared",
                    code="model-called-before-loader",
                    why="the devices are measured with its batches",
                    fix="loader = accelerator.prepare(loader), before the first step",
                )
        check_has_been_read(looped.module)
        if looped.module not in self._alone:
            self._alone.append(super().prepare_model(looped.module, evaluation_mode=True))

    def _host(self, looped: WrappedModel) -> None:
        """Shard a model by a plan and give its optimizers the shards. Collective."""
        model, loader = self._whole(looped), self._awaited.loader
        assert loader is not None, "a model is hosted once a loader is known"
        optimizers = list(self._awaited.optimizers)
        if self._on_cpu:
            refuse_gpu(join_ranks(), "cpu=True", where="Accelerator")
        batch_size = Batching.of(loader).batch_size
        specimen = find_example(loader.dataset, loader.collate_fn, collate_tree)
        inside = LABELS in bind_batch(model, specimen.batch(1))[KWARGS]
        dtypes, self._names = (
            get_parameter_dtypes(model),
            {id(p): n for n, p in model.named_parameters()},
        )
        loss, measured = LoopLoss(), LoopLoss(stands_in=True)
        training = TrainingSetup(
            lambda samples: bind_batch(model, specimen.batch(samples)),
            sequence_length=specimen.sequence_length,
            global_batch=batch_size * get_world_size(),
            loss=measured if inside else stand_in_loss,
            optimizer=make_factory_from_optimizer(optimizers[0].optimizer) if optimizers else None,
            precision=self._precision,
            torch_compile=self._compile,
            space=EVERYTHING.in_one_stage(),
            seed=torch.initial_seed() % 2**31,
            told=f"loop {inside} {[type(one.optimizer).__name__ for one in optimizers]}",
            couples=self._couples,
        )
        folder = Path(self.project_dir, run_files.SCRIPT_FOLDER) if self.project_dir else None
        try:
            self._engine = shard_by_plan(model, training, plan=self._given, own=loss, folder=folder)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            if self._given is not None or is_out_of_memory(error):
                raise
            raise InputError(
                "the model cannot be measured with the loader's batches",
                code="model-not-measurable",
                why=format_in_one_line(error),
                fix=FIX_NAME_PARTS,
            ) from error
        if len(self._engine.plan.stages) > 1 or self._engine.plan.uses_tensor_parallel:
            raise InputError(
                "the plan has several stages, or tensor parallelism",
                code="plan-not-for-loops",
                why="every rank of a loop calls the model, and looks at what it returns",
                fix="make one with techniques.max_pipeline_stages=1 and "
                "techniques.tensor_parallel_size=1",
            )
        if padded := specimen.padded():
            # A loop may use outputs of padding in any way.
            self._width.is_global = not inside or padding_counts(
                self._engine, measured, *(bind_batch(model, one) for one in padded)
            )
        self._saver = Saver(self._engine, dtypes, get_local_world_size())
        patch_save_pretrained(model, self._saver)
        self._record = LoopRecorder(self._engine, folder, type(self).__name__)
        looped.attach_engine(self._engine, loss, self._record)
        self._wrapped_model = looped
        for optimizer in optimizers:
            self._take_over(optimizer, looped)
        self._awaited = PreparedObjects(
            models=[one for one in self._awaited.models if one is not looped]
        )

    def _whole(self, looped: WrappedModel) -> nn.Module:
        """Return the model without the changes of a call without a plan."""
        model = looped.module
        if model in self._alone:
            self._alone.remove(model)
            self._models.remove(model)
            extract_model_from_parallel(model, keep_fp32_wrapper=False)
        return model

    def _take_over(self, optimizer: Optimizer, looped: WrappedModel) -> None:
        assert self._engine is not None, "the model is run by a plan"
        optimizer.optimizer = take_over_optimizer(optimizer.optimizer, self._engine, self._names)
        optimizer.model, optimizer.record = looped, self._record

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, LoopLoader):
            return super().skip_first_batches(dataloader, num_batches)
        skipping = copy(dataloader)
        skipping.skipped = dataloader.skipped + num_batches
        skipping._iterator = None  # of persistent workers, owned by `dataloader`
        return skipping

    def _next_of(self, batches: Iterator[Any]) -> Any:
        return next(batches, None) if self._engine is None else self._record.next_of(batches)

    # -- the loop ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None, **kwargs: Any) -> None:
        """Run backward as Accelerate does.

        Args:
            count: the number of items in the mean of this rank's loss, if the autograd graph does
                not show it.
        """
        if self._wrapped_model is not None and not self._wrapped_model.needs_backward(loss):
            super().backward(loss, **kwargs)
            return
        if self._wrapped_model is None:
            raise InputError(
                "backward is called, and no model was prepared to be trained",
                code="backward-without-model",
                why="a model without an optimizer, or with nothing to train, is for inference",
                fix="accelerator.prepare(model, optimizer, loader)",
            )
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on what the model returned",
                code="loss-not-from-model",
                where="accelerator.backward",
                why="a loss that the model computes itself has gradients if `labels` are given by "
                "name alone",
                fix="model(..., labels=labels), or compute the loss of the model's outputs",
            )
        worth = self._wrapped_model.weight_of(loss, count)
        super().backward(loss, **kwargs)
        self._wrapped_model.backward_done(loss.detach(), worth)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce as Accelerate does; the mean of the last loss is the loss of the global batch."""
        if reduction == "mean" and self._wrapped_model is not None:
            own, tensor = tensor, tree_map(self._wrapped_model.weight_for_mean, tensor)
            reduced = super().reduce(tensor, reduction, scale)
            if own is tensor and isinstance(own, Tensor):
                self._unequal_means.check(own * scale, reduced, "accelerator.reduce")
            return reduced
        return super().reduce(tensor, reduction, scale)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip the total norm of the model's gradients, over all ranks."""
        if norm_type != 2:
            raise InputError(f"gradients are clipped by norm 2, not {norm_type}", code="clip-norm")
        if self._engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        assert self._wrapped_model is not None
        if self._clipped(parameters) is not None:
            raise InputError(
                "gradients of some parameters are clipped by their norm, and not of all",
                code="clip-of-some-parameters",
                where="Accelerator.clip_grad_norm_",
                why="ranks know the norm of all gradients",
                fix="clip all: accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        norm = self._engine.clip_grad_norm_(max_norm)
        if self.sync_gradients:
            self._record.note_gradient_norm(norm)
        return get_reported_norm(norm, overflowed=self._wrapped_model.overflowed)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self._engine is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        some = self._clipped(parameters)
        own = list(self._engine.parameters()) if some is None else some
        nn.utils.clip_grad_value_(own, clip_value)

    def _clipped(self, parameters: Any) -> list[nn.Parameter] | None:
        assert self._engine is not None and self._wrapped_model is not None
        module = self._wrapped_model.module
        return select_clipped_pieces(parameters, module, self._engine, self._names)

    def gather(self, tensor: Any) -> Any:
        """Gather rows of all ranks, unlike in number; the last loss becomes the global loss."""
        if self._wrapped_model is not None and self._wrapped_model.is_last(tensor):
            return self.reduce(tensor, "mean").expand(self.num_processes).clone()
        lifted = tree_map(lambda t: t[None] if t.dim() == 0 else t, tensor)
        rows = len(next(t for t in tree_leaves(lifted)))
        begin = self.process_index * ROW_OFFSET_PER_RANK
        found = gather_rows({range(begin, begin + rows): lifted}, self._ranks(), "gather")
        if isinstance(tensor, Tensor):
            self._unequal_means.check(tensor, found.to(tensor), "accelerator.gather")
        return tree_map(lambda t: t.to(self.device), found)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as `gather` does, without rows of ranks having no samples of the batch.

        Lists of JSON values, such as texts, are concatenated in rank order. Values repeated to
        `batch_size` on each rank, such as a loss, are cut to the samples of the last batch, as by
        Accelerate.
        """
        leaves, label = tree_leaves(input_data), "gather_for_metrics"
        if use_gather_object or not leaves or not all(isinstance(t, Tensor) for t in leaves):
            lists = gather_objects(input_data, self._ranks(), label)
            kept = self._count_sample_rows([len(one) for one in lists])
            things = [thing for one, own in zip(lists, kept.own) for thing in one[:own]]
            return things[: kept.together]
        if get_current_part() is None:
            return self.gather(input_data)
        lifted = tree_map(lambda t: t[None] if t.dim() == 0 else t, input_data)
        rows = gather_integers([len(tree_leaves(lifted)[0])], label)
        kept = self._count_sample_rows([number for (number,) in rows])
        own = kept.own[self.process_index]
        gathered = self.gather(tree_map(lambda t: t[:own], lifted))
        return tree_map(lambda t: t[: kept.together], gathered)

    def _count_sample_rows(self, rows: Sequence[int]) -> GatheredRows:
        """Return the counts of sample rows among each rank's `rows` of the current batch."""
        given = get_current_part()
        if given is None:
            return GatheredRows(rows, None)
        samples, own = given.samples, []
        for rank in range(len(rows)):
            of_rank = split_rows_equally(len(rows), rank, samples)
            if self._engine is not None:
                of_rank = get_micro_batch_rows(self._engine.plan, rank, samples)
            own.append(sum(map(len, of_rank)))
        if all(found == max(1, number) for found, number in zip(rows, own)):
            return GatheredRows(own, None)
        whole = self.gradient_state.active_dataloader.total_batch_size
        repeated = all(found == whole // len(rows) for found in rows)
        return GatheredRows(rows, samples if repeated else None)

    def _ranks(self) -> Communicator:
        return make_communicator(get_group_device()) if self._engine is None else self._engine.comm

    def end_training(self) -> None:
        if self._engine is not None:
            self._engine.look_back()
            self._record.finish(self._record.done)
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as Accelerate does; another model may be prepared afterwards. Collective.

        The model becomes an ordinary module again, with its weights on the first rank; call
        `gpumix.unshard(model)` before to have the weights on every rank.
        """
        if self._engine is not None:
            unshard(self._engine.model, everywhere=False)
            self._record.finish(self._record.done)
            self._engine = self._wrapped_model = None
            del self._saver, self._record
        self._awaited, self._alone = PreparedObjects(), []
        return super().free_memory(*objects)

    # -- saving ------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, WrappedModel):
            return model.module
        return super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full state dict of the model, on the first rank."""
        if self._engine is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return self._saver.request_model_state()

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save the model and its optimizer for a resume by any plan, and the rest as Accelerate
        does."""
        optimizer = self._only_optimizer("save_state")
        with replace_attributes(self, _optimizers=[]):
            folder = super().save_state(output_dir, *args, **kwargs)
        self._saver.save(Path(folder), self._record.done, optimizer)
        self._record.checkpoint(self._record.done, Path(folder))
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        named = self.project_configuration.automatic_checkpoint_naming
        given = find_newest_state(self.project_dir, named) if input_dir is None else input_dir
        folder = Path(given).expanduser()
        optimizer = self._only_optimizer("load_state")
        with (
            replace_attributes(self, _optimizers=[]),
            replace_attributes(accelerator, load_custom_state=_load_registered),
        ):
            super().load_state(str(folder), *args, **kwargs)
        self._record.done = self._saver.load(folder, optimizer)
        for scheduler in self._schedulers:
            rates = zip(scheduler.optimizers[0].param_groups, scheduler.get_last_lr())
            for group, rate in rates:
                group["lr"] = rate

    def _only_optimizer(self, method: str) -> torch.optim.Optimizer:
        if self._engine is None:
            raise InputError(
                f"{method} before the model is trained by a plan",
                code="method-before-plan",
                why="the plan is made when the model, its optimizer and a DataLoader are prepared",
                fix="call accelerator.prepare with all of them first",
            )
        found: list[Any] = self._optimizers
        if len(found) != 1:
            raise InputError(
                f"{method} with {len(found)} prepared optimizers",
                code="several-optimizers",
                why="a state is that of one model and of one optimizer",
                fix="make one optimizer, of several parameter groups, and prepare it",
            )
        return found[0].optimizer  # type: ignore[no-any-return]


def _several_models() -> InputError:
    return InputError(
        "several models cannot be trained by one Accelerator",
        code="several-models",
        fix="call accelerator.free_memory() before the next one is prepared",
    )


def _load_registered(obj: Any, path: str, index: int = 0) -> None:
    """Load the state of a registered object without pickled code; Accelerate unpickles anything."""
    file = Path(path, f"custom_checkpoint_{index}.pkl")
    try:
        state = load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise InputError(
            f"the state of a registered {type(obj).__name__} is not read: that could run code",
            code="registered-state-unsafe",
            where=str(file),
            why=str(error).partition("error: ")[2].partition("\n")[0],
            fix="let its state_dict() return tensors, numbers, texts, lists and dicts; for a class "
            "that you trust call torch.serialization.add_safe_globals before",
        ) from error
    obj.load_state_dict(state)
