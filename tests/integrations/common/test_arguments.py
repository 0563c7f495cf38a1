"""Settings of other libraries: each is gone by, left to its library or refused; none is ignored."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumix.integrations.common.plan_and_shard import refuse_gpu
from gpumix.integrations.common.unsupported_arguments import FieldSupport
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, arguments, as_launched, model, tokenizer

pytest.importorskip("trl")
pytestmark = pytest.mark.slow


KINDS = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "AcceleratorConfig",
    "DataLoaderConfiguration",
    "Accelerator",
)


def classes() -> dict[str, tuple[list[str], FieldSupport]]:
    """What fields there are, and what is said of them. Their libraries take a second to import, so
    none is imported where tests are only collected."""
    import accelerate
    import transformers
    import trl
    from accelerate.utils import DataLoaderConfiguration
    from transformers.trainer_pt_utils import AcceleratorConfig

    from gpumix.integrations.accelerate import arguments as loop
    from gpumix.integrations.transformers import arguments as trainer
    from gpumix.integrations.trl import SFT_FIELDS

    kinds = {
        transformers.TrainingArguments: trainer.TRAINING_FIELDS,
        transformers.Seq2SeqTrainingArguments: trainer.SEQ2SEQ_FIELDS,
        trl.SFTConfig: SFT_FIELDS,
        AcceleratorConfig: trainer.ACCELERATOR_FIELDS,
        DataLoaderConfiguration: loop.LOADER_FIELDS,
    }
    found = {
        kind.__name__: ([f.name for f in dataclasses.fields(kind)], fields)
        for kind, fields in kinds.items()
    }
    found["Accelerator"] = (
        list(inspect.signature(accelerate.Accelerator).parameters),
        (loop.ACCELERATOR_FIELDS),
    )
    assert tuple(found) == KINDS
    return found


def test_a_process_alone_is_not_told_to_be_launched_by_torch(tmp_path):
    (told,) = run_ranks(warnings_of_arguments, 1, tmp_path)
    assert told == ["another warning"]


def warnings_of_arguments(folder: Path) -> list[str]:
    """What transformers says of arguments where one process has a group, as of `gpumix launch`."""
    import torch.distributed as dist

    import gpumix.integrations.transformers  # noqa: F401

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    arguments(folder, 2)
    logging.getLogger("transformers.training_args").warning("another warning")
    return heard


@pytest.mark.parametrize("name", KINDS)
def test_each_field_is_in_one_list(name):
    there, fields = classes()[name]
    lists = [*fields.heard, *fields.delegated, *fields.refused]
    assert sorted(lists) == sorted(set(lists))
    assert set(there) <= set(lists)


def test_a_field_of_another_version_is_refused_where_it_is_set():
    fields = FieldSupport.of("heard", "theirs", {"refused": "leave it out: so it is"})
    for name in ("heard", "theirs", "refused", "unknown"):
        fields.check(name, None, False, where="Arguments")
    fields.check("heard", 1, None, where="Arguments")
    fields.check("theirs", 1, None, where="Arguments")
    with raises(InputError, code="argument-without-meaning", what=1):
        fields.check("unknown", 1, None, where="Arguments")
    with raises(InputError, code="argument-without-meaning"):
        fields.check("refused", False, True, where="Arguments")


OF_TRAINING: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"min_num_params": 1},
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": object(),
    "auto_find_batch_size": True,
    "average_tokens_across_devices": False,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "torch_empty_cache_steps": 4,
    "torch_compile_mode": "max-autotune",
    "torch_compile_backend": "eager",
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "eval_use_gather_object": True,
    "dataloader_in_order": False,
    "save_on_each_node": True,
    "debug": "underflow_overflow",
    "accelerator_config": {"split_batches": True},
    "accelerator_config ": {"dispatch_batches": True},
    "accelerator_config  ": {"non_blocking": True},
    "accelerator_config   ": {"gradient_accumulation_kwargs": {"num_steps": 2}},
    "gradient_checkpointing_kwargs": {"offload": True},
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
    "train_sampling_strategy": "batch_rebalance",
    "gradient_accumulation_steps": 0,
}
NOT_INSTALLED = ("deepspeed", "parallelism_config")
OF_SFT: dict[str, dict[str, Any]] = {
    "activation_offloading": {"activation_offloading": True},
    "padding_free": {"padding_free": True, "max_length": None},
}
OF_LOOPS: dict[str, Any] = {
    "split_batches": lambda: True,
    "device_placement": lambda: False,
    "rng_types": lambda: ["torch"],
    "dynamo_backend": lambda: "eager",
    "kwargs_handlers": lambda: [_utils().DistributedDataParallelKwargs(static_graph=True)],
    "dynamo_plugin": lambda: _utils().TorchDynamoPlugin(backend="inductor", fullgraph=True),
} | {
    f"dataloader_config {name}": lambda name=name: _utils().DataLoaderConfiguration(**{name: True})
    for name in ("split_batches", "dispatch_batches", "non_blocking")
}
PLUGINS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin")
OF_LOOPS |= dict.fromkeys((*PLUGINS, "megatron_lm_plugin", "parallelism_config"), object)


def _utils() -> Any:
    import accelerate.utils

    return accelerate.utils


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, str]:
    """What is said of each, in one process."""
    return run_ranks(_refused, 1, tmp_path_factory.mktemp("refused"), timeout_s=120)[0]


def _refused(folder: Path) -> dict[str, str]:
    as_launched(folder)
    import transformers
    import trl
    from datasets import Dataset

    from gpumix import Accelerator
    from gpumix.integrations import transformers as ours
    from gpumix.integrations.trl import SFTTrainer

    found: dict[str, str] = {}

    def note(name: str, make: Any) -> None:
        try:
            make()
        except InputError as error:
            found[name] = str(error)

    def trainer(kind: type, arguments: type, name: str, value: Any) -> None:
        field, later = name.strip(), name in NOT_INSTALLED
        given = {} if later else {field: value}
        args = arguments(str(folder), use_cpu=True, report_to=[], **given)
        if later:
            setattr(args, field, value)
        kind(model=model(), args=args)

    def sft(settings: dict[str, Any]) -> None:
        args = trl.SFTConfig(str(folder), use_cpu=True, bf16=False, report_to=[], **settings)
        data = Dataset.from_dict({"input_ids": [[3, 4, 5]] * 4})
        SFTTrainer(model(), args, train_dataset=data, processing_class=tokenizer())

    for name, value in OF_TRAINING.items():
        note(
            name,
            lambda n=name, v=value: trainer(ours.Trainer, transformers.TrainingArguments, n, v),
        )
    for name, settings in OF_SFT.items():
        note(name, lambda given=settings: sft(given))
    for name, value in OF_LOOPS.items():
        note(f"Accelerator {name}", lambda n=name, v=value: Accelerator(**{n.split()[0]: v()}))
    return found


@pytest.mark.parametrize("name", [*OF_TRAINING, *OF_SFT])
def test_arguments_without_meaning_are_refused(name, refused):
    said = refused[name]
    of_config = OF_TRAINING[name] if name.startswith("accelerator_config") else {}
    told = next(iter(of_config), name).replace("gradient_checkpointing", "checkpointing")
    assert told in said
    assert "has no meaning" in said or "trains nothing" in said


@pytest.mark.parametrize("name", OF_LOOPS)
def test_arguments_of_a_loop_without_meaning_are_refused(name, refused):
    said = refused[f"Accelerator {name}"]
    assert (
        name.rpartition(" ")[2].replace("dynamo_plugin", "of dynamo_plugin") in said
        and "has no meaning" in said
    )


def test_all_that_are_refused_are_tried():
    tried = {name.strip() for name in [*OF_TRAINING, *OF_SFT]}
    for name in ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"):
        assert set(classes()[name][1].refused) <= tried
    assert set(classes()["Accelerator"][1].refused) <= set(OF_LOOPS)


ACCEPTED: dict[str, Any] = {
    "torch_compile": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "ddp_find_unused_parameters": False,
    "accelerator_config": {"even_batches": False, "dispatch_batches": False},
    "eval_accumulation_steps": 2,
}


PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}


def test_what_is_asked_of_blocks_reaches_the_planner(tmp_path):
    assert run_ranks(_asked, 1, tmp_path)[0] == {
        said: {"Trainer": (True, [True], dtype), "Accelerator": (True, [False, True], dtype)}
        for said, dtype in PRECISIONS.items()
    }


def _asked(folder: Path) -> dict[str, Any]:
    """Whether blocks are to be compiled and computed again, and in what they are computed, as the
    planner is told."""
    as_launched(folder)
    from torch.utils.data import DataLoader

    from gpumix import Accelerator
    from gpumix.integrations.accelerate import accelerator
    from gpumix.integrations.transformers import Trainer, trainer_mixin

    found: dict[str, Any] = {}

    class Told(Exception):
        pass

    def host(name: str) -> Any:
        def told(model: Any, training: Any, **settings: Any) -> None:
            space = sorted(training.space.gradient_checkpointing)
            found[said][name] = training.torch_compile, space, training.precision
            raise Told

        return told

    trainer_mixin.shard_by_plan, accelerator.shard_by_plan = host("Trainer"), host("Accelerator")
    for said in PRECISIONS:
        found[said] = {}
        asked = {} if said == "no" else {said: True}
        args = arguments(folder, 12, eval_strategy="no", **ACCEPTED, **asked)
        with pytest.raises(Told):
            Trainer(model=model(), args=args, train_dataset=Texts()).train()
        network = model()
        loop = Accelerator(mixed_precision=said, dynamo_backend="inductor")
        with pytest.raises(Told):
            loop.prepare(network, torch.optim.AdamW(network.parameters()), DataLoader(Texts(), 12))
    return found


def test_a_program_that_asks_for_cpus_gets_no_gpu():
    refuse_gpu(torch.device("cpu"), "use_cpu=True", where="TrainingArguments")
    with raises(InputError, code="cpu-on-gpu-host", where="TrainingArguments", what="use_cpu"):
        refuse_gpu(torch.device("cuda", 0), "use_cpu=True", where="TrainingArguments")


def test_hyperparameters_are_searched_run_by_run(tmp_path):
    with raises(InputError, code="hyperparameter-search", what="hyperparameter_search"):
        run_ranks(_searched, 1, tmp_path)


def _searched(folder: Path) -> None:
    as_launched(folder)
    from gpumix.integrations.transformers import Trainer

    args = arguments(folder, 12, eval_strategy="no")
    Trainer(model_init=model, args=args, train_dataset=Texts()).hyperparameter_search()
