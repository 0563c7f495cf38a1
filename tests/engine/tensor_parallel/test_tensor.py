"""Ranks that compute units together train like one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.engine.tensor_parallel.plans import resolve_tensor_plan
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, causal_model
from helpers.training.reference import SEED, batches, initialised, mean_loss
from helpers.training.staging import own_samples, rows, staged_engine, staged_plan
from helpers.training.turns import assert_case, in_turn

KEPT = Mode(recompute=False)
LLAMA = ARCHITECTURES["llama"]
TP_GROUP = rows([5], tensor=[2])
LAYOUTS = {
    "a TP group": TP_GROUP,
    "two TP groups": rows([4, 3], tensor=[2]),
    "a TP group, then one": rows([6], [6], tensor=[2, 1]),
    "one, then a TP group": rows([6], [6], tensor=[1, 2]),
    "a TP group each": rows([6], [6], tensor=[2, 2]),
    "a TP group, then two": rows([6], [4, 2], tensor=[2, 1]),
}
NOBODY_SAYS = "nothing says how a {} is divided over the ranks of a tensor-parallel group"
UNDIVIDED = {
    "phi3": "'rowwise_split_input' of module 'model.layers.0.self_attn.o_proj', which is no known",
    "mixtral": "'moe_tp_experts' of module 'model.layers.0.mlp.experts', which is no known style",
    "opt": NOBODY_SAYS.format("OPTForCausalLM"),
    "bloom": NOBODY_SAYS.format("BloomForCausalLM"),
    "vit": NOBODY_SAYS.format("ViTForImageClassification"),
    "bart": NOBODY_SAYS.format("BartForConditionalGeneration"),
    "whisper": NOBODY_SAYS.format("WhisperForConditionalGeneration"),
    "plain-torch-blocks": NOBODY_SAYS.format("Regression"),
    "plain-own-blocks": NOBODY_SAYS.format("Regression"),
}


DIVIDED = [name for name in ARCHITECTURES if name not in UNDIVIDED]
CASES = {
    # Each layout at most stages; also of norms inside of heads, whose gradients a tensor-parallel
    # group sums, in what else is a Llama. From stage 2 on units take turns in the memory of
    # gradients.
    **{
        f"{layout}, {name}, ZeRO {stage}": (name, LAYOUTS[layout], {"zero_stage": stage})
        for name, stage, some in [
            ("llama", 0, ["a TP group", "one, then a TP group", "a TP group each"]),
            ("llama", 1, ["two TP groups", "a TP group, then one", "a TP group, then two"]),
            ("qwen3", 2, ["two TP groups", "one, then a TP group", "a TP group, then two"]),
            ("qwen3", 3, LAYOUTS),
        ]
        for layout in some
    },
    **{
        f"{layout}, {name}": (name, LAYOUTS[layout], {"zero_stage": 1})
        for layout, some in [
            ("two TP groups", {*DIVIDED[::2], "gpt2", "t5"}),
            ("a TP group, then one", {*DIVIDED[1::2], "gpt2", "t5"}),
        ]
        for name in sorted(some)
    },
    # BERT's embeddings are a unit.
    **{
        f"nothing to divide, ZeRO {stage}": (
            "bert",
            LAYOUTS["a TP group, then two"],
            {"cuts": [1], "zero_stage": stage},
        )
        for stage in [0, 3]
    },
    **{
        f"{schedule}, {tensor}": (
            "qwen3",
            rows([4], [4], tensor=tensor, micro_batch=1, mode=KEPT),
            {"schedule": schedule, "zero_stage": 1},
        )
        for schedule, tensor in [
            ("1f1b", (2, 1)),
            ("eager-1f1b", (1, 2)),
            ("gpipe", (2, 2)),
            ("zero-bubble", (2, 1)),
            ("zero-bubble", (1, 2)),
        ]
    },
    **{
        f"{schedule}, {layout}, in waves": (
            "qwen3",
            LAYOUTS[layout],
            {"schedule": schedule, "zero_stage": 3, "waves": 2},
        )
        for schedule, layout in [
            ("gpipe", "a TP group, then two"),
            ("1f1b", "a TP group each"),
            ("eager-1f1b", "a TP group, then two"),
        ]
    },
    **{
        f"interleaved, ZeRO {stage}": (
            "bert",
            2 * rows([8], [8], tensor=[2, 2]),
            {"schedule": "interleaved", "zero_stage": stage, "waves": waves},
        )
        for stage, waves in [(0, 1), (2, 3), (3, 2)]
    },
    # GPT-2's head is its embedding.
    **{
        f"{mode.describe()}, {name}": (
            name,
            rows([5], tensor=[2], mode=mode),
            {"zero_stage": 1},
        )
        for name, mode in [
            ("gpt2", KEPT),
            ("llama", Mode(order="sequential")),
            ("gpt2", Mode(order="sequential", recompute=False)),
            ("gpt2", Mode(head="chunked")),
            ("llama", Mode(head="chunked")),
            ("llama", Mode(boundary="host")),
        ]
    },
    "more ranks in a TP group": ("gpt2", rows([3], tensor=[4]), {"zero_stage": 1}),
}
trained = in_turn(CASES)
FEW = {"a TP group, then one, gpt2", "zero-bubble, (2, 1)"}


@pytest.mark.slow
@pytest.mark.parametrize("case", left_out(CASES, CASES.keys() - FEW))
def test_training_is_that_of_one_process(case, trained):
    assert_case(case, trained)


# -- against torch's own ---------------------------------------------------------------------------


def test_a_step_is_that_of_torch_and_sends_no_more():
    """`parallelize_module` with the same plan: loss, norm of the gradient, and what is sent."""
    plan = staged_plan("llama", TP_GROUP, zero_stage=0)
    ours = run_ranks(_step_of_ours, 2, plan.model_dump_json())
    theirs = run_ranks(_step_of_torch, 2, plan.global_batch)
    assert ours[0][:2] == pytest.approx(theirs[0][:2], rel=1e-5)
    assert 0 < ours[0][2] < theirs[0][2]


def _step_of_ours(plan_json: str) -> tuple[float, float, int]:
    plan = Plan.model_validate_json(plan_json)
    plan = _in_one_micro_batch(plan)
    engine = staged_engine("llama", plan)
    (batch,) = batches(LLAMA, plan.global_batch, 1)
    loss = engine.step(own_samples(plan, engine.comm.rank, batch)).item()
    sums = engine.comm.counts["all_reduce"]
    alone = 1 + 2 * len(plan.stages[0].units)  # the root's gradients, and those of units
    return loss, engine.gradient_norm().item(), sums - alone


def _in_one_micro_batch(plan: Plan) -> Plan:
    """Without recompute."""
    (stage,) = plan.stages
    update = {"micro_batch": plan.global_batch, "mode": KEPT}
    workers = tuple(worker.model_copy(update=update) for worker in stage.workers)
    return plan.model_copy(update={"stages": (stage.model_copy(update={"workers": workers}),)})


def _step_of_torch(samples: int) -> tuple[float, float, int]:
    model = initialised(LLAMA.factory)
    styles = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            styles[f"model.layers.{number}.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            styles[f"model.layers.{number}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            styles[f"model.layers.{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, DeviceMesh("cpu", list(range(dist.get_world_size()))), styles)
    (batch,) = batches(LLAMA, samples, 1)
    with CommDebugMode() as watched:
        loss = mean_loss(model, batch)
        loss.backward()
    squares = [p.grad.norm() ** 2 for p in model.parameters()]
    full = [s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares]
    return loss.item(), sum(full).sqrt().item(), watched.get_total_counts()


# -- what each rank has ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(request):
    """What both ranks of a tensor-parallel group come to, which are started once."""
    plans = {name: staged_plan(name, TP_GROUP) for name in chosen(request, UNDIVIDED, by="name")}
    divided = staged_plan("gpt2", TP_GROUP, zero_stage=0)
    return run_ranks(_all_of_a_tp_group, 2, divided, plans, timeout_s=120)


def _all_of_a_tp_group(divided: Plan, undivided: dict[str, Plan]) -> dict[str, Any]:
    return {
        "held": _held(divided),
        "of padding": _padded(NUMBERS),
        "own": _own(),
        "refused": _refusals(undivided),
    }


def test_each_rank_has_its_part_of_divided_parameters(told):
    model = ARCHITECTURES["gpt2"].factory()
    whole = {name: p.numel() for name, p in model.named_parameters()}
    for of_rank in told:
        for name, numel in of_rank["held"].items():
            divided = any(part in name for part in ("c_attn", "c_fc", "c_proj.weight", "wte"))
            assert numel == whole[name] // (2 if divided else 1), name


def _held(plan: Plan) -> dict[str, int]:
    engine = staged_engine("gpt2", plan)
    return {piece.name: piece.local.numel() for piece in engine.pieces()}


# -- plans of one's own ----------------------------------------------------------------------------


class Padded(nn.Module):
    """Looks up numbers in a table with padding, before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16, padding_idx=5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(numbers)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), torch.tensor(float(numbers.numel()))


