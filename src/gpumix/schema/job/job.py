"""The job: model, data and settings of a training run, in one YAML file.

Paths in a job are relative to the job file's folder. `schema.reading.read` turns the file into a
`Job` and words the errors; this module only defines the fields.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.job.advanced import AdvancedSpec
from gpumix.schema.job.couples import WHOLE_BATCH
from gpumix.schema.job.search_space import EVERYTHING, Space, wrap_single_value
from gpumix.schema.job.trackers import NO_TRACKERS, Trackers
from gpumix.schema.plan.dtypes import Precision
from gpumix.schema.profile.profile import ModelProfile
from gpumix.schema.units import LARGEST, LARGEST_BATCH, LARGEST_LENGTH, LARGEST_RANK, MOST_STEPS
from gpumix.schema.value import Value

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
        default="causal-lm", description="which head a `config` gets"
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="function that returns the model; its module is looked for beside the job",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of the factory, by name")
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
        description="with `lora`: format of the blocks' frozen matrices, by bitsandbytes: `nf4` "
        "takes 4.5 bits a weight, `nf4-double` 4.13, `int8` 8; null: as is computed in",
    )
    units: tuple[str, ...] = Field(
        default=(),
        description="names of the blocks' class or modules, if they are not found by themselves",
    )
    tensor_plan: dict[str, str] | None = Field(
        default=None,
        description="how modules are divided where devices compute together: styles by patterns "
        "of names, as `tp_plan` of transformers has them; null: the model's own",
    )
    couples: Literal["batch", "micro-batch"] | None = Field(
        default=None,
        description="of a loss that couples samples of a batch (batch norm, a balancing term). "
        "`batch`, with `strategy: undivided`: one device computes each batch at once; "
        "`micro-batch`: each micro-batch may have a loss of its own; null: such a loss is refused "
        "where the plan cuts batches",
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
        default=(), description="files, and folders with all that is in them"
    )
    pattern: str = Field(default="*", description="of the files that are taken from folders")
    document: Literal["file", "line"] = Field(
        default="file", description="what of `text` is a document: a file, or a line of one"
    )
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
        description="function that returns a map-style dataset of dictionaries of tensors; or a "
        "stream of them: an iterable, a generator, or a function that makes one for each pass",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of the factory, by name")
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_WORKERS)] = Field(
        default="auto",
        description="threads or processes that fetch samples for each device: `auto` measures what "
        "is needed; 0 is one thread",
    )
    prefetch: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_BATCHES)] = Field(
        default="auto", description="batches that are fetched ahead"
    )
    bad_samples: Literal["stop", "skip"] = Field(
        default="stop",
        description="what happens when a sample cannot be read: `skip` takes another one in its "
        "place, the same in every plan, and counts",
    )
    packing: Literal["concatenate", "documents", "none"] = Field(
        default="concatenate",
        description="how documents become samples: all in a row, cut at every `sequence_length` "
        "tokens; or whole documents packed together, of which none sees another; or each one a "
        "sample, padded to the longest of its micro-batch. Longer ones are cut",
    )
    tokenize: Literal["ahead", "on-the-fly"] = Field(
        default="ahead",
        description="`on-the-fly` tokenises texts of a dataset or a factory as they are needed, "
        "without a token file; with `packing: documents` or `none`",
    )
    bucketing: bool = Field(
        default=False,
        description="whether samples of like length meet in a batch; with `packing: none`",
    )
    validation_split: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="part of the samples that is kept for evaluation; of a stream, whatever part "
        "this is, the first samples of each pass: as many as an evaluation takes",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for path, times in Counter(self.text).items():
            if times > 1:
                raise ValueError(f"'text' names '{path}' twice")
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

    name: Literal["adamw", "sgd", "adafactor", "muon"] = Field(
        default="adamw", description="which one"
    )
    lr: float = Field(
        default=3e-4,
        gt=0,
        description="peak of the learning rate; of adafactor relative to a parameter's size, where "
        "1e-2 is usual",
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="adamw, and what muon leaves to it"
    )
    eps: float = Field(default=1e-8, gt=0, description="adamw, and what muon leaves to it")
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="sgd, where 0 is the default, and muon: 0.95"
    )
    nesterov: bool = Field(default=True, description="muon only")
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="muon only: Newton-Schulz iterations"
    )
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="muon only: how the rate goes by a matrix's shape; `match_rms_adamw` lets "
        "matrices and all else have one rate",
    )
    beta2_decay: float = Field(
        default=-0.8, le=0, description="adafactor only: exponent of the average's forgetting"
    )
    clip_threshold: float = Field(
        default=1.0, ge=1, description="adafactor only: largest root mean square of an update"
    )
    least_scale: float = Field(
        default=1e-3, ge=0, description="adafactor only: least size a parameter is taken to have"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="on parameters of two and more dimensions"
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), description="other settings for some parameters"
    )

    def state_bytes_per_element(self, model: ModelProfile) -> float:
        """Return the mean bytes of fp32 optimizer state per element: two moments, the momentum, or
        nothing. Adafactor's rows, columns and vectors are negligible."""
        if self.name == "muon":
            return model.mean_per_element(of_matrices=4, of_others=8)
        return self.most_state_bytes_per_element

    @property
    def most_state_bytes_per_element(self) -> int:
        """Bytes of fp32 optimizer state of the elements with the largest state."""
        return {"adamw": 8, "muon": 8, "adafactor": 0, "sgd": 4 if self.momentum else 0}[self.name]

    @model_validator(mode="after")
    def _settings_are_of_this_optimizer(self) -> Self:
        others = {key for keys in OWN_SETTINGS.values() for key in keys}
        others.difference_update(OWN_SETTINGS[self.name])
        for key in _find_changed_keys(self, tuple(sorted(others))):
            raise ValueError(f"'{key}' has no effect on {self.name}")
        return self


