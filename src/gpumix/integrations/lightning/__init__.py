"""A strategy of Lightning's `Trainer` for devices of unlike types, with equal results.

    from gpumix.integrations.lightning import GpumixStrategy

    trainer = Trainer(strategy=GpumixStrategy(), ...)

Start the script with a process per device: `gpumix launch SCRIPT`, or torchrun. A step's samples
are those of all devices together; a plan decides how many each device computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpumix.integrations.common.optional_dependency import require_packages

require_packages(__name__, "lightning", extra="lightning")

import torch  # noqa: E402 - a missing package is reported first
from lightning.fabric.utilities.rank_zero import (  # noqa: E402
    rank_zero_only as fabric_rank_zero_only,
)
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from lightning.pytorch.callbacks import ModelSummary  # noqa: E402
from lightning.pytorch.core.optimizer import _MockOptimizer  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torchmetrics import Metric  # noqa: E402

from gpumix.engine.access_between_steps import unshard  # noqa: E402
from gpumix.engine.engine import Engine  # noqa: E402
from gpumix.hardware.host.environment import get_local_world_size  # noqa: E402
from gpumix.hardware.memory_limit import count_as_host_memory  # noqa: E402
from gpumix.integrations.common.batch_rows import PlannedRows, get_evaluation_rows  # noqa: E402
from gpumix.integrations.common.gather import gather_rows  # noqa: E402
from gpumix.integrations.common.optimizer_adapter import (  # noqa: E402
    make_factory_from_optimizer,
    take_over_optimizer,
)
from gpumix.integrations.common.plan_and_shard import (  # noqa: E402
    TrainingSetup,
    get_world_size,
    load_plan,
    precision_of_weights,
    refuse_gpu,
    shard_by_plan,
)
from gpumix.integrations.common.run_recorder import TrainingRecorder  # noqa: E402
from gpumix.integrations.common.saver import Saver, get_parameter_dtypes  # noqa: E402
from gpumix.integrations.dataloader.example_batch import find_example  # noqa: E402
from gpumix.integrations.dataloader.inspect import Batching  # noqa: E402
from gpumix.integrations.dataloader.sharded_loader import (  # noqa: E402
    PaddingScope,
    RankLoader,
    TreeCollator,
    collate_tree,
)
from gpumix.integrations.lightning.checkpoints import CheckpointStrategy  # noqa: E402
from gpumix.integrations.lightning.cluster_environment import LaunchedEnvironment  # noqa: E402
from gpumix.integrations.lightning.collectives import StrategyCollectives  # noqa: E402
from gpumix.integrations.lightning.dataloader import PlannedLoader  # noqa: E402
from gpumix.integrations.lightning.precision import PlannedPrecision  # noqa: E402
from gpumix.integrations.lightning.step_metrics import refuse_means  # noqa: E402
from gpumix.integrations.lightning.training_step import EMPTY_ROW_SHAPE, ModuleSteps  # noqa: E402
from gpumix.integrations.lightning.unsupported import check_trainer  # noqa: E402
from gpumix.schema.errors import InputError  # noqa: E402
from gpumix.schema.job.search_space import EVERYTHING, Space  # noqa: E402
from gpumix.schema.plan.batch_shares import get_micro_batch_rows  # noqa: E402
from gpumix.schema.plan.plan import Plan  # noqa: E402
from gpumix.train.processes.script_errors import show_errors_without_traceback  # noqa: E402
from gpumix.train.run_log import run_files  # noqa: E402

__all__ = ["GpumixStrategy"]

# Metrics in a tensor-parallel group would count samples twice.
METRICS_SPACE = EVERYTHING.model_copy(update={"tensor_parallel_size": (1,)})
ONE_OPTIMIZER = "return one torch optimizer, with or without schedulers"


class GpumixStrategy(StrategyCollectives, CheckpointStrategy):
    """Strategy training a module by a plan.

    Args:
        plan: a plan, or the file of a plan; by default the devices are measured and a plan is made
            when the trainer first needs it.
        count: returns the number of items of a batch in the mean loss of `training_step`; by
            default found by a rehearsal of the first step.
        couples: for a loss coupling samples of a batch: "batch" has a single device compute each
            batch, "micro-batch" accepts a separate loss per micro-batch; by default refused.
        space: the search space of plans.
        torch_compile: compile the blocks.
        seed: of dropout.
    """

    strategy_name = "gpumix"

    def __init__(
        self,
        *,
        plan: Plan | Path | str | None = None,
        count: Callable[[Any], Tensor | int] | None = None,
        couples: str = "",
        space: Space = EVERYTHING,
        torch_compile: bool = False,
        seed: int = 0,
    ) -> None:
        show_errors_without_traceback()
        self._planned_precision = PlannedPrecision()
        super().__init__(cluster_environment=LaunchedEnvironment())
        self._given = load_plan(plan)
        self._steps = ModuleSteps(count)
        self._couples = couples
        self._width = PaddingScope()
        self._space = space
        self._compile = torch_compile
        self._seed = seed
        self._trains = False  # False: the engine was made to evaluate
        self._adds = self._overflowed = False  # accumulates gradients; any overflowed
        self._like: Batching | None = None  # the loader to be read, for the shapes of batches
        self._recording = TrainingRecorder()

    @property
    def engine(self) -> Engine:
        """The engine, made when the trainer first needs it."""
        if self._engine is None:
            raise InputError(
                "batches are read before the devices were measured",
                code="batches-before-measurement",
                where="GpumixStrategy",
                why="configure_optimizers asks for trainer.estimated_stepping_batches, and a "
                "stream does not say how many it has",
                fix="say how many steps there are: Trainer(max_steps=...) and max_epochs=-1",
            )
        return self._engine

    # -- as Lightning asks -------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> PlannedPrecision:
        return self._planned_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            self._planned_precision.told(plugin)

    @property
    def root_device(self) -> torch.device:
        return self._device

    def model_to_device(self) -> None:
        """Do nothing: the engine moves shards."""

    def set_world_ranks(self) -> None:
        for only in (rank_zero_only, fabric_rank_zero_only):
            vars(only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        self.join_ranks()
        if isinstance(self.accelerator, CPUAccelerator):
            refuse_gpu(self._device, "accelerator='cpu'", where="Trainer")

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        check_trainer(trainer, module)
        # The plan assigns samples to ranks.
        trainer._accelerator_connector.use_distributed_sampler = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and self._engine.model is not module:
            raise InputError(
                "this strategy has another module already",
                code="strategy-reused",
                why="a module is sharded over all devices, once",
                fix="make a trainer and a GpumixStrategy of its own for each module",
            )
        if self._engine is None or (fitting and not self._trains):
            unshard(module)  # from another trainer, or from evaluation
            self._engine = self._like = None
            vars(module).pop("zero_grad", None)
            self._host(trainer, module, fitting=fitting)
            self._trains = fitting
        elif fitting:
            self.setup_optimizers(trainer)
            names = {id(p): name for name, p in module.named_parameters()}
            self.optimizers = [take_over_optimizer(self.optimizers[0], self._engine, names)]

    def teardown(self) -> None:
        """Keep the module sharded for later calls."""
        self.checkpoint_io.teardown()

    def _host(self, trainer: Any, module: LightningModule, *, fitting: bool) -> None:
        """Make the engine. Collective."""
        self.precision_plugin.convert_module(module)
        if fitting:
            self.setup_optimizers(trainer)
        like = self._like or _get_first_batching(trainer)
        _summarize(trainer, module)
        names = {id(p): name for name, p in module.named_parameters()}
        dtypes = get_parameter_dtypes(module)
        self._steps.begin(trainer, module)
        specimen = find_example(like.loader.dataset, like.loader.collate_fn, self._handed_over)
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        said, together = self.precision_plugin.dtype, like.batch_size * get_world_size()
        if self._given is not None and not fitting:  # larger batches come in parts
            together = self._given.global_batch
        training = TrainingSetup(
            specimen.batch,
            sequence_length=specimen.sequence_length,
            global_batch=together,
            loss=self._steps.loss,
            optimizer=make_factory_from_optimizer(self.optimizers[0]) if fitting else None,
            # For `32-true`, the dtype of the weights.
            precision=precision_of_weights(module) if said == "fp32" else said,
            torch_compile=self._compile,
            space=METRICS_SPACE if metrics and self._space == EVERYTHING else self._space,
            seed=self._seed,
            told=self._steps.told([type(optimizer).__name__ for optimizer in self.optimizers]),
            couples=self._couples,
        )
        self._engine = shard_by_plan(module, training, plan=self._given, folder=_folder(trainer))
        refuse_means(module, self._engine.comm.world)
        if metrics and self._engine.plan.uses_tensor_parallel:
            raise InputError(
                "the plan has tensor parallelism, and the module has metrics",
                code="metrics-with-tensor-parallel",
                why="each rank of a tensor-parallel group would count the same samples",
                fix="make a plan with techniques.tensor_parallel_size=1",
            )
        if fitting:
            self.optimizers = [take_over_optimizer(self.optimizers[0], self._engine, names)]
        self.saver = Saver(self._engine, dtypes, get_local_world_size(), name="")
        self.precision_plugin.engine = self._engine
        self._steps.serve(self._engine)
        module.zero_grad = partial(_without_gradients, self._engine)  # type: ignore[method-assign]
        module._device = self._device
        for metric in metrics:
            metric.to(self._device)
        if padded := specimen.padded():
            self._width.is_global = not fitting or self._steps.has_padding_dependence(*padded)

    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise InputError(
                "configure_optimizers returned several",
                code="several-optimizers",
                fix=ONE_OPTIMIZER,
            ) from None
        if not self.optimizers or isinstance(self.optimizers[0], _MockOptimizer):
            raise InputError(
                "configure_optimizers returned no optimizer", code="no-optimizer", fix=ONE_OPTIMIZER
            )
        self.group_sizes = [len(group["params"]) for group in self.optimizers[0].param_groups]

    # -- data --------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> PlannedLoader:
        """Return this rank's part of global batches of `batch_size` samples per rank."""
        self._like = Batching.of(dataloader)
        samples = self._like.batch_size * get_world_size()
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.training
        given = self._like.of_whole(samples) if training else self._like
        if not training and self._engine is not None:
            samples = min(samples, self._engine.plan.global_batch)
        of_plan = get_micro_batch_rows if training else get_evaluation_rows
        rows = PlannedRows(lambda: self.engine, of_plan)
        collate = TreeCollator(given.loader.collate_fn, self._width)
        own = given.make_rank_loader(samples, rows, collate, RankLoader)
        return PlannedLoader(own, self._recording, given.loader)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Run the module's hooks on the host; the engine moves values to the device."""
        assert self.lightning_module is not None
        with count_as_host_memory():
            return self.lightning_module._apply_batch_transfer_handler(
                batch, device=torch.device("cpu"), dataloader_idx=dataloader_idx
            )

    def _handed_over(self, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
        """Return a batch as steps receive it, for measurements."""
        assert self.lightning_module is not None
        batch = self.lightning_module._on_before_batch_transfer(collate_tree(collate, samples))
        return self.batch_to_device(batch)

    # -- steps -------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *others: Any) -> Tensor:
        """Run forward, backward and reduction of a global batch; return the global loss."""
        if not self._adds:  # Lightning clears gradients too late, before its own backward
            _without_gradients(self.engine)
        self._recording.computes()
        with self.forbid_collectives():
            loss = self._steps.train(batch, others, self.precision_plugin.samples)
        self._accumulate()
        self._steps.publish()
        self.precision_plugin.stash_gradients()
        self._recording.loss = loss
        return loss.float()

    def _accumulate(self) -> None:
        """Divide gradients summed over batches by `accumulate_grad_batches`, even if an epoch ends
        with fewer batches, as Lightning does."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        self._overflowed = self.engine.overflowed or (self._adds and self._overflowed)
        self._adds = trainer.fit_loop._should_accumulate()
        if self._adds:
            return
        if self._overflowed:  # in any of the batches
            _without_gradients(self.engine)
        gradients = [p.grad for p in self.engine.parameters() if p.grad is not None]
        if gradients and trainer.accumulate_grad_batches > 1:
            torch._foreach_div_(gradients, trainer.accumulate_grad_batches)

    def validation_step(self, batch: Any, *others: Any) -> None:
        self._evaluated("validation_step", batch, others)

    def test_step(self, batch: Any, *others: Any) -> None:
        self._evaluated("test_step", batch, others)

    def predict_step(self, batch: Any, *others: Any) -> Any:
        """Return the module's predictions for the global batch, in order, on the host."""
        return self._evaluated("predict_step", batch, others)

    def _evaluated(self, hook: str, batch: Any, others: tuple[Any, ...]) -> Any:
        with self.forbid_collectives():
            made = self._steps.evaluate(hook, batch, others, self.precision_plugin.samples)
        self._steps.publish()
        if hook == "predict_step":
            found = gather_rows(made, self.engine.comm, "gathering of predictions")
            if not isinstance(found, Tensor) or found.shape[1:] != EMPTY_ROW_SHAPE:
                return found
        return None

    # -- the record --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        steps, folder = trainer.estimated_stepping_batches, _folder(trainer)
        if folder is not None and steps > 0:
            self._recording.begin(
                self.engine,
                folder,
                plans=type(self).__name__,
                steps=None if math.isinf(steps) else int(steps),
                done=trainer.global_step,
            )

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._recording.step(
            self.lightning_module.trainer.global_step + 1,
            learning_rate=optimizer.param_groups[0]["lr"],
            norm=self.precision_plugin.norm,
        )
        return result

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._recording.checkpoint(checkpoint["global_step"], Path(filepath))

    def on_validation_end(self) -> None:
        self._recording.rest()

    def on_train_end(self) -> None:
        assert self.lightning_module is not None
        self._steps.look_back()
        self._recording.finish(self.lightning_module.trainer.global_step)

    def on_exception(self, exception: BaseException) -> None:
        self._recording.fail(exception)
        super().on_exception(exception)


def _without_gradients(engine: Engine, set_to_none: bool = True) -> None:
    """Clear gradients; replaces the module's own method, which uses full parameters."""
    for parameter in engine.parameters():
        parameter.grad = None


def _get_first_batching(trainer: Any) -> Batching:
    """Return the batching of the next loader, before Lightning sets it up."""
    fitting, predicting = trainer.state.fn == TrainerFn.FITTING, trainer.predicting
    loop = trainer.predict_loop if predicting else trainer._evaluation_loop
    source = (trainer.fit_loop if fitting else loop)._data_source
    loaders = tree_leaves(source.dataloader() if source.is_defined() else None)
    if not loaders:
        raise InputError(
            "the trainer has no batches", code="trainer-without-batches", fix="give it a DataLoader"
        )
    return Batching.of(loaders[0])


def _summarize(trainer: Any, module: LightningModule) -> None:
    """Print model summaries before sharding: afterwards a rank has only shards."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelSummary) and callback._max_depth:
            callback.on_fit_start(trainer, module)
            callback._max_depth = 0


def _folder(trainer: Any) -> Path | None:
    """Return the folder of plan, profile and record. A trainer has none without a logger, or with
    one that writes to a store elsewhere, such as s3://bucket."""
    folder = str(trainer.log_dir or "") if trainer.loggers else ""
    return Path(folder, run_files.SCRIPT_FOLDER) if folder and "://" not in folder else None
