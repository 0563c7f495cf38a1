"""Tied parameters: one piece, one gradient, wherever they are used."""

from __future__ import annotations

import torch

from gpumix.engine.sharding.unit_discovery import ROOT, split_into_units
from helpers.training.models import ARCHITECTURES, Block, Regression, vectors
from helpers.training.reference import assert_step_is_plain, batches, engine_alone

GPT2 = ARCHITECTURES["gpt2"]


def owners(model):
    return {slot.name: unit.name for unit in split_into_units(model).all for slot in unit.slots}


def test_tied_head_and_embedding_are_one_piece():
    engine = engine_alone(GPT2.factory, 4, 2)
    names = [piece.name for piece in engine.pieces()]
    assert names.count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in names
    assert engine.model.lm_head.weight is engine.model.transformer.wte.weight
    assert_step_is_plain(engine, GPT2.factory, next(batches(GPT2, 4, 1)))


def tied_blocks():
    """Two of three blocks share their second layer's weight, and all three their norm."""
    blocks = [Block() for _ in range(3)]
    blocks[2].out.weight = blocks[0].out.weight
    blocks[1].norm = blocks[2].norm = blocks[0].norm
    return Regression(blocks)


def test_what_units_share_belongs_to_the_root():
    owner = owners(tied_blocks())
    assert owner["blocks.0.out.weight"] == ROOT
    assert owner["blocks.0.norm.weight"] == ROOT
    assert owner["blocks.0.out.bias"] == "blocks.0"
    assert "blocks.2.out.weight" not in owner


def test_units_that_share_parameters_get_the_sum_of_gradients():
    batch = vectors(5, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(tied_blocks, 5, 2), tied_blocks, batch)


def all_tied():
    """Blocks that are three modules with the same parameters; the first input has no gradient."""
    first, *others = blocks = [Block() for _ in range(3)]
    for other in others:
        for mine, shared in zip(other.modules(), first.modules()):
            mine._parameters.update(shared._parameters)
    model = Regression(blocks)
    model.enter.requires_grad_(False)
    return model


def test_units_without_parameters_of_their_own():
    batch = vectors(4, torch.Generator().manual_seed(0))
    assert owners(all_tied())["blocks.0.qkv.weight"] == ROOT
    assert_step_is_plain(engine_alone(all_tied, 4, 3), all_tied, batch)
