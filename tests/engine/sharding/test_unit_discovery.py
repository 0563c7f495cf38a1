"""Which modules become units, and which of them are of one kind."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpumix.engine.sharding.unit_discovery import ROOT, count_buffer_bytes, split_into_units
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import PLAIN, Mode
from helpers.errors import raises
from helpers.training.models import (
    ARCHITECTURES,
    LENGTH,
    WIDTH,
    Block,
    Regression,
    own_blocks,
    vectors,
)
from helpers.training.reference import (
    Share,
    assert_ranks_step_plainly,
    assert_step_is_plain,
    engine_alone,
)


def names(model, wanted=()):
    return [unit.name for unit in split_into_units(model, wanted).units]


def kinds(model, wanted=()):
    return [unit.kind for unit in split_into_units(model, wanted).units]


def test_transformers_models_name_their_blocks():
    assert names(ARCHITECTURES["gpt2"].factory()) == [f"transformer.h.{i}" for i in range(3)]
    assert names(ARCHITECTURES["bart"].factory()) == [
        f"model.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)
    ]


class Embedded(Block):
    """With a table of tokens inside of it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x):
        return super().forward(x + self.table.weight[0])


class OfParts(Regression):
    """By `transformers` its text is one of several parts; it looks tokens up by itself."""

    _no_split_modules = ("Block", "Embedded")

    def __init__(self, text_config=None):
        super().__init__([Embedded(), Block()])
        self.config = SimpleNamespace(get_text_config=lambda: text_config or self.config)

    def get_input_embeddings(self):
        return self.blocks[0].table

    def forward(self, x, target):
        tokens = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        return super().forward(x + self.get_input_embeddings()(tokens).mean(), target)


def test_what_holds_the_table_that_a_models_own_code_looks_up_is_no_unit():
    assert names(OfParts()) == ["blocks.0", "blocks.1"]
    assert names(OfParts(text_config=1)) == ["blocks.1"]
    factory = partial(OfParts, text_config=1)
    batch = vectors(2, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(factory, 2, 2), factory, batch)


