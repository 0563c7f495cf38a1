"""The files that are spoilt, whole: jobs, clusters, a profile and plans that go together; and what
a user does with each of them.

The profile is an estimate of cards, whose names are exchanged for those of emulated devices and
of a model's real units and parameters; so nothing is measured, and the plans can be trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpumix.cli.planning.estimate_source import Estimate, NamedCluster
from gpumix.cli.planning.profile_source import PlanOptions
from gpumix.cost.predict import predict
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.estimates.adapters import FULL
from gpumix.hardware.estimates.decoder_shapes import make_decoder
from gpumix.hardware.estimates.known_models import NamedDecoder
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.job.job import Job
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.read import read_job
from gpumix.train.rank_setup.model import build_model

CLUSTER = """\
classes:
  fast: {memory: 24 GiB, emulate: 60 GFLOP/s, peak_flops: 60 GFLOP/s}
  slow: {memory: 16 GiB, emulate: 20 GFLOP/s, product: old one}
devices:
  - {class: fast, count: 4, host: a}
  - {class: slow, id: slow-0, host: b}
  - {class: slow, id: slow-1, host: b}
network:
  inside: pcie3
  between: 25GbE
  exceptions:
    - {where: between, classes: [fast, slow], link: 1 GB/s}
"""

SHORT = """\
# devices and their classes in one
- {class: fast, emulate: 60 GFLOP/s, memory: 24 GiB, count: 4, host: a}
- {class: slow, emulate: 20 GFLOP/s, memory: 16 GiB, host: b}
- {class: slow, emulate: 20 GFLOP/s, memory: 16 GiB, host: b}
"""

JOB = f"""\
model:
  config:
    model_type: llama
    hidden_size: 64
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 4
    intermediate_size: 128
    max_position_embeddings: 64
    vocab_size: 264
  task: causal-lm
  units: [LlamaDecoderLayer]
data:
  text: [corpus]
  pattern: "*.txt"
  document: file
  num_workers: auto
  prefetch: 2
  bad_samples: stop
  packing: concatenate
  tokenize: ahead
  bucketing: off
  validation_split: 0.1
tokenizer: bytes
sequence_length: 32
global_batch_size: 24
max_steps: 2
optimizer:
  {{name: adamw, lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1,
   groups: [{{match: "*norm.weight", lr: 1e-4, weight_decay: 0}}]}}
max_grad_norm: 1.0
lr_scheduler: {{warmup_steps: 1, type: cosine, min_lr_ratio: 0.1}}
precision: {{fast: fp32, slow: fp32}}
torch_compile: {{fast: off}}
seed: 1
cluster:
{CLUSTER.replace(chr(10), chr(10) + "  ").rstrip().replace("classes", "  classes", 1)}
strategy: optimal
techniques:
  {{zero_stages: [3, 1], cross_entropy: whole, checkpoints_on: device, state_on: device,
   gradient_checkpointing: [yes, no], tensor_parallel_size: [1, 2], sequence_parallel: no,
   min_pipeline_stages: 1, max_pipeline_stages: 2, waves: no, leave_out: no, padded: yes,
   pipeline_schedules: [1f1b], shardings: all, orders: layered, parameters_on: device}}
allow: 8bit-optimizer
output_dir: run
logging_steps: 1
eval_steps: 2
eval_batches: 1
save_steps: 0
save_total_limit: 1
memory_save_steps: auto
report_to:
  tensorboard: {{folder: boards, name: mine}}
  prometheus: {{address: 127.0.0.1, port: 0, name: mine}}
advanced:
  efficiency:
    {{tf32: auto, attention: own, kernels: torch, loss: {{slow: torch}}, fused_optimizer: on,
     channels_last: auto}}
  profile_budget: 2 min
  profile_cache: profiles
  rebalance: yes
  replay_steps: 2
  trace_step: 2
  max_restarts: 1
  timeout: 90 s
  grace_period: 20 s
"""

# For estimates, which know nothing but sizes.
SMALL = """\
model:
  config: {model_type: llama, hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 8,
           num_key_value_heads: 4, intermediate_size: 1024, vocab_size: 1000}
  weights: weights
  base: nf4
  lora: {rank: 8, alpha: 16, dropout: 0.1, targets: [q_proj, v_proj], dora: no}
  tensor_plan: {"layers.*.mlp.up_proj": colwise}
