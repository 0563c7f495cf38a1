"""Mixin for trainer classes of transformers, to train by a plan.

The loop, callbacks, logs and folders stay transformers' own. Computation changes: a batch is a step
of all devices, `training_step` is a step of the engine, and saved states come from its shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from gpumix.engine.access_between_steps import unshard
from gpumix.engine.engine import Engine
from gpumix.engine.model.adapters import enable_adapters
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.rehearsal.additivity import padding_counts
from gpumix.engine.sharding.unit_discovery import check_trainable
from gpumix.hardware.host.environment import get_local_world_size
from gpumix.hardware.runtime import is_available, is_gpu
from gpumix.integrations.common.batch_rows import PlannedRows, get_evaluation_rows
from gpumix.integrations.common.earlier_plan import find_resumed_run, load_earlier_plan
from gpumix.integrations.common.optimizer_adapter import (
    make_factory_from_trainer,
    take_over_optimizer,
)
from gpumix.integrations.common.plan_and_shard import (
    TrainingSetup,
    get_world_size,
    load_plan,
    refuse_gpu,
    shard_by_plan,
)
from gpumix.integrations.common.run_recorder import TrainingRecorder
from gpumix.integrations.common.saver import Saver, get_parameter_dtypes, patch_save_pretrained
from gpumix.integrations.common.skipped_steps import (
    SkippedStepProxy,
    get_reported_norm,
    zero_if_not_finite,
)
from gpumix.integrations.common.unsupported_arguments import FieldSupport
from gpumix.integrations.dataloader.example_batch import find_example, has_columns
from gpumix.integrations.dataloader.inspect import Batching
from gpumix.integrations.dataloader.samplers import (
    FullBatchSampler,
    prepare_sampler,
    scale_length_grouping,
)
from gpumix.integrations.dataloader.sharded_loader import RankCollator, RankLoader, make_rank_loader
from gpumix.integrations.transformers.arguments import (
    TRAINING_FIELDS,
    check_arguments,
    fold_accumulation,
    precision_of,
    space_of,
)
from gpumix.integrations.transformers.checkpoints import CheckpointMixin
from gpumix.integrations.transformers.control import ControlSynchronizer
from gpumix.integrations.transformers.evaluation import evaluate
from gpumix.integrations.transformers.loss import TrainerLoss
from gpumix.integrations.transformers.overrides import (
    LOADER_METHODS,
    check_overrides,
    is_overridden,
    make_own_step_error,
)
from gpumix.integrations.transformers.padding_widths import PaddingScopes
from gpumix.integrations.transformers.step_logs import StepLogsMixin
from gpumix.integrations.transformers.stock_evaluation import StockEvaluation
from gpumix.integrations.transformers.token_counts import TokenCounts, flops_per_token
from gpumix.profiler.api import join_ranks
from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import get_micro_batch_rows
from gpumix.schema.plan.plan import Plan
from gpumix.schema.reading.error_location import locate_errors
from gpumix.train.processes.script_errors import show_errors_without_traceback
from gpumix.train.run_log import run_files

# Private parts of transformers' trainer, subject to change.
REPLACED_PRIVATE_METHODS = (
    "_move_model_to_device",
    "_get_dataloader",
    "_prepare_for_training",
    "_init_training_state",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_track_num_input_tokens",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_best_model",
)
# Stock trainers take bitsandbytes' optimizer for them; `paged` is the plan's choice here.
ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
ARGUMENTS = ("dataloader_multiprocessing_context", "train_sampling_strategy")  # the newest


class ModelProxy:
    """Stand-in for the wrapped model in transformers' loop."""

    def __init__(self, trainer: Any, engine: Engine, looks: Sequence[nn.Parameter]) -> None:
        self._trainer = trainer
        self._engine = engine
        self._looks = looks

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise make_own_step_error(self._trainer)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise make_own_step_error(self._trainer)

    def train(self, mode: bool = True) -> None:
        self._trainer.model.train(mode)

    def zero_grad(self) -> None:
        for parameter in self._engine.parameters():
            parameter.grad = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the full model's parameters without values, for counting."""
        return iter(self._looks)


