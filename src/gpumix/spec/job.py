"""What to train, on what: one YAML file.

Paths in a job are relative to the job file's folder. `spec.read` turns the file into a `Job` and
words the errors; this page only says what a job is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gpumix.spec.base import Value
from gpumix.spec.cluster import Cluster
from gpumix.spec.plan import ComputeDtype
from gpumix.spec.units import LARGEST_BATCH, Seconds

Decay = Annotated[float, Field(ge=0, lt=1)]
FACTORY = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _refuse_idle(spec: Value, source: str, *keys: str) -> None:
    """`keys` say something about `source` only."""
    if not getattr(spec, source):
        for key in _changed(spec, keys):
            raise ValueError(f"'{key}' has no effect without '{source}'")


def _changed(spec: Value, keys: tuple[str, ...]) -> list[str]:
    """Those of `keys` that differ from their defaults: all are given when a job is passed on."""
    fields = type(spec).model_fields
    return [
        key
        for key in keys
        if getattr(spec, key) != fields[key].get_default(call_default_factory=True)
    ]


class ModelSpec(Value):
    """Exactly one of `config` and `factory`. Without `weights` the model's own initialiser runs."""

    config: Path | dict[str, Any] | None = Field(
        default=None,
        description="a `config.json` of transformers, or its content; needs a `model_type`",
    )
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm"] = Field(
        default="causal-lm", description="which head a `config` gets"
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="function that returns the model; its module is looked for beside the job",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of the factory, by name")
    weights: Path | None = Field(
        default=None, description="initial weights: a safetensors file, or a folder of them"
    )
    units: tuple[str, ...] = Field(
        default=(),
        description="names of the blocks' class or modules, if they are not found by themselves",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.factory is None):
            raise ValueError("give exactly one of 'config' and 'factory'")
        _refuse_idle(self, "config", "task")
        _refuse_idle(self, "factory", "arguments")
        return self


class DataSpec(Value):
    """Exactly one of `text`, `dataset` and `factory`.

    Text is packed into samples of `sequence_length` tokens.
    """

    text: tuple[Path, ...] = Field(
        default=(), description="files, and folders with all that is in them"
    )
    pattern: str = Field(default="*", description="of the files that are taken from folders")
    dataset: Path | None = Field(
        default=None, description="folder that `datasets.save_to_disk` wrote"
    )
    column: str = Field(
        default="text",
        description="column of the dataset that holds the text; without it `input_ids`",
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="function that returns a map-style dataset of dictionaries of tensors",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of the factory, by name")
    held_out: float = Field(
        default=0.02, ge=0, lt=1, description="part of the samples that is kept for evaluation"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [bool(self.text), self.dataset is not None, self.factory is not None]
        if sum(given) != 1:
            raise ValueError("give exactly one of 'text', 'dataset' and 'factory'")
        _refuse_idle(self, "text", "pattern")
        _refuse_idle(self, "dataset", "column")
        _refuse_idle(self, "factory", "arguments")
        return self


class OptimizerSpec(Value):
    """The optimizer; every element is updated on the rank that stores it."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw", description="AdamW, or SGD with or without momentum"
    )
    lr: float = Field(default=3e-4, gt=0, description="peak of the learning rate")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="adamw only")
    eps: float = Field(default=1e-8, gt=0, description="adamw only")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(
        default=0.1, ge=0, description="on parameters of two and more dimensions"
    )
    clip_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="largest norm of all gradients together; `null` does not clip",
    )

    @property
    def state_bytes_per_element(self) -> int:
        """Of its state in fp32: two moments, the momentum, or nothing."""
        return 8 if self.name == "adamw" else 4 if self.momentum else 0

    @model_validator(mode="after")
    def _settings_are_of_this_optimizer(self) -> Self:
        others = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[self.name]
        for key in _changed(self, others):
            raise ValueError(f"'{key}' has no effect on {self.name}")
        return self


class ScheduleSpec(Value):
    """Learning rate: linear warm-up, then a cosine down to `final_ratio` of the peak."""

    warmup_steps: int = Field(
        default=0, ge=0, description="steps in which the rate rises from 0 to its peak"
    )
    kind: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the rate falls afterwards"
    )
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="rate of the last step over the peak"
    )


class EvaluationSpec(Value):
    """Evaluation on the held-out samples; `every_steps` 0 switches it off."""

    every_steps: int = Field(default=0, ge=0, description="0: never")
    batches: int = Field(default=4, ge=1, description="global batches per evaluation")


class CheckpointSpec(Value):
    """Checkpoints; one is always saved at the end. `every_steps` 0 saves none between."""

    every_steps: int = Field(default=0, ge=0, description="0: only at the end")
    keep: int = Field(default=2, ge=1, description="how many are kept, the newest")


class ProfileSpec(Value):
    """How much time the profiler may take, and where its results are cached."""

    budget: Seconds = Field(default=120.0, description="how long each device class may be measured")
    cache: Path | None = Field(default=None, description="default: ~/.cache/gpumix/profiles")


class Job(Value):
    """One training job."""

    model: ModelSpec = Field(description="what is trained")
    data: DataSpec = Field(description="on what")
    tokenizer: Literal["bytes"] | Path = Field(
        default="bytes", description="`bytes`, or a `tokenizer.json`, or a folder that holds one"
    )
    sequence_length: int = Field(gt=1, description="tokens in a sample")
    global_batch: int = Field(
        gt=0, le=LARGEST_BATCH, description="samples per step over all devices"
    )
    steps: int = Field(gt=0, description="steps of the whole run, those before a resume included")
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="how weights are updated")
    schedule: ScheduleSpec = Field(
        default=ScheduleSpec(), description="how the learning rate changes"
    )
    precision: ComputeDtype = Field(
        default="fp32", description="of compute; parameters and optimizer state are kept in fp32"
    )
    compile: bool | dict[str, bool] = Field(
        default=False,
        description="whether blocks run in compiled code (torch.compile): `on`, `off`, or that for "
        "each device class; classes that cannot are left out, unless they are named",
    )
    seed: int = Field(
        default=0, ge=0, description="of initial weights, order of samples and dropout"
    )
    cluster: Literal["auto"] | Cluster = Field(
        default="auto", description="`auto`: the GPUs that are found, or this machine's CPU"
    )
    strategy: Literal["optimal", "even", "proportional", "poplar", "cephalo", "best-subset"] = (
        Field(
            default="optimal",
            description="the others are there to compare with: `even` splits work and state "
            "evenly, `proportional` goes by peak FLOP/s, `best-subset` uses one class alone",
        )
    )
    output: Path = Field(
        default=Path("runs/latest"), description="folder of the run: plan, metrics, checkpoints"
    )
    log_every_steps: int = Field(default=10, ge=1, description="how often a line is printed")
    trace_step: int | None = Field(
        default=None,
        ge=1,
        description="the step whose trace goes into the run's folder, for ui.perfetto.dev",
    )
    evaluation: EvaluationSpec = Field(
        default=EvaluationSpec(), description="on samples that are held out"
    )
    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), description="when the state is saved"
    )
    profile: ProfileSpec = Field(default=ProfileSpec(), description="how the devices are measured")
    timeout: Seconds = Field(
        default=300.0, description="how long a rank waits for another before it names it"
    )

    @model_validator(mode="after")
    def _traced_step_is_one_of_the_run(self) -> Self:
        if self.trace_step is not None and self.trace_step > self.steps:
            raise ValueError(f"'trace_step' is {self.trace_step}, the run has {self.steps} steps")
        return self
