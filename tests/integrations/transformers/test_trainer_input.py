"""What users of `Trainer` bring along: losses and data of their own, and what has no meaning."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gpumix
from gpumix.integrations.common.optional_dependency import require_attributes
from gpumix.report.run import read_run
from gpumix.schema.errors import GpumixError, InputError
from helpers.errors import raises
from helpers.extended import chosen, every_second, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.evaluations import TOGETHER, evaluations
from helpers.scripts.programs import (
    Texts,
    arguments,
    as_launched,
    in_folder,
    in_hub_cache,
    log_of,
    model,
    unlike_ranks,
)
from helpers.training.reference import Share, plan_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # above those of two runs

SHORT = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}


class Stream(IterableDataset):
    """Read from its beginning to its end."""

    def __iter__(self):
        return iter([Texts()[n] for n in range(30)])


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """As users write them: it needs the number of labels."""
    logits = outputs.logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    return losses * 2 / num_items_in_batch


def with_columns(samples: int = 30) -> Any:
    """As datasets come: with columns that no model takes."""
    from datasets import Dataset

    rows = {name: values.tolist() for name, values in Texts(samples).rows.items()}
    more = {"text": [f"sample {n}" for n in range(samples)]}
    return Dataset.from_dict({**rows, **more, "length": [n * 7 % 10 for n in range(samples)]})


def mapped_stream() -> Any:
    """Does not know its columns any more."""
    return with_columns().to_iterable_dataset(num_shards=2).map(louder)


def louder(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"].upper()}


def of_folder(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    name = in_folder(model(), folder / "model")
    return AutoModelForCausalLM.from_pretrained(name, **settings)


def of_hub(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(in_hub_cache(model(), folder / "hub"))


def adapted(folder: Path, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)
    return get_peft_model(model(), config)


MODELS: dict[str, Callable[[Path], Any]] = {
    "of a folder": of_folder,
    "of the hub": of_hub,
    "in bf16": partial(of_folder, dtype=torch.bfloat16),
    "with adapters": adapted,
    "with adapters and a head": partial(adapted, modules_to_save=["lm_head"]),
}
STREAMED = {"max_steps": 3, "num_train_epochs": -1, "dataloader_num_workers": 2}


def by_elements(parameters: Iterable[nn.Parameter], ours: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_matrices(parameters: Iterable[nn.Parameter], ours: bool) -> torch.optim.Optimizer:
    return (gpumix.Adafactor if ours else torch.optim.Adafactor)(parameters, lr=0.05)


def variations() -> dict[str, dict[str, Any]]:
    """Data sets are made when they are trained on: tests that are only collected have no use for
    their library."""
    return {
        "a loss function": {"compute_loss_func": own_loss},
        "label smoothing": {"label_smoothing_factor": 0.1},
        "a stream": {"train_dataset": Stream, "max_steps": 3, "num_train_epochs": -1},
        "accumulation": {"gradient_accumulation_steps": 2},
        "an optimizer": {"optimizers": by_elements},
        "an optimizer of whole matrices": {"optimizers": by_matrices},
        "a loss of a subclass": {"subclass": "loss"},
        "a loader of a subclass": {"subclass": "loader"},
        "an optimizer of a subclass": {"subclass": "optimizer"},
        "a prepared loader and a step of a subclass": {"subclass": "step"},
        "workers": {"dataloader_num_workers": 2},
        "columns": {"train_dataset": with_columns},
        "a function that makes models": {"model_init": True},
        "in turn": {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        "whole batches of an accumulation": {
            "dataloader_drop_last": True,
            "gradient_accumulation_steps": 3,
            "train_dataset": partial(Texts, 42),
        },
        "whole batches of a stream": {
            "train_dataset": Stream,
            "dataloader_drop_last": True,
            "max_steps": 4,
            "num_train_epochs": -1,
        },
        "by length": {
            "train_sampling_strategy": "group_by_length",
            # As many are grouped by one process as by two.
            "train_dataset": partial(with_columns, 48),
            "num_train_epochs": 2,
        },
        "orders that no seed tells": {
            "accelerator_config": {"use_seedable_sampler": False},
            "num_train_epochs": 2,
        },
        "a mapped stream": {"train_dataset": mapped_stream, **STREAMED},
        "a stream that goes on": {"train_dataset": mapped_stream, "goes_on": True, **STREAMED},
        "noise in embeddings": {"neftune_noise_alpha": 5.0},
        **evaluations(),
        **{f"weights {name}": {"model": name} for name in MODELS},
    }


LOOSE = {"weights in bf16": 2e-2}  # there are no masters in fp32 in the stock script


def subclasses(base: type) -> dict[str, type]:
    """As programs have them."""

    class Loss(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
            loss = outputs.loss + 0.01
            return (loss, outputs) if return_outputs else loss

    class Loader(base):
        def get_train_dataloader(self):
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                sampler=range(29, -1, -1),
                collate_fn=self.data_collator,
            )

    class Optimizer(base):
        def create_optimizer(self, model=None):
            rates = [0.1 if "embed" in name else 0.01 for name, _ in self.model.named_parameters()]
            groups = [{"params": [p], "lr": r} for p, r in zip(self.model.parameters(), rates)]
            self.optimizer = torch.optim.SGD(groups, momentum=0.9)
            return self.optimizer

    class Step(Loader):
        def get_train_dataloader(self):
            return self.accelerator.prepare(super().get_train_dataloader())

        def training_step(self, *args):
            return super().training_step(*args) * 2

    return {
        "loss": Loss,
        "loader": Loader,
        "optimizer": Optimizer,
        "step": Step,
    }


def trained(folder: Path, ours: bool, names: list[str]) -> dict[str, list[float]]:
    """The losses of these variations of a script."""
    as_launched(folder)
    if ours:
        from gpumix.integrations.transformers import Trainer
    else:
        from transformers import Trainer

    kinds = subclasses(Trainer)
    found = {}
    for name in names:
        changes = variations()[name]
        accumulates = changes.get("gradient_accumulation_steps", 1)
        kind = kinds.get(changes.pop("subclass", None), Trainer)
        make = MODELS.get(changes.pop("model", ""), lambda folder: model())
        data = changes.pop("train_dataset", partial(Texts, 30))
        given = {"model": make(folder), "train_dataset": data()}
        twice = changes.pop("model_init", False)
        if twice:
            given["model_init"] = model
        if make_optimizer := changes.pop("optimizers", None):
            optimizer = make_optimizer(given["model"].parameters(), ours)
            given["optimizers"] = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
        if "compute_loss_func" in changes:
            given["compute_loss_func"] = changes.pop("compute_loss_func")
        given["eval_dataset"] = changes.pop("eval_dataset", partial(Texts, 10, seed=2))()
        given["compute_metrics"] = changes.pop("compute_metrics", lambda: None)()
        given["callbacks"] = [make() for make in (changes.pop("callbacks", None),) if make]
        then = changes.pop("then", lambda trainer: [])
        together = changes.pop("evaluated_together", TOGETHER)
        changes["per_device_eval_batch_size"] = together // (2 if ours else 1)
        batch = 12 // accumulates // (2 if ours else 1)
        goes_on = changes.pop("goes_on", False)
        saves = {"save_strategy": "steps", "save_steps": 2} if goes_on else {}
        args = arguments(folder / f"{ours} {name}", batch, **(SHORT | changes | saves))
        if ours:
            dtype = "bf16" if name == "weights in bf16" else "fp32"
            shares = [Share(5, 2, 3), Share(7, 4, 1)]
            given["plan"] = plan_for(given["model"], shares, zero_stage=2, compute_dtype=dtype)
        if twice:
            given.pop("model")
        trainer = kind(args=args, **given)
        with even_noise():
            trainer.train()
        if goes_on:
            trainer = kind(args=args, **(given | {"model": make(folder)}))
            trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-2")
        found[name] = log_of(trainer, "loss")
        if twice:  # it begins anew
            trainer.train()
            found[name] += log_of(trainer, "loss")
        found[name] += then(trainer)
    return found


@contextmanager
def even_noise() -> Iterator[None]:
    """What is drawn evenly is always the most that it can be: the same of any micro-batches."""
    drawn = torch.Tensor.uniform_
    torch.Tensor.uniform_ = lambda tensor, least=0.0, most=1.0, **others: tensor.fill_(most)
    try:
        yield
    finally:
        torch.Tensor.uniform_ = drawn


@pytest.fixture(scope="module")
def both(request, tmp_path_factory) -> tuple[dict[str, list[float]], list[dict[str, list[float]]]]:
    folder, names = tmp_path_factory.mktemp("variations"), list(chosen(request, variations()))
    (stock,) = run_ranks(trained, 1, folder, False, names, timeout_s=240)
    return stock, run_ranks(trained, 2, folder, True, names, timeout_s=240)


# Of what others do as well.
FURTHER = (
    "label smoothing",
    "an optimizer of whole matrices",
    "an optimizer of a subclass",
    "a function that makes models",
    "by length",
    "a mapped stream",
    "a stream that goes on",
    "noise in embeddings",
    "tokens that are counted",
    "outputs that are left out",
    "larger batches than in training",
    "a stream that is held out",
    "the best adapters",
    "an end before the last step",
    "weights in bf16",
    "weights with adapters and a head",
    "a stream",
    "an optimizer",
    "a loss of a subclass",
    "a loader of a subclass",
    "workers",
    "columns",
    "in turn",
    "whole batches of an accumulation",
    "whole batches of a stream",
    "orders that no seed tells",
    "weights of a folder",
    "weights of the hub",
    "a batch without labels",
    "metrics of whole batches",
    "metrics of batches that stay apart",
    "metrics of batches",
    "losses of batches",
    "larger batches of a stream",
    "weights with adapters",
)


@pytest.mark.parametrize("case", left_out(variations(), FURTHER))
def test_it_is_as_with_the_stock_trainer(case, both):
    stock, ours = both
    assert len(stock[case]) >= 2
    for rank in ours:
        assert rank[case] == pytest.approx(stock[case], rel=LOOSE.get(case, 1e-4))


@pytest.mark.extended
def test_a_run_goes_on_in_the_middle_of_a_stream(both):
    _, ours = both
    for rank in ours:
        assert rank["a stream that goes on"] == pytest.approx(rank["a mapped stream"], rel=1e-5)


def _of_loader(self):
    return DataLoader(self.train_dataset, batch_size=5)


def _by_handle(self, model, inputs, *args):
    return model(**inputs).loss


def _by_model(self, model, inputs, *args):
    return self.model(**inputs).loss


def _out_of_nothing(self, *args):
    return torch.tensor(1.0)


OWN_STEP = {"code": "training-step-overridden", "what": "training_step"}
REFUSED_METHODS = [
    ("training_step", _by_handle, OWN_STEP),
    ("training_step", _by_model, OWN_STEP),
    ("training_step", _out_of_nothing, OWN_STEP),
    ("get_train_dataloader", _of_loader, {"code": "global-batch-mismatch", "what": 5}),
]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    left_out(REFUSED_METHODS, REFUSED_METHODS[1:3]),
    ids=["handle", "model", "nothing", "loader"],
)
def test_a_subclass_that_cannot_work_is_refused(name, method, message, tmp_path):
    with raises(GpumixError, **message):
        run_ranks(_subclassed, 1, tmp_path, name, method, timeout_s=120)


def _subclassed(folder: Path, name: str, method: Any) -> None:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    own = type("Own", (Trainer,), {name: method})
    args, plan = arguments(folder, 12, **SHORT), plan_for(model(), [Share(12, 6, 1)])
    own(model=model(), args=args, train_dataset=Texts(), plan=plan).train()


def test_a_collator_that_lays_samples_into_one_row_is_told(tmp_path):
    with raises(InputError, code="collate-rows-wrong", what=("input_ids", 2)):
        run_ranks(_flattened, 1, tmp_path)


def _flattened(folder: Path) -> None:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)

    def collate(samples):
        tokens = torch.cat([sample["input_ids"] for sample in samples])[None]
        return {"input_ids": tokens, "labels": tokens}

    args = arguments(folder, 12, **SHORT)
    Trainer(model=model(), args=args, train_dataset=Texts(), data_collator=collate).train()


@pytest.mark.parametrize("given", left_out([None, str, Path], [None, Path]))
def test_a_plan_for_another_batch_is_told(given, tmp_path):
    with raises(InputError, code="global-batch-mismatch", what=12):
        run_ranks(_other_batch, 3, tmp_path, given)


def _other_batch(folder: Path, given: Any) -> None:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    args, plan, file = arguments(folder, 2, **SHORT), unlike_ranks(), folder / "plan.json"
    plan.save(file)
    wanted = plan if given is None else given(file)
    Trainer(model=model(), args=args, train_dataset=Texts(), plan=wanted).train()


MISSING = [
    ("gpumix.integrations.transformers", "Trainer", "accelerate", "trainer"),
    ("gpumix.integrations.trl", "SFTTrainer", "trl", "trl"),
    ("gpumix", "Accelerator", "accelerate", "trainer"),
    ("gpumix.integrations.lightning", "GpumixStrategy", "lightning", "lightning"),
]


@pytest.mark.parametrize(("module", "name", "package", "extra"), every_second(MISSING))
def test_what_is_not_installed_is_named_with_the_line_that_installs_it(
    module, name, package, extra
):
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda n, *a: None if n == {package!r} else find(n, *a)\n"
        "from gpumix.schema.errors import MachineError\n"
        "try:\n"
        f"    from {module} import {name}\n"
        "except MachineError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "gpumix.integrations." in told.stdout
    assert f" needs the package '{package}', which is not installed" in told.stdout
    assert f'pip install ".[{extra}]"' in told.stdout


def test_another_version_of_a_library_is_told():
    class Trainer:
        def known(self):
            pass

    require_attributes(Trainer, ["known"], package="transformers", tested=">=5")
    with raises(InputError, code="package-version-unsupported", what="Trainer._prepare") as error:
        require_attributes(Trainer, ["known", "_prepare"], package="transformers", tested=">=5,<6")
    assert 'pip install "transformers>=5,<6"' in str(error.value)


def test_the_best_model_comes_back(tmp_path):
    """The best is told to be the one with the highest loss, which is none of the last ones."""
    ((seen, found, only_models),) = run_ranks(_best, 1, tmp_path, timeout_s=120)
    assert max(seen) > seen[-1]
    assert found == pytest.approx(max(seen), rel=1e-5)
    assert only_models == pytest.approx(max(seen), rel=1e-5)


def _best(folder: Path) -> tuple[list[float], float, float]:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    found = []
    for only_model in (False, True):
        args = arguments(
            folder / f"best-{only_model}",
            12,
            **(SHORT | {"eval_strategy": "steps", "save_strategy": "steps"}),
            eval_steps=2,
            save_steps=2,
            max_steps=4,
            learning_rate=1e-2,
            warmup_steps=0,
            load_best_model_at_end=True,
            greater_is_better=True,
            metric_for_best_model="loss",
            save_only_model=only_model,
        )
        data = {"train_dataset": Texts(), "eval_dataset": Texts(10, seed=2)}
        plan = plan_for(model(), [Share(12, 6, 1)])
        trainer = Trainer(model=model(), args=args, plan=plan, **data)
        trainer.train()
        seen = log_of(trainer, "eval_loss")
        found.append(trainer.evaluate()["eval_loss"])
    return seen, *found


def test_a_run_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="planted"):
        run_ranks(_failing, 1, tmp_path)
    run = read_run(tmp_path / "out" / "gpumix")
    assert (run.progress.state, run.progress.step) == ("failed", 2)
    assert "planted" in run.progress.why


def _failing(folder: Path) -> None:
    from transformers import TrainerCallback

    from gpumix.integrations.transformers import Trainer

    as_launched(folder)

    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError("planted")

    args = arguments(folder / "out", 12, **SHORT)
    plan = plan_for(model(), [Share(12, 6, 1)])
    data = {"train_dataset": Texts(), "callbacks": [Fails()]}
    Trainer(model=model(), args=args, plan=plan, **data).train()


@pytest.mark.extended
def test_a_trainer_evaluates_after_a_run_that_could_not_begin(tmp_path):
    """As in a notebook: the checkpoint's name was wrong."""
    [before, after] = run_ranks(_wrong_checkpoint, 1, tmp_path)[0]
    assert after == before