class PlannedTrainerMixin(StepLogsMixin, TokenCounts, CheckpointMixin):
    """Mixin for `transformers.Trainer` or a derived class.

    Args:
        plan: a plan, or the file of a plan; by default the devices are measured and a plan is made
            when first needed.
        couples: for a loss coupling samples of a batch: "batch" has a single device compute each
            batch, "micro-batch" accepts a separate loss per micro-batch; by default refused.
    """

    _arguments: tuple[type, FieldSupport] = (TrainingArguments, TRAINING_FIELDS)
    args: Any
    model: Any
    state: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    accelerator: Any
    is_in_train: bool

    def __init__(
        self,
        *args: Any,
        plan: Plan | Path | str | None = None,
        couples: str = "",
        **kwargs: Any,
    ) -> None:
        show_errors_without_traceback()
        self._given = load_plan(plan)
        self._couples = couples
        self._agreed = ControlSynchronizer()
        self._widths = PaddingScopes(self)
        self._goes_on: Path | None = None
        self._engine: Engine | None = None
        self._record = TrainingRecorder()
        self._filters_itself = False  # filters bad losses in the log itself
        check_overrides(self, PlannedTrainerMixin)
        super().__init__(*args, **kwargs)
        always = is_overridden(self, "prediction_step", PlannedTrainerMixin)
        generates = getattr(self.args, "predict_with_generate", False)
        self._stock = StockEvaluation(self, always=always or generates)
        calls_back = self.callback_handler.call_event
        self.callback_handler.call_event = partial(self._call_callbacks, calls_back)
        for name in LOADER_METHODS:
            if is_overridden(self, name, PlannedTrainerMixin):
                setattr(self, name, partial(self._loaded, getattr(self, name), name))
        step = self.training_step
        if is_overridden(self, "training_step", PlannedTrainerMixin):
            step = partial(self._checked_step, step)
        self.training_step = partial(self._filtered_step, step)  # type: ignore[method-assign]

    # -- setup -------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, before anything else, after a check of the arguments."""
        check_arguments(self.args, *self._arguments)
        self._space = space_of(self.args)
        with self._folded():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # A program's own loader is not split evenly: `_loaded` takes it apart.
        self.accelerator.prepare_data_loader = lambda loader, *args, **kwargs: loader

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the engine moves shards."""

    @property
    def _folder(self) -> Path:
        """Folder of plan, profile and record of the run."""
        return Path(self.args.output_dir) / run_files.SCRIPT_FOLDER

    @property
    def plan(self) -> Plan | None:
        """The plan of the training, once made."""
        return None if self._engine is None else self._engine.plan

    @property
    def has_engine(self) -> bool:
        """True if this trainer has sharded the model."""
        engine = self._engine
        return engine is not None and engine.model is self.model and not engine.ended

    def _hosted(self, dataset: Any, collate: Any) -> Engine:
        """Return the model's engine, made when first needed. Collective.

        Args:
            dataset, collate: show the shapes of batches.
        """
        if self.has_engine:
            assert self._engine is not None
            if self.optimizer is not None or not self._engine.outside.has_changed_requires_grad():
                return self._engine
        with enable_adapters(self.model):  # an evaluation without adapters may be first
            return self._make_engine(dataset, collate)

    def _make_engine(self, dataset: Any, collate: Any) -> Engine:
        model, args = self.model, self.args
        before = self._engine
        if before is not None and before.model is model and before.ended:  # by another trainer
            self._given = before.plan
        unshard(model)
        if args.use_cpu:
            refuse_gpu(join_ranks(), "use_cpu=True", where="TrainingArguments")
        self._looks = [
            nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        ]
        self._flops_per_token = flops_per_token(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        dtypes = get_parameter_dtypes(model)
        if self.optimizer is None and is_overridden(self, "create_optimizer", PlannedTrainerMixin):
            self.create_optimizer()  # by the program, for full parameters
        specimen = find_example(dataset, collate)
        steps, samples = self._accumulation_steps, self._global_batch
        self._loss = TrainerLoss(self, steps=steps, samples=samples // steps)
        training = TrainingSetup(
            specimen.batch,
            sequence_length=specimen.sequence_length,
            global_batch=samples,
            loss=self._loss,
            optimizer=make_factory_from_trainer(self),
            precision=precision_of(args, model),
            torch_compile=args.torch_compile,
            space=self._space,
            seed=args.seed,
            told=f"{type(self).__name__} {args.optim} {type(self.optimizer).__name__}",
            couples=self._couples,
        )
        plan = self._given or load_earlier_plan(self._goes_on, model, global_batch=samples)
        with self._folded(), self._loss.in_one_process(), self._measured():
            self._engine = shard_by_plan(model, training, plan=plan, folder=self._folder)
            if padded := specimen.padded():
                self._widths.trained.is_global = padding_counts(self._engine, self._loss, *padded)
        self._saver = Saver(self._engine, dtypes, get_local_world_size())
        patch_save_pretrained(model, self._saver)
        return self._engine

    def _measured(self) -> AbstractContextManager[None]:
        """Mark losses inside the context as not the program's; see `trl.SFTTrainer`."""
        return nullcontext()

    # -- data --------------------------------------------------------------------------------------

    @property
    def _global_batch(self) -> int:
        return int(fold_accumulation(self._user_args).train_batch_size) * get_world_size()

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return a loader of this rank's part of global batches, in the order of transformers'
        sampler."""
        args, given = self.args, dataset
        collate: Any = self.data_collator  # type: ignore[attr-defined]
        of_stock = partial(
            super()._get_dataloader,  # type: ignore[misc]
            dataset,
            description,
            batch_size,
            sampler_fn,
            is_training,
            dataloader_key,
        )
        if has_columns(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)  # type: ignore[attr-defined]
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)  # type: ignore[attr-defined]
        sampler = begin = None
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            sampler = None if sampler_fn is None else sampler_fn(dataset)
            sampler = self._sampler(SequentialSampler(dataset) if sampler is None else sampler)
            if args.dataloader_drop_last:
                trained = self._global_batch // self._accumulation_steps
                sampler = FullBatchSampler(
                    sampler, trained if is_training else batch_size * get_world_size()
                )
            if is_training:
                number, rank = args.dataloader_num_workers, args.process_index
                begin = partial(seed_worker, num_workers=number, rank=rank)
        width = self._widths.trained
        if not is_training:
            width = self._widths.evaluated(description, dataset, collate, given)
        planned = partial(
            make_rank_loader,
            dataset,
            batch_size=self._global_batch if is_training else batch_size * get_world_size(),
            most=self._global_batch,
            rows=self._rows(is_training, dataset, collate),
            collate=RankCollator(collate, width),
            sampler=sampler,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=begin,
        )
        if not is_training and self._stock.wanted(dataset, collate):
            return self._stock.loader(of_stock, planned)
        loader: RankLoader = planned()
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _sampler(self, sampler: Any) -> Any:
        """Prepare transformers' sampler as Accelerate does."""
        seedable = self.args.accelerator_config.use_seedable_sampler
        return prepare_sampler(
            scale_length_grouping(sampler), seedable=seedable, seed=self.args.data_seed
        )

    def _loaded(self, load: Any, name: str, *args: Any) -> RankLoader:
        """Return a loader of this rank's part of batches from a program's own loader."""
        loader, is_training = load(*args), name == LOADER_METHODS[0]
        if isinstance(loader, RankLoader):
            return loader
        with locate_errors(f"{name} of {type(self).__name__}"):
            given = Batching.of(loader)
            if is_training and given.batch_size * get_world_size() != self._global_batch:
                raise InputError(
                    f"batches have {given.batch_size} samples for each process, the arguments say "
                    f"{self.args.train_batch_size}",
                    code="global-batch-mismatch",
                    fix="make the loader with batch_size=self.args.train_batch_size",
                )
        if not is_training and self._stock.has_loader(loader):
            return loader
        width = self._widths.trained
        if not is_training:
            description = "Evaluation" if name == LOADER_METHODS[1] else "Prediction"
            width = self._widths.evaluated(description, loader.dataset, loader.collate_fn)
        collate = RankCollator(loader.collate_fn, width)
        rows = self._rows(is_training, loader.dataset, loader.collate_fn)
        samples, most = given.batch_size * get_world_size(), self._global_batch
        planned = partial(given.make_rank_loader, samples, rows, collate, RankLoader, most=most)
        if not is_training and self._stock.wanted(loader.dataset, loader.collate_fn):
            return self._stock.prepare_loader(loader, planned)
        return planned()

    def _rows(self, is_training: bool, dataset: Any, collate: Any) -> PlannedRows:
        """Return a loader's rows by the plan, which may be needed before training."""
        made = partial(self._hosted, dataset, collate)
        return PlannedRows(made, get_micro_batch_rows if is_training else get_evaluation_rows)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return one batch: a full step, with labels counted by the engine."""
        batch = self._record.next_of(epoch_iterator)
        return ([] if batch is None else [batch]), None

    # -- training ----------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[ModelProxy, Any]:
        check_trainable(self.model)
        self._hosted(train_dataloader.whole, train_dataloader.collated)
        if self._created_lr_scheduler:  # type: ignore[has-type]
            self.lr_scheduler, self._created_lr_scheduler = None, False
        PlannedTrainerMixin.create_optimizer(self)  # a program's own has been called already
        self.create_scheduler(num_training_steps=max_steps)  # type: ignore[attr-defined]
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        assert self._engine is not None
        self.accelerator._optimizers.append(SkippedStepProxy(self._engine, self.optimizer))
        self._record.begin(
            self._engine,
            self._folder,
            plans=type(self).__name__,
            steps=max_steps,
            done=self.state.global_step,
        )
        return ModelProxy(self, self._engine, self._looks), train_dataloader

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        self._goes_on = find_resumed_run(resume_from_checkpoint, self.args.output_dir)
        with self._folded():
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does, with a record for `gpumix top` and `gpumix report`."""
        try:
            result = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._record.fail(error)
            raise
        else:
            self._end()
            return result
        finally:
            self._leave_filter()
            self._record = TrainingRecorder()

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kw: Any) -> None:
        """Record the step, then log, save and evaluate. Called after each step and at an epoch's
        end."""
        self._record.step(
            self.state.global_step,
            learning_rate=self._get_learning_rate(),  # type: ignore[attr-defined]
            norm=zero_if_not_finite(grad_norm),
        )
        control = self.control
        self._agreed.agree(control)
        calls_back = control.should_log or control.should_evaluate or control.should_save
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kw)  # type: ignore[misc]
        if calls_back:
            self._agreed.agree(self.control)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create an optimizer as transformers does, of this rank's shards."""
        if self._engine is None:
            return super().create_optimizer(model)  # type: ignore[misc,no-any-return]
        if self.optimizer is not None:
            self.optimizer = take_over_optimizer(self.optimizer, self._engine, self._names)
        return super().create_optimizer(self._engine)  # type: ignore[misc,no-any-return]

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return class and settings; of AdamW in 8 bits one that fits any plan."""
        if args.optim not in ADAMW_8BIT_NAMES:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW8bit, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return super().get_decay_parameter_names(self.model)  # type: ignore[misc,no-any-return]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward, backward and reduction of a global batch; return the global loss."""
        assert self._engine is not None
        self.model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._record.computes()
        self._settle(inputs, in_step=True)
        with self._loss.in_one_process(), self._log_step_means():
            loss = self._engine.step(dict(inputs), samples=inputs.samples)
        self._record.loss = loss
        return loss.float()

    def _settle(self, inputs: Any, *, in_step: bool = False) -> None:
        """Find by the first batch how losses of its parts add up. Collective."""
        assert self._engine is not None
        self._loss.whole = inputs.samples
        if not self._engine.is_settled(in_step=in_step):
            with self._loss.in_one_process(), self._measured():
                self._engine.settle(dict(inputs), inputs.samples, in_step=in_step)
            self._loss.settle(inputs, self._engine.comm)
            self._loss.whole = inputs.samples  # the rehearsal set another number

    def _checked_step(self, step: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the program's own step, which must call ours."""
        self._record.loss = None
        loss: Tensor = step(*args, **kwargs)
        if self._record.loss is None:
            raise make_own_step_error(self)
        return loss

    def _filtered_step(self, step: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run a step and filter its loss as by `logging_nan_inf_filter`. The loop's own filter
        would make the host wait for a GPU in every step. So on GPUs the device filters, and the
        loop's filter is off until `floating_point_ops`, called next."""
        self._leave_filter()
        loss: Tensor = step(*args, **kwargs)
        if self.is_in_train and self.args.logging_nan_inf_filter and is_gpu(loss.device):
            self._filters_itself, self.args.logging_nan_inf_filter = True, False
            since = 1 + self.state.global_step - self._globalstep_last_logged  # type: ignore[attr-defined]
            average = self._tr_loss / since  # type: ignore[attr-defined]
            loss = torch.where(torch.isfinite(loss), loss, average)
        return loss

    def _leave_filter(self) -> None:
        if self._filters_itself:
            self._filters_itself, self.args.logging_nan_inf_filter = False, True

    def _clip_grad_norm(self, model: Any) -> Tensor:
        assert self._engine is not None
        norm = self._engine.clip_grad_norm_(self.args.max_grad_norm)
        return get_reported_norm(norm, overflowed=self._engine.overflowed)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self._engine is not None
        if grad_norm is not None:
            return grad_norm
        return get_reported_norm(self._engine.gradient_norm(), overflowed=self._engine.overflowed)

    def floating_point_ops(self, inputs: Any) -> int:
        self._leave_filter()
        return super().floating_point_ops(inputs)

    def get_num_trainable_parameters(self) -> int:
        if self._engine is None:
            return super().get_num_trainable_parameters()  # type: ignore[misc,no-any-return]
        return sum(p.numel() for p in self._looks if p.requires_grad)

    # -- evaluation --------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        if self._stock.has_loader(dataloader):
            rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
            planned = self._stock.get_planned_loader(dataloader)
            with self._stock.under_way(super()._move_model_to_device):  # type: ignore[misc]
                told = super().evaluation_loop(dataloader, *rest)  # type: ignore[misc]
            name = f"{metric_key_prefix}_loss"
            if planned is not None and name in told.metrics:  # otherwise a mean of ranks' means
                told.metrics[name] = self.evaluation_loop(
                    planned, description, True, None, metric_key_prefix
                ).metrics[name]
            return told
        begun, is_first = time.time(), not self.has_engine  # evaluated before training
        engine = self._hosted(dataloader.whole, dataloader.collated)
        if is_first:
            self.model_preparation_time = round(time.time() - begun, 4)
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.model.eval()
        with self._folded(), self._loss.in_one_process():
            found = evaluate(
                self,
                engine,
                dataloader,
                description=description,
                loss_only=bool(prediction_loss_only),
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )
        metrics = found.metrics or {}
        if hasattr(self, "model_preparation_time"):
            prepared = f"{metric_key_prefix}_model_preparation_time"
            metrics[prepared] = self.model_preparation_time
        loss = metrics.get(f"{metric_key_prefix}_loss")
        if self.is_in_train and loss is not None:
            self._record.evaluation(self.state.global_step, loss)
        return found

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "hyperparameter_search is not possible with gpumix",
            code="hyperparameter-search",
            why="each trial would need devices of its own",
            fix="start one run for each trial",
        )
