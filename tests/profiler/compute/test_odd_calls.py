"""Models that do not call all of their units in one order are told so while they are measured, and
what those take from inside them is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from torch.utils.data import default_collate

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.hardware.device import open_device
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.plan.plan import Plan
from helpers.devices.sweeps import measure, subject
from helpers.errors import raises
from helpers.extended import every_second
from helpers.runs.jobs import LENGTH, train, write_job
from helpers.training.models import causal_model, packed_lm

CARD = [{"class": "only", "accelerator": "cpu", "memory": "64 MiB"}]


@pytest.mark.parametrize(
    ("arguments", "told"),
    every_second(
        [
            ({"calls": []}, {"code": "unit-not-called", "what": "blocks.0"}),
            (
                {"calls": [0, 2, 1], "by_size": True},
                {"code": "unit-order-varies", "what": ("blocks.2", 2)},
            ),
            (
                {"calls": [0, 1, 2, 2], "by_size": True},
                {"code": "unit-order-varies", "what": ("blocks.2", 4)},
            ),
        ]
    ),
)
def test_refused(tmp_path, arguments, told):
    model = {"factory": "toys:selective", "arguments": arguments}
    job = write_job(tmp_path, model=model, cluster=CARD)
    with raises(ModelError, **told) as caught:
        train(job)
    assert "plan" not in caught.value.fix


@pytest.mark.parametrize("resume", every_second([False, True]))
def test_a_block_that_is_never_called_is_no_unit(tmp_path, resume):
    """It is gathered with what lies outside of the blocks, saved, and resumed with the rest."""
    model = {"factory": "toys:selective", "arguments": {"calls": [0, 2]}}
    job = write_job(tmp_path, model=model, cluster=CARD, max_steps=2)
    train(job)
    plan = Plan.load(next(tmp_path.rglob("plan.json")))
    assert plan.stages[0].units == ("blocks.0", "blocks.2")
    if resume:
        assert train(job, "max_steps=4", resume=True).steps == 4


@pytest.mark.parametrize("before", every_second(range(1, 6)))
@pytest.mark.parametrize("calls", [[0, 2], [0, 2, 1], [0, 1, 2, 2]])
def test_of_one_batch_too_all_passes_are_alike(calls, before):
    """Layers that are left out at random, say: whichever pass of what is measured they lack in."""
    samples = toys.tokens(length=LENGTH)
    with (
        open_device(DeviceClass(name="one", accelerator="cpu", memory_bytes=2**26), 0) as runtime,
        raises(ModelError, code="unit-order-varies"),
    ):
        measure(
            runtime,
            lambda: toys.selective(calls, before=before),
            largest=1,
            make_batch=lambda n: default_collate(samples[:n]),
        )


@pytest.mark.extended
def test_what_a_model_takes_from_inside_its_blocks_is_there_in_every_pass():
    """Of each block once, though only one of them is computed: the logits of routers, whose
    balancing loss wants a gradient."""
    factory = causal_model(
        "MixtralConfig",
        intermediate_size=48,
        num_local_experts=4,
        num_key_value_heads=2,
        output_router_logits=True,
    )
    generator = torch.Generator().manual_seed(0)
    passes = []

    def objective(model, batch):
        outputs = model(**batch)
        passes.append(len(outputs.router_logits))
        return outputs.loss, torch.tensor(1)

    measured = subject(factory, largest=1, make_batch=lambda n: packed_lm(n, generator))
    with open_device(DeviceClass(name="one", accelerator="cpu", memory_bytes=2**28), 0) as runtime:
        measure_class(
            replace(measured, loss=objective),
            runtime,
            device_class="one",
            progress=lambda line: None,
        )
    assert len(passes) > 3 and set(passes) == {3}