data: {dataset: corpus, column: text}
sequence_length: 128
global_batch_size: 16
max_steps: 10
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
precision: fp32
techniques: {zero_stages: [3, 0], max_pipeline_stages: 2, tensor_parallel_size: 1,
             cross_entropy: whole, state_on: device}
report_to:
  wandb: {project: p, name: n, entity: e, group: g, tags: [t], folder: boards, mode: offline}
  mlflow: {experiment: e, name: n, tags: {a: b}, uri: "http://127.0.0.1:5000"}
  trackio: {project: p, name: n, group: g, folder: boards, space: user/name}
"""

OWN = """\
model:
  factory: mine:model
  arguments: {width: 8}
  couples: micro-batch
data:
  factory: mine:samples
  arguments: {number: 40, length: 32}
  num_workers: 0
  packing: none
sequence_length: 32
global_batch_size: 24
max_steps: 2
optimizer: {name: muon, lr: 1e-3, momentum: 0.9, nesterov: yes, ns_steps: 3, adjust_lr: original}
cluster: cluster.yaml
output_dir: run
advanced: {profile_cache: profiles}
"""

MINE = """\
import torch


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x)


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = torch.nn.Embedding(16, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), x.shape[0]


def model(width):
    return Model(width)


def samples(number, length):
    return [{"input_ids": torch.arange(length) % 16} for _ in range(min(number, 99))]
"""

# Of estimates, and what a Llama of transformers calls them.
CARDS = {"rtx3090": "fast", "p40": "slow"}
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}

PLANS = ("one.json", "stages.json", "tp_groups.json", "unlike.json")

USES: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "job": {
        "job.yaml": (
            ("plan", "job.yaml", "--profile", "profile.json"),
            ("compare", "job.yaml", "--profile", "profile.json"),
            ("whatif", "job.yaml", "--profile", "profile.json", "--remove", "slow"),
            ("devices", "job.yaml"),
            ("profile", "job.yaml"),
            ("train", "job.yaml"),
            ("train", "job.yaml", "--plan", "one.json"),
        ),
        "small.yaml": (
            ("plan", "small.yaml", "--cluster", "2x rtx3090, 1x p40"),
            ("whatif", "small.yaml", "--cluster", "1x rtx3090; 1x p40",
             "--between", "25GbE", "--add", "2x t4"),
            ("plan", "small.yaml", "--profile", "cards.json"),
        ),
        "own.yaml": (("plan", "own.yaml"), ("profile", "own.yaml"), ("train", "own.yaml")),
    },
    "cluster": {
        name: (
            ("devices", "--cluster", name),
            ("profile", f"of-{name}"),
            ("plan", f"of-{name}", "--profile", "profile.json"),
            ("train", f"of-{name}", "--plan", "stages.json"),
        )[: 2 if name == "short.yaml" else 4]
        for name in ("cluster.yaml", "cluster.json", "short.yaml")
    },
    "profile": {
        "profile.json": (
            ("plan", "job.yaml", "--profile", "profile.json"),
            ("compare", "job.yaml", "--profile", "profile.json"),
            ("whatif", "job.yaml", "--profile", "profile.json", "--remove", "slow",
             "--add", "1x fast", "--inside", "10GbE"),
            ("simulate", "one.json"),
            ("simulate", "stages.json", "--profile", "profile.json"),
            ("simulate", "tp_groups.json"),
            ("train", "job.yaml", "--plan", "one.json"),
        ),
        "cards.json": (
            ("plan", "small.yaml", "--profile", "cards.json"),
            ("whatif", "small.yaml", "--profile", "cards.json", "--add", "t4", "--remove", "p40"),
        ),
    },
    "plan": {
        name: (
            ("simulate", name),
            ("simulate", name, "--trace", "trace.json"),
            ("train", "job.yaml", "--plan", name),
        )
        for name in PLANS
    }
    | {
        f"alone/{name}": (("train", "job.yaml", "--plan", f"alone/{name}"),)
        for name in PLANS
    },
}  # fmt: skip


BESIDE = ("--plan", "--profile")  # the options for what must go with a job


@dataclass(frozen=True)
class Good:
    """A file before it is spoilt.

    Attributes:
        kind: job, cluster, profile or plan.
        uses: what a user runs on it.
    """

    kind: str
    name: str
    text: str
    uses: tuple[tuple[str, ...], ...]

    def named_by(self, use: Sequence[str]) -> list[str]:
        """Files of which an error must name one while this one is spoilt: which of two that must go
        together is wrong, a job and a plan for it say, nobody knows."""
        options = pairwise(use) if self.kind in ("job", "cluster") else ()
        return [self.name, *(file for option, file in options if option in BESIDE)]

    @property
    def form(self) -> str:
        return self.name.rpartition(".")[2]


def write_all(folder: Path) -> list[Good]:
    """All files, with what else they name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus").mkdir()
    (folder / "weights").mkdir()
    (folder / "corpus" / "a.txt").write_text("one and two and three\n" * 200)
    (folder / "mine.py").write_text(MINE)
    texts = {"job.yaml": JOB, "own.yaml": OWN, "cluster.yaml": CLUSTER, "short.yaml": SHORT}
    texts["small.yaml"] = SMALL
    texts["cluster.json"] = json.dumps(_as_json(CLUSTER))
    inline = JOB[JOB.index("cluster:\n") : JOB.index("strategy:")]
    for name in ("cluster.yaml", "cluster.json", "short.yaml"):
        texts[f"of-{name}"] = JOB.replace(inline, f"cluster: {name}\n")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    job = read_job(folder / "job.yaml")
    small = PlanOptions(folder / "small.yaml", cluster="2x rtx3090, 1x p40")
    small.source().profile.save(folder / "cards.json")
    profile = _estimated(job, folder)
    profile.save(folder / "profile.json")
    for name, shape in {
        "one": {"max_pipeline_stages": 1, "tensor_parallel_size": (1,), "zero_stages": (3,)},
        "stages": {
            "min_pipeline_stages": 2,
            "max_pipeline_stages": 3,
            "tensor_parallel_size": (1,),
        },
        "tp_groups": {"max_pipeline_stages": 1, "tensor_parallel_size": (2,)},
    }.items():
        space = EVERYTHING.model_copy(update={"leave_out": False, **shape})
        made = make_plan(profile, job.global_batch_size, space=space)
        _save(made, folder, name)
    _save(_of_mixed_degrees(profile, Plan.load(folder / "tp_groups.json")), folder, "unlike")
    return [
        Good(kind, name, (folder / name).read_text(encoding="utf-8"), uses)
        for kind, files in USES.items()
        for name, uses in files.items()
    ]


