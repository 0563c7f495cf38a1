"""The job: model, data and settings of a training run, in one YAML file.

Paths in a job are relative to the job file's folder. `schema.reading.read` turns the file into a
`Job` and words the errors; this module only defines the fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.job.advanced import AdvancedSpec
from gpumix.schema.job.coupled_losses import WHOLE_BATCH
from gpumix.schema.job.search_space import EVERYTHING, Space, wrap_single_value
from gpumix.schema.job.trackers import NO_TRACKERS, Trackers
from gpumix.schema.plan.dtypes import Precision
from gpumix.schema.plan.optimizer_state import (
    ADAMW_BYTES,
    EIGHT_BIT_OPTIMIZER,
    OptimizerState,
    count_adamw_8bit_bytes,
)
from gpumix.schema.profile.profile import ModelProfile
from gpumix.schema.units import LARGEST, LARGEST_BATCH, LARGEST_LENGTH, LARGEST_RANK, MOST_STEPS
from gpumix.schema.value import Value, refuse_duplicates

Decay = Annotated[float, Field(ge=0, lt=1)]
MOST_LAYERS = 1024  # beyond any model; more would take forever to build and plan
MOST_WORKERS, MOST_BATCHES = 1024, 65_536  # per device; more would only waste memory
FACTORY = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _refuse_without_effect(spec: Value, source: str, *keys: str) -> None:
    """Raise a ValueError if any of `keys` is set without `source`, which the keys apply to."""
    if not getattr(spec, source):
        for key in _find_changed_keys(spec, keys):
            raise ValueError(f"'{key}' has no effect without '{source}'")


def _find_changed_keys(spec: Value, keys: tuple[str, ...]) -> list[str]:
    """Return the keys with non-default values: a job passed on contains all keys."""
    fields = type(spec).model_fields
    return [
        key
        for key in keys
        if getattr(spec, key) != fields[key].get_default(call_default_factory=True)
    ]


class LoraSpec(Value):
    """LoRA adapters, through PEFT: small trained matrices beside frozen ones."""

    rank: int = Field(ge=1, le=LARGEST_RANK, description="of their matrices; usual is 16")
    alpha: float | None = Field(
        default=None, gt=0, description="what they add is times `alpha / rank`; default: 2 * rank"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of their inputs")
    targets: tuple[str, ...] = Field(
        default=(),
        description="ends of the names of the linear layers that get one, as `q_proj`; default: "
        "all linear layers of the blocks",
    )
    dora: bool = Field(
        default=False, description="whether the length of each row is trained apart (DoRA)"
    )


class ModelSpec(Value):
    """The model: exactly one of `config` and `factory`. Without `weights` the model initializes
    itself."""

    config: Path | dict[str, Any] | None = Field(
        default=None,
        description="a `config.json` of transformers, or its content; needs a `model_type`",
    )
    task: Literal["causal-lm", "masked-lm", "seq2seq-lm"] = Field(
        default="causal-lm", description="head of a `config`'s model"
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="function that returns the model; its module is next to the job",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the factory, by name"
    )
    weights: Path | None = Field(
        default=None,
        description="initial weights: a safetensors file, a folder of them, or a model's folder in "
        "the hub's cache",
    )
    lora: LoraSpec | None = Field(
        default=None,
        description="train LoRA adapters, and freeze the model itself: `{rank: 16}`",
        examples=[{"rank": 16}],
    )
    base: Literal["nf4", "nf4-double", "int8"] | None = Field(
        default=None,
        description="with `lora`: format of the blocks' frozen matrices, by bitsandbytes: "
        "`nf4` takes 4.5 bits a weight, `nf4-double` 4.13, `int8` 8; null: the compute "
        "dtype",
    )
    units: tuple[str, ...] = Field(
        default=(),
        description="class name or module names of the blocks, if they are not detected",
    )
    tensor_plan: dict[str, str] | None = Field(
        default=None,
        description="how tensor parallelism divides modules: styles by name patterns, like "
        "`tp_plan` of transformers; null: the model's own",
    )
    couples: Literal["batch", "micro-batch"] | None = Field(
        default=None,
        description="for a loss that couples samples of a batch (batch norm, a balancing "
        "term). `batch`, with `strategy: undivided`: one device computes each batch at "
        "once; `micro-batch`: each micro-batch has its own loss; null: such a loss is "
        "refused if the plan cuts batches",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.factory is None):
            raise ValueError("give exactly one of 'config' and 'factory'")
        _refuse_without_effect(self, "config", "task")
        _refuse_without_effect(self, "factory", "arguments")
        if self.base is not None and self.lora is None:
            raise ValueError(
                "'base' is for 'lora': quantised weights are frozen, and nothing would be trained"
            )
        return self


class DataSpec(Value):
    """The data: exactly one of `text`, `dataset` and `factory`."""

    text: Annotated[tuple[Path, ...], BeforeValidator(wrap_single_value)] = Field(
        default=(), description="files, and folders with all files in them"
    )
    pattern: str = Field(default="*", description="pattern of the files taken from folders")
    document: Literal["file", "line"] = Field(
        default="file", description="a document of `text`: a file, or a line of a file"
    )
    dataset: Path | None = Field(
        default=None, description="folder that `datasets.save_to_disk` wrote"
    )
    column: str = Field(
        default="text",
        description="text column of the dataset; without it `input_ids`",
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="function that returns a map-style dataset of dictionaries of tensors; or "
        "a stream of them: an iterable, a generator, or a function that makes one for each "
        "pass",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the factory, by name"
    )
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_WORKERS)] = Field(
        default="auto",
        description="threads or processes that load samples for each device: `auto` measures "
        "the number; 0 is one thread",
    )
    prefetch: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_BATCHES)] = Field(
        default="auto", description="batches loaded ahead"
    )
    bad_samples: Literal["stop", "skip"] = Field(
        default="stop",
        description="for unreadable samples: `skip` replaces each by another one, the same in "
        "every plan, and counts them",
    )
    packing: Literal["concatenate", "documents", "none"] = Field(
        default="concatenate",
        description="how documents become samples: joined and cut at every `sequence_length` "
        "tokens; or whole documents packed together, isolated from each other; or one "
        "sample each, padded to the longest of its micro-batch. Longer ones are cut",
    )
    tokenize: Literal["ahead", "on-the-fly"] = Field(
        default="ahead",
        description="`on-the-fly` tokenises texts of a dataset or a factory when they are "
        "needed, without a token file; with `packing: documents` or `none`",
    )
    bucketing: bool = Field(
        default=False,
        description="whether batches have samples of similar length; with `packing: none`",
    )
    validation_split: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="part of the samples kept for evaluation; of a stream, with any part "
        "above 0, the first samples of each pass: enough for an evaluation",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        refuse_duplicates("'text' names", map(str, self.text), "twice")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [bool(self.text), self.dataset is not None, self.factory is not None]
        if sum(given) != 1:
            raise ValueError("give exactly one of 'text', 'dataset' and 'factory'")
        _refuse_without_effect(self, "text", "pattern", "document")
        _refuse_without_effect(self, "factory", "arguments")
        if (
            self.factory is not None
            and self.tokenize == "ahead"
            and _find_changed_keys(self, ("column",))
        ):
            raise ValueError(
                "'column' has no effect on a factory's samples without 'tokenize: on-the-fly'"
            )
        if self.factory is None:
            _refuse_without_effect(self, "dataset", "column")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.tokenize == "on-the-fly":
            if self.text:
                raise ValueError("'text' is tokenised ahead: 'tokenize' is for the other sources")
            if self.packing == "concatenate":
                raise ValueError(
                    "'tokenize: on-the-fly' needs 'packing: documents' or 'packing: none': to cut "
                    "texts in a row all must be tokenised first"
                )
        if self.bucketing and self.packing != "none":
            raise ValueError(
                "'bucketing' has no effect where all samples have one length: it needs "
                "'packing: none'"
            )
        return self


# Settings supported by some optimizers only.
OWN_SETTINGS = {
    "adamw": ("betas", "eps"),
    "adamw_8bit": ("betas", "eps"),
    "sgd": ("momentum",),
    "adafactor": ("beta2_decay", "clip_threshold", "least_scale"),
    "muon": ("betas", "eps", "momentum", "nesterov", "ns_steps", "adjust_lr"),
}


OPTIMIZERS = tuple(OWN_SETTINGS)


class ParameterGroup(Value):
    """Settings for some parameters, selected by name; the first matching group applies."""

    match: str = Field(
        min_length=1, description="pattern of names; `*` stands for anything, as in `*.bias`"
    )
    lr: float | None = Field(
        default=None, gt=0, description="peak of their learning rate; default: that of all"
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="of all of them, vectors too; default: as without the group"
    )

    @model_validator(mode="after")
    def _has_settings(self) -> Self:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("give 'lr' or 'weight_decay', or leave this group out")
        return self


class OptimizerSpec(Value):
    """The optimizer. Results match the torch optimizer on the unsharded model.

    Muon updates the matrices of the blocks; embeddings, heads, vectors and the rest use AdamW.
    """

    name: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"] = Field(
        default="adamw",
        description="the optimizer; `adamw_8bit` keeps the state of parameters of 4096 and more "
        "elements in 8 bits, as bitsandbytes does",
    )
    lr: float = Field(
        default=3e-4,
        gt=0,
        description="peak of the learning rate; for adafactor relative to a parameter's size, "
        "where 1e-2 is usual",
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="adamw, adamw_8bit, and muon's AdamW part"
    )
    eps: float = Field(default=1e-8, gt=0, description="adamw, adamw_8bit, and muon's AdamW part")
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="sgd (default 0) and muon (default 0.95)"
    )
    nesterov: bool = Field(default=True, description="muon only")
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="muon only: Newton-Schulz iterations"
    )
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="muon only: scaling of the rate by a matrix's shape; `match_rms_adamw` "
        "lets all parameters share one rate",
    )
    beta2_decay: float = Field(
        default=-0.8, le=0, description="adafactor only: exponent of the decay of the second moment"
    )
    clip_threshold: float = Field(
        default=1.0, ge=1, description="adafactor only: largest root mean square of an update"
    )
    least_scale: float = Field(
        default=1e-3, ge=0, description="adafactor only: least assumed size of a parameter"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="on parameters of two and more dimensions"
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), description="other settings for some parameters"
    )

    def state_bytes_per_element(self, model: ModelProfile) -> float:
        """Return the mean bytes of optimizer state per element: two moments, the momentum, or
        nothing. Adafactor's rows, columns and vectors are negligible."""
        if self.name == "muon":
            return model.mean_per_element(of_matrices=4, of_others=8)
        if self.name == "adamw_8bit":
            return model.quantised_adamw_bytes
        return self.most_state_bytes(1)

    def most_state_bytes(self, numel: int) -> int:
        """Return the bytes of optimizer state of a parameter of the kind with the largest state."""
        if self.name == "adamw_8bit":
            return count_adamw_8bit_bytes(numel)
        per_element = {"sgd": 4 if self.momentum else 0, "adafactor": 0}
        return numel * per_element.get(self.name, ADAMW_BYTES)

    @property
    def supports_tensor_parallel(self) -> bool:
        """Whether it updates parameters of which each rank of a tensor-parallel group has a part,
        whatever the part."""
        return self.name != "adamw_8bit"

    @property
    def state_form(self) -> OptimizerState:
        return "8bit" if self.name == "adamw_8bit" else "fp32"

    @model_validator(mode="after")
    def _settings_are_of_this_optimizer(self) -> Self:
        others = {key for keys in OWN_SETTINGS.values() for key in keys}
        others.difference_update(OWN_SETTINGS[self.name])
        for key in _find_changed_keys(self, tuple(sorted(others))):
            raise ValueError(f"'{key}' has no effect on {self.name}")
        return self


