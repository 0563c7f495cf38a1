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
from gpumix.spec.units import Seconds

Decay = Annotated[float, Field(ge=0, lt=1)]
FACTORY = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class ModelSpec(Value):
    """Exactly one of `config` (transformers) and `factory` (module:function that returns a model).

    `weights` is a safetensors file or a folder of them; without it the model's own initialiser
    gives the weights. `units` overrides what is gathered and scheduled as one: class names or
    module names.
    """

    config: Path | dict[str, Any] | None = None
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm"] = "causal-lm"
    factory: str | None = Field(default=None, pattern=FACTORY)
    arguments: dict[str, Any] = Field(default_factory=dict)
    weights: Path | None = None
    units: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.factory is None):
            raise ValueError("give exactly one of 'config' and 'factory'")
        return self


class DataSpec(Value):
    """Exactly one of `text`, `dataset` and `factory`.

    `text`: files or folders (all files below them that match `pattern`), packed into samples of
    `sequence_length` tokens. `dataset`: a folder written by `datasets.save_to_disk`. `factory`:
    module:function that returns a map-style dataset of dictionaries of tensors.
    `held_out` is the part of the samples, from the end, that is kept for evaluation.
    """

    text: tuple[Path, ...] = ()
    pattern: str = "*"
    dataset: Path | None = None
    column: str = "text"
    factory: str | None = Field(default=None, pattern=FACTORY)
    arguments: dict[str, Any] = Field(default_factory=dict)
    held_out: float = Field(default=0.02, ge=0, lt=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [bool(self.text), self.dataset is not None, self.factory is not None]
        if sum(given) != 1:
            raise ValueError("give exactly one of 'text', 'dataset' and 'factory'")
        return self


class OptimizerSpec(Value):
    """The optimizer; every element is updated on the rank that stores it."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="on parameters of two and more dimensions",
    )
    clip_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"'momentum' has no effect on {self.name}; it is for sgd")
        return self


class ScheduleSpec(Value):
    """Learning rate: linear warm-up, then a cosine down to `final_ratio` of the peak."""

    warmup_steps: int = Field(default=0, ge=0)
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    final_ratio: float = Field(default=0.1, ge=0, le=1)


class EvaluationSpec(Value):
    """Evaluation on the held-out samples; `every_steps` 0 switches it off."""

    every_steps: int = Field(default=0, ge=0)
    batches: int = Field(default=4, ge=1, description="global batches per evaluation")


class CheckpointSpec(Value):
    """Checkpoints; one is always saved at the end. `every_steps` 0 saves none between."""

    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)


class ProfileSpec(Value):
    """How much time the profiler may take, and where its results are cached."""

    budget: Seconds = 120.0
    cache: Path | None = Field(default=None, description="default: ~/.cache/gpumix/profiles")


class Job(Value):
    """One training job."""

    model: ModelSpec
    data: DataSpec
    tokenizer: Literal["bytes"] | Path = "bytes"
    sequence_length: int = Field(gt=1)
    global_batch: int = Field(gt=0, description="samples per step over all devices")
    steps: int = Field(gt=0)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: ComputeDtype = "fp32"
    seed: int = Field(default=0, ge=0)
    cluster: Literal["auto"] | Cluster = "auto"
    strategy: Literal["optimal", "even"] = "optimal"
    output: Path = Path("runs/latest")
    log_every_steps: int = Field(default=10, ge=1)
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    profile: ProfileSpec = ProfileSpec()
    timeout: Seconds = Field(
        default=300.0, description="how long a rank waits for another before it names it"
    )