def _save(plan: Plan, folder: Path, name: str) -> None:
    plan.save(folder / f"{name}.json")
    plan.save(folder / "alone" / f"{name}.json")  # without a profile beside it


def _of_mixed_degrees(profile: Profile, plan: Plan) -> Plan:
    """A plan of tensor-parallel groups of two, of which the first is replaced by two workers that
    compute alone."""
    (stage,) = plan.stages
    tp_group = stage.tp_groups[0]
    whole = tp_group[0].samples
    alone = [
        worker.model_copy(
            update={
                "parts": stage.tensor,
                "samples": samples,
                "micro_batch": min(samples, worker.micro_batch),
                "state_share": worker.state_share / len(tp_group),
            }
        )
        for worker, samples in zip(tp_group, (whole // 2, whole - whole // 2), strict=True)
    ]
    mixed = stage.model_copy(update={"workers": (*alone, *stage.workers[len(tp_group) :])})
    found = plan.model_copy(update={"stages": (mixed,), "prediction": None})
    return found.model_copy(update={"prediction": predict(profile, found)})


def _as_json(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _estimated(job: Job, folder: Path) -> Profile:
    """Of the job's own model on its own devices, as if these were cards."""
    config = job.model.config
    assert isinstance(config, dict)
    cluster = NamedCluster("4x rtx3090, 2x p40")
    model = NamedDecoder("llama", make_decoder(config))
    length, batch = job.sequence_length, job.global_batch_size
    found = Estimate(cluster, model, FULL, job.optimizer, length, batch, "fp32").profile()
    anatomy = split_into_units(build_model(job.model, folder=folder, seed=0))
    units = [unit.name for unit in anatomy.units]
    names = CARDS | NAMES | dict(zip(found.model.calls, units))
    names[found.model.fingerprint] = anatomy.fingerprint()
    renamed = _renamed(found.model_dump(mode="json"), names)
    renamed["cluster"] = job.cluster.model_dump(mode="json")  # type: ignore[union-attr]
    return Profile.model_validate_json(json.dumps(renamed))


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The same with other names; keys are those of the values' own fields."""
    if isinstance(value, dict):
        return {
            CARDS.get(key, key): item if key == "mode" else _renamed(item, names)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
