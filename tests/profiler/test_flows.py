"""What of the root unit is used at one end of the model only."""

from __future__ import annotations

import pytest
import torch

from gpumix.engine.deferred import build
from gpumix.engine.objective import objective_of
from gpumix.engine.prepare import switch_off_caches
from gpumix.engine.units import dissect
from gpumix.profiler.flows import find_flows
from gpumix.profiler.specimen import Specimens
from models import ARCHITECTURES

EXPECTED = {
    # The token embedding is the head too.
    "gpt2": (
        {"transformer.wpe.weight"},
        {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    ),
    "llama": ({"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}),
    # Its embeddings are a unit.
    "bert": (set(), None),
    # One table for encoder, decoder and head; the encoder's norm lies between units.
    "t5": (set(), {"decoder.final_layer_norm.weight"}),
    "plain-own-blocks": (set(), None),
}


def flows_of(name, *, in_chunks=False):
    architecture = ARCHITECTURES[name]
    model = build(architecture.factory, 0)
    switch_off_caches(model)
    anatomy = dissect(model)
    specimens = Specimens(
        model,
        anatomy,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        objective=objective_of(model),
    )
    batch = architecture.batch(2, torch.Generator().manual_seed(0))
    return anatomy, find_flows(specimens, batch, in_chunks=in_chunks)


@pytest.mark.parametrize(("name", "in_chunks"), [*((n, False) for n in EXPECTED), ("llama", True)])
def test_ends_are_found(name, in_chunks):
    anatomy, flows = flows_of(name, in_chunks=in_chunks)
    numels = {slot.name: slot.parameter.numel() for slot in anatomy.root.slots}
    for end, expected in zip((flows.before, flows.after), EXPECTED[name]):
        if expected is not None:
            assert set(end.names) == expected
        assert end.trainable == sum(numels[name] for name in end.names)