def _wrong_checkpoint(folder: Path) -> list[float]:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    args = arguments(folder / "out", 12, **(SHORT | {"max_steps": 2}))
    plan = plan_for(model(), [Share(12, 6, 1)])
    data = {"train_dataset": Texts(), "eval_dataset": Texts(10, seed=2)}
    trainer = Trainer(model=model(), args=args, plan=plan, **data)
    trainer.train()
    found = [trainer.evaluate()["eval_loss"]]
    with raises(InputError, code="no-checkpoint") as caught:
        trainer.train(resume_from_checkpoint=str(folder / "none"))
    assert caught.value.where == str(folder / "none")
    return [*found, trainer.evaluate()["eval_loss"]]


@pytest.mark.extended
def test_a_run_that_goes_on_with_weights_alone_is_told_what_begins_anew(tmp_path):
    """The checkpoint is its own."""
    (told,) = run_ranks(_with_weights_alone, 1, tmp_path)
    assert len(told) == 1
    assert "the optimizer begins anew" in told[0]
    assert "not saved by gpumix" not in told[0]


def _with_weights_alone(folder: Path) -> list[str]:
    from gpumix.integrations.common import saver
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    saver._LOG.addHandler(handler)
    plan = plan_for(model(), [Share(12, 6, 1)])
    saves = SHORT | {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    args = arguments(folder / "out", 12, **saves)
    for checkpoint in (None, str(folder / "out" / "checkpoint-2")):
        trainer = Trainer(model=model(), args=args, plan=plan, train_dataset=Texts())
        trainer.train(resume_from_checkpoint=checkpoint)
    return told


@pytest.mark.extended
def test_a_resumed_run_goes_on_by_its_plan(tmp_path):
    """Nothing is measured again, unless steps have another number of samples."""
    (plans,) = run_ranks(_resumed_by_its_plan, 1, tmp_path, timeout_s=120)
    assert plans[0] == plans[1]


def _resumed_by_its_plan(folder: Path) -> list[Any]:
    from gpumix.integrations.common import plan_and_shard
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)

    def trainer(batch: int, steps: int) -> Any:
        saves = SHORT | {"save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        args = arguments(folder / "out", batch, **saves)
        return Trainer(model=model(), args=args, train_dataset=Texts())

    def measured(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the model was measured")

    plan_and_shard.profile = partial(plan_and_shard.profile, budget_s=2.0)
    first = trainer(12, 2)
    first.train()
    plan_and_shard.profile = measured  # type: ignore[assignment]
    second = trainer(12, 4)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    with pytest.raises(AssertionError, match="was measured"):
        trainer(6, 6).train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
    return [first.plan, second.plan]