class LrSchedulerSpec(Value):
    """Learning rate: linear warm-up, then constant or a decay to `min_lr_ratio` of the peak."""

    warmup_steps: int = Field(default=0, ge=0, description="steps of the rise from 0 to the peak")
    type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="shape of the decay after it"
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="rate of the last step over the peak"
    )


class Job(Value):
    """A training job."""

    model: ModelSpec = Field(description="the model to train", examples=[{"config": "config.json"}])
    data: DataSpec = Field(description="its training data", examples=[{"text": ["corpus.txt"]}])
    tokenizer: Literal["bytes"] | Path = Field(
        default="bytes",
        description="`bytes`, a `tokenizer.json`, or its folder; default: that of "
        "`model.weights`, or `bytes` without weights",
    )
    sequence_length: int = Field(
        gt=1, le=LARGEST_LENGTH, description="tokens in a sample", examples=[1024]
    )
    global_batch_size: int = Field(
        gt=0, le=LARGEST_BATCH, description="samples per step over all devices", examples=[64]
    )
    max_steps: int = Field(
        gt=0,
        le=MOST_STEPS,
        description="steps of the whole run, including those before a resume",
        examples=[1000],
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="how weights are updated")
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="largest norm of the whole gradient; `null` does not clip",
    )
    lr_scheduler: LrSchedulerSpec = Field(
        default=LrSchedulerSpec(), description="how the learning rate changes"
    )
    precision: Precision = Field(
        default="auto",
        description="compute dtype: `auto` for the best of each GPU type, one dtype for all, "
        "or one by type; parameters and optimizer state stay in fp32",
    )
    torch_compile: bool | dict[str, bool] = Field(
        default=False,
        description="compile blocks with torch.compile: `on`, `off`, or by GPU type; types "
        "that cannot are skipped, unless you name them",
    )
    seed: int = Field(
        default=0, ge=0, le=LARGEST, description="seed of initial weights, sample order and dropout"
    )
    cluster: Literal["auto"] | Cluster = Field(
        default="auto", description="`auto`: the GPUs found, or this machine's CPU"
    )
    strategy: Literal[
        "optimal",
        "staged",
        "model",
        "undivided",
        "even",
        "proportional",
        "poplar",
        "cephalo",
        "best-subset",
    ] = Field(
        default="optimal",
        description="`optimal` is the fastest; `staged` always has several stages, `model` "
        "one stage per device by memory, `undivided` computes each batch on one device. "
        "For comparisons: `even` splits work and state evenly, `proportional` goes by peak "
        "FLOP/s, `best-subset` uses the best GPU type alone, `poplar` and `cephalo` follow "
        "the papers of these names",
    )
    techniques: Space = Field(
        default=EVERYTHING,
        description="techniques that plans may use; all by default, the plan chooses",
    )
    allow: Annotated[tuple[Literal["8bit-optimizer"], ...], BeforeValidator(wrap_single_value)] = (
        Field(
            default=(),
            description="changes of numerics that the plan may make if nothing fits otherwise: "
            "`8bit-optimizer` uses `adamw_8bit` instead of `adamw`; none by default",
        )
    )
    output_dir: Path = Field(
        default=Path("runs/latest"), description="folder of the run: plan, metrics, checkpoints"
    )
    logging_steps: int = Field(default=10, ge=1, description="steps between printed lines")
    report_to: Trackers = Field(
        default=NO_TRACKERS,
        description="experiment trackers: a name, a list of names, or settings by name; none "
        "by default ([more](trackers.md))",
    )
    eval_steps: int = Field(
        default=0, ge=0, description="steps between evaluations on validation samples; 0: never"
    )
    eval_batches: int = Field(default=4, ge=1, description="global batches per evaluation")
    save_steps: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="steps between checkpoints, and one at the end: `auto`: about every ten "
        "minutes; 0: only at the end. A due checkpoint waits 5 s for the previous one to "
        "be written, then is postponed",
    )
    save_total_limit: int = Field(
        default=2, ge=1, description="number of checkpoints kept, the newest"
    )
    memory_save_steps: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="steps between copies of the state in the hosts' memory, from which a run "
        "resumes after a lost rank; `auto`: each step, or rarer, so that training pauses "
        "for at most 1% of its time (5% if steps take over a second); 0: never",
    )
    advanced: AdvancedSpec = Field(
        default=AdvancedSpec(), description="settings that rarely need a change"
    )

    @property
    def space(self) -> Space:
        """Techniques that the plan may use with this optimizer."""
        return (
            self.techniques
            if self.optimizer.supports_tensor_parallel
            else self.techniques.without_tensor_parallel()
        )

    def optimizer_of(self, state: OptimizerState) -> OptimizerSpec:
        """Return the optimizer of a plan for state in this form."""
        if state == "8bit" and EIGHT_BIT_OPTIMIZER in self.allow:
            return self.optimizer.model_copy(update={"name": "adamw_8bit"})
        return self.optimizer

    @property
    def stated_save_steps(self) -> int:
        """Steps between checkpoints as stated; 0 for none, or if the run chooses."""
        return 0 if self.save_steps == "auto" else self.save_steps

    @model_validator(mode="after")
    def _whole_batches_are_planned(self) -> Self:
        if self.model.couples == WHOLE_BATCH and self.strategy != "undivided":
            raise ValueError(
                f"'model.couples: {WHOLE_BATCH}' is for 'strategy: undivided', it is "
                f"'{self.strategy}'"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits_the_techniques(self) -> Self:
        if self.allow and self.optimizer.name != "adamw":
            raise ValueError(
                f"'allow' has no effect: {EIGHT_BIT_OPTIMIZER} is for 'optimizer.name: adamw', it "
                f"is {self.optimizer.name}"
            )
        if (
            1 not in self.techniques.tensor_parallel_size
            and not self.optimizer.supports_tensor_parallel
        ):
            raise ValueError(
                "'techniques.tensor_parallel_size' is without 1, and "
                f"{self.optimizer.name} updates no parameters that are divided so: add 1, or take "
                "adamw"
            )
        return self

    @model_validator(mode="after")
    def _traced_step_is_one_of_the_run(self) -> Self:
        step = self.advanced.trace_step
        if step is not None and step > self.max_steps:
            raise ValueError(f"'advanced.trace_step' is {step}, the run has {self.max_steps} steps")
        return self
