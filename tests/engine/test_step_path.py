"""A layered step is short: it goes through few files, and seldom changes from one to another."""

from __future__ import annotations

import torch

from helpers.training.models import ARCHITECTURES, llama
from helpers.training.reference import batches, engine_alone
from helpers.training.step_path import StepPath, follow

# Upper bounds of a step of two blocks, on one rank with one micro-batch.
MOST_FILES, MOST_CHANGES = 14, 194


def path_of_step() -> StepPath:
    """Path of a step after the first two, which make what later steps use again."""
    engine = engine_alone(llama(num_hidden_layers=2), 1, 1)
    optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
    *first, last = batches(ARCHITECTURES["llama"], 1, 3)
    for batch in first:
        engine.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    return follow(lambda: engine.step(last))


def test_a_step_goes_through_few_files():
    path = path_of_step()
    assert len(path.files) <= MOST_FILES, path.files
    assert path.changes <= MOST_CHANGES