NUMBERS = torch.arange(8).reshape(4, 2)


def test_the_row_of_padding_and_no_other_has_no_gradient(told):
    """It is the second rank's, of number 1 there; both ranks have a row of that number."""
    model = initialised(Padded)
    loss, count = model(NUMBERS)
    (loss / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for of_rank in told:
        assert of_rank["of padding"] == pytest.approx(norm, rel=1e-6)


def _padded(numbers: torch.Tensor) -> float:
    engine = _prepared(Padded, {**STYLES["names"], "table": "embedding_rowwise"})
    engine.step(numbers)
    return engine.gradient_norm().item()


class Wide(nn.Linear):
    """Does more than a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class More(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[0].up = Wide(16, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.blocks[1](self.blocks[0](x)).sum(), torch.tensor(1.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), torch.tensor(float(x.shape[0]))


STYLES = {
    "names": {"blocks.*.up": "colwise", "**.down": "rowwise"},
    "torch's": {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    "some": {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"},
}


def test_a_plan_of_ones_own(told):
    model = initialised(Own)
    loss, count = model(_vectors())
    for of_rank in told:
        expected = dict.fromkeys(STYLES, (loss / count).item())
        assert of_rank["own"] == pytest.approx(expected, rel=1e-6)


def _own() -> dict[str, float]:
    return {name: _prepared(Own, of).step(_vectors()).item() for name, of in STYLES.items()}


def _vectors() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def _prepared(factory, styles=None, degree: int = 2):
    model = build(factory, SEED)
    names = (
        ["blocks.0", "blocks.1"]
        if factory in (Own, Padded, More)
        else ["model.layers.0", "model.layers.1"]
    )
    (row,) = rows([4], tensor=[degree])
    plan = staged_plan("llama", [row])
    anatomy = split_into_units(model)
    stage = Stage(units=names, workers=plan.stages[0].workers, tensor=degree)
    update = {"stages": (stage,), "model": anatomy.fingerprint()}
    return prepare(model, plan.model_copy(update=update), tensor=styles)


BAD = {
    "nothing says how": (Own, None),
    "no known style": (Own, {"blocks.*.up": "sideways"}),
    "is a LSTM": (Own, {"blocks.*.up": nn.LSTM(1, 1)}),
    r"pattern 'layers\.\*\.up' of the tensor plan fits no module": (
        Own, {"blocks.*.up": "colwise", "layers.*.up": "rowwise"}),
    r"pattern '\*\*\.heads' of the tensor plan fits no module": (Own, {"**.heads": "divided"}),
    "divides nothing of the units": (Own, {"blocks.*.training": "divided"}),
    "'blocks.0' cannot be divided over 2 ranks": (Own, {"blocks.*": "colwise"}),
    "a Wide does more than a Linear": (More, STYLES["names"]),
    "3 heads cannot be divided over 2": (
        causal_model("LlamaConfig", num_hidden_layers=2, hidden_size=12, intermediate_size=16,
                     num_attention_heads=3, num_key_value_heads=3), None),
    "1 key head cannot be divided over 2": (
        causal_model("LlamaConfig", num_hidden_layers=2, num_key_value_heads=1), None),
}  # fmt: skip


FOLLOWED = [
    (ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)), "colwise"),
    (ColwiseParallel(output_layouts=Replicate()), "colwise_gather_output"),
    (RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()), "rowwise"),
]


@pytest.mark.parametrize(("style", "name"), FOLLOWED)
def test_what_styles_of_torch_ask_for(style, name):
    assert resolve_tensor_plan(Own(), {"blocks.*.up": style}) == {"blocks.*.up": name}


NOT_FOLLOWED = [
    (ColwiseParallel(input_layouts=Shard(1)), "input_layouts=Shard(dim=1)",
     "sequence_parallel: true"),
    (ColwiseParallel(output_layouts=Shard(1)), "output_layouts=Shard(dim=1)",
     "sequence_parallel: true"),
    (ColwiseParallel(use_local_output=False), "use_local_output=False", "plain tensors"),
    (RowwiseParallel(input_layouts=Replicate()), "input_layouts=Replicate()", "embedding_rowwise"),
    (RowwiseParallel(output_layouts=Shard(1)), "output_layouts=Shard(dim=1)",
     "sequence_parallel: true"),
    (RowwiseParallel(output_layouts=Shard(-1)), "output_layouts=Shard(dim=-1)", "leave it out"),
    (SequenceParallel(), "a SequenceParallel", "sequence_parallel: true"),
    (PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
     "a PrepareModuleInput", "sequence_parallel: true"),
]  # fmt: skip


@pytest.mark.parametrize(("style", "told", "fix"), NOT_FOLLOWED)
def test_what_styles_of_torch_ask_for_in_vain(style, told, fix):
    code = "tensor-style-option" if "=" in told else "tensor-style-unknown"
    with raises(InputError, code=code, what="blocks.*.up") as caught:
        resolve_tensor_plan(Own(), {"blocks.*.up": style})
    assert told in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize("message", BAD)
def test_bad_plans(message, told):
    for of_rank in told:
        assert re.search(message, of_rank["refused"][message])


# One whose style is not known, and one of which nothing says how.
FEW_UNDIVIDED = ("phi3", "plain-own-blocks")


@pytest.mark.parametrize("name", left_out(UNDIVIDED, UNDIVIDED.keys() - {*FEW_UNDIVIDED}))
def test_architectures_that_cannot_be_divided(name, told):
    for of_rank in told:
        assert UNDIVIDED[name] in of_rank["refused"][name]


def _refusals(plans: dict[str, Plan]) -> dict[str, str]:
    said = {message: _refusal(_prepared, *bad) for message, bad in BAD.items()}
    return said | {name: _refusal(staged_engine, name, plan) for name, plan in plans.items()}


def _refusal(make: Callable[..., Any], *arguments: Any) -> str:
    try:
        make(*arguments)
    except InputError as error:
        return str(error)
    return "nothing"