def test_members_of_lists_of_one_class_are_found_in_other_models():
    assert names(own_blocks()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_model_may_be_the_list_itself():
    assert names(nn.Sequential(Block(), Block())) == ["0", "1"]


def test_lists_of_leaves_or_of_mixed_classes_hold_no_units():
    model = own_blocks()
    model.more = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.mixed = nn.Sequential(Block(), nn.Sequential(nn.Linear(2, 2)))
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_outermost_of_nested_lists_are_units():
    model = Regression([nn.Sequential(Block(), Block()) for _ in range(2)])
    assert names(model) == ["blocks.0", "blocks.1"]


def test_lists_of_lists_of_blocks_hold_blocks():
    """A list is never called, so it cannot be a unit."""
    model = Regression([])
    stages = [[Block()], [Block(), Block()], [Block(), Block()]]
    model.stages = nn.ModuleList([nn.ModuleList(stage) for stage in stages])
    assert names(model) == ["stages.0.0", *(f"stages.{i}.{j}" for i in (1, 2) for j in (0, 1))]
    model.stages = nn.ModuleList([nn.ModuleDict({"a": Block()}) for _ in range(2)])
    assert names(model) == ["stages.0.a", "stages.1.a"]


def test_modules_without_parameters_are_no_units():
    model = own_blocks()
    model.blocks.append(nn.Sequential(nn.Sequential(nn.ReLU())))
    assert names(model, ["Block", "Sequential"]) == ["blocks.0", "blocks.1", "blocks.2"]


class Small(nn.Module):
    """Without repeated blocks: a convolution, a list of one, a layer; returns (sum, count)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.act = nn.ReLU()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, target):
        difference = self.heads[0](self.act(self.enter(x))) * self.scale - target
        return (difference**2).sum(), torch.tensor(difference.numel())


def test_a_model_without_repeated_blocks_consists_of_its_modules():
    assert names(Small()) == ["enter", "heads.0"]
    assert [slot.name for slot in split_into_units(Small()).root.slots] == ["scale"]
    batch = vectors(4, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(Small, 4, 3), Small, batch)


class Affine(nn.Module):
    """Parameters of its own, of which a number is a shape, and a module without any."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.shift = nn.Parameter(torch.tensor(0.25))
        self.act = nn.Tanh()

    def forward(self, x, target):
        difference = self.act(x * self.slope + self.shift).mean(-1, keepdim=True) - target
        return (difference**2).sum(), torch.tensor(difference.numel())


def test_a_model_without_modules_is_one_unit_itself():
    assert names(nn.Linear(2, 2)) == names(Affine()) == [""]
    assert not split_into_units(Affine()).root.slots
    batch = vectors(5, torch.Generator().manual_seed(0))
    for mode in (PLAIN, Mode(recompute=False)):
        assert_step_is_plain(engine_alone(Affine, 5, 2, mode=mode), Affine, batch)


def test_ranks_divide_a_model_that_is_one_unit():
    batch = vectors(5, torch.Generator().manual_seed(0))
    assert_ranks_step_plainly(Affine, [Share(3, 2, 1), Share(2, 1, 3)], batch)


def test_units_by_class():
    assert names(own_blocks(), ["Linear"]) == [
        "enter",
        *(f"blocks.{i}.{part}" for i in range(3) for part in ("qkv", "out", "mlp.0", "mlp.2")),
        "leave",
    ]


def test_units_by_name_come_in_the_models_order():
    assert names(own_blocks(), ["blocks.2", "blocks.0", "blocks.2"]) == ["blocks.0", "blocks.2"]


def test_what_is_no_unit_is_the_roots():
    root = split_into_units(own_blocks(), ["blocks.1"]).root
    assert root.name == ROOT
    owned = {slot.name for slot in root.slots}
    assert {"enter.weight", "blocks.0.out.bias", "leave.bias"} <= owned
    assert "blocks.1.out.bias" not in owned


def test_a_wanted_unit_must_exist():
    with raises(InputError, code="unit-class-unknown", what="Blocks"):
        split_into_units(own_blocks(), ["Blocks"])


@pytest.mark.parametrize(
    "wanted", [["Block"], ["blocks.0", "blocks.2"], ["Sequential", "norm"], ["Linear"]]
)
def test_any_choice_of_units_trains(wanted):
    batch = vectors(4, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(own_blocks, 4, 3, units=wanted), own_blocks, batch)


# -- kinds -----------------------------------------------------------------------------------------


def test_equal_blocks_are_of_one_kind():
    assert kinds(own_blocks()) == ["Block"] * 3


def test_parameters_make_a_kind():
    assert kinds(ARCHITECTURES["t5"].factory()) == [
        "T5Block",
        "T5Block#2",
        "T5Block#3",
        "T5Block#4",
    ]


def test_settings_make_a_kind():
    kind = "Gemma2DecoderLayer"
    assert kinds(ARCHITECTURES["gemma2"].factory()) == [kind, f"{kind}#2", kind]
    model = Regression([Block(), Block(dropout=0.5), Block()])
    assert kinds(model) == ["Block", "Block#2", "Block"]


def test_what_is_trained_makes_a_kind():
    model = own_blocks()
    model.blocks[1].requires_grad_(False)
    assert kinds(model) == ["Block", "Block#2", "Block"]


def test_a_blocks_number_makes_no_kind():
    model = own_blocks()
    for i, block in enumerate(model.blocks):
        block.layer_idx = i
    assert kinds(model) == ["Block"] * 3


# -- fingerprint -----------------------------------------------------------------------------------


def test_the_fingerprint_is_of_shapes_not_of_values():
    assert (
        split_into_units(own_blocks()).fingerprint() == split_into_units(own_blocks()).fingerprint()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.blocks.append(Block()),
        lambda m: m.enter.requires_grad_(False),
        lambda m: setattr(m, "leave", nn.Linear(WIDTH, 5)),
        lambda m: m.half(),
    ],
)
def test_the_fingerprint_changes_with_the_model(change):
    model = own_blocks()
    change(model)
    assert split_into_units(model).fingerprint() != split_into_units(own_blocks()).fingerprint()


def test_shared_buffers_are_counted_once():
    model = own_blocks()
    for block in model.blocks:
        block.register_buffer("mask", model.blocks[0]._buffers.get("mask", torch.ones(10)))
    assert count_buffer_bytes(model) == 40


def test_kinds_are_replaced_where_they_are_known():
    """Of a unit that is never called none is measured."""
    anatomy = split_into_units(own_blocks())
    first, *rest = (unit.kind for unit in anatomy.units)
    renamed = anatomy.of_kinds({anatomy.units[0].name: "own"})
    assert [unit.kind for unit in renamed.units] == ["own", *rest]
    assert first != "own"