class LrSchedulerSpec(Value):
    """Learning rate: linear warm-up, then constant or a decay to `min_lr_ratio` of the peak."""

    warmup_steps: int = Field(
        default=0, ge=0, description="steps in which the rate rises from 0 to its peak"
    )
    type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the rate falls afterwards"
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="rate of the last step over the peak"
    )


class Job(Value):
    """A training job."""

    model: ModelSpec = Field(description="what is trained", examples=[{"config": "config.json"}])
    data: DataSpec = Field(description="on what", examples=[{"text": ["corpus.txt"]}])
    tokenizer: Literal["bytes"] | Path = Field(
        default="bytes",
        description="`bytes`, or a `tokenizer.json`, or a folder that holds one; default: that of "
        "`model.weights`, and `bytes` without any",
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
        description="steps of the whole run, those before a resume included",
        examples=[1000],
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="how weights are updated")
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="largest norm of all gradients together; `null` does not clip",
    )
    lr_scheduler: LrSchedulerSpec = Field(
        default=LrSchedulerSpec(), description="how the learning rate changes"
    )
    precision: Precision = Field(
        default="auto",
        description="what is computed in: `auto` goes by what each device class does best, or one "
        "dtype for all, or one by class; parameters and optimizer state are kept in fp32",
    )
    torch_compile: bool | dict[str, bool] = Field(
        default=False,
        description="whether blocks run in compiled code (torch.compile): `on`, `off`, or that for "
        "each device class; classes that cannot are left out, unless they are named",
    )
    seed: int = Field(
        default=0, ge=0, le=LARGEST, description="of initial weights, order of samples and dropout"
    )
    cluster: Literal["auto"] | Cluster = Field(
        default="auto", description="`auto`: the GPUs that are found, or this machine's CPU"
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
        description="`optimal` takes what is fastest; `staged` several stages in any case, `model` "
        "one stage a device, by memory alone, `undivided` has one device compute each batch at "
        "once. The others are there to compare with: `even` splits work and state evenly, "
        "`proportional` goes by peak FLOP/s, `best-subset` uses one class alone",
    )
    techniques: Space = Field(
        default=EVERYTHING, description="what the plan may use; all by default, the plan chooses"
    )
    output_dir: Path = Field(
        default=Path("runs/latest"), description="folder of the run: plan, metrics, checkpoints"
    )
    logging_steps: int = Field(default=10, ge=1, description="how often a line is printed")
    report_to: Trackers = Field(
        default=NO_TRACKERS,
        description="experiment trackers that the run tells, beside its folder: a name, a list of "
        "names, or settings by name; none by default ([more](trackers.md))",
    )
    eval_steps: int = Field(
        default=0, ge=0, description="how often held-out samples are evaluated; 0: never"
    )
    eval_batches: int = Field(default=4, ge=1, description="global batches per evaluation")
    save_steps: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="how often a checkpoint is saved, beside the end of the run: `auto`: about "
        "every ten minutes; 0: only at the end. A due checkpoint waits 5 s for the previous one "
        "to be written, then is postponed",
    )
    save_total_limit: int = Field(
        default=2, ge=1, description="how many checkpoints are kept, the newest"
    )
    memory_save_steps: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="how often the state is copied into the memory of the hosts, from where a run "
        "goes on that lost a rank; `auto`: after each step, or after so many that training stands "
        "still for it for a hundredth of its time at most, a twentieth where steps take over a "
        "second; 0: never",
    )
    advanced: AdvancedSpec = Field(
        default=AdvancedSpec(), description="what seldom needs to be set"
    )

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
    def _traced_step_is_one_of_the_run(self) -> Self:
        step = self.advanced.trace_step
        if step is not None and step > self.max_steps:
            raise ValueError(f"'advanced.trace_step' is {step}, the run has {self.max_steps} steps")
        return self
