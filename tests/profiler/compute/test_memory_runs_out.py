"""The sweep where a micro-batch does not fit: half-way is tried, and nothing that failed is kept.

On a real allocator with a cap. One place of the model takes `SCRATCH` bytes a sample for a moment;
beside that all else is small.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gpumix
from gpumix.hardware.device import device_in_use, open_device
from gpumix.hardware.memory_limit import limit_memory
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.profile.profile import Profile
from helpers.devices.sweeps import ROWS, costly_model, measure, sizes, some_batch, virtual_time
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import causal_model

SCRATCH = 4 * 2**20
PLACES = ["block", "backward of the block", "head"]


@pytest.fixture(autouse=True)
def _counted():
    limit = limit_memory(None)
    if not limit.exact:
        pytest.skip(f"bytes cannot be counted here: {limit.why_inexact}")


def device_class(name, samples) -> DeviceClass:
    """With memory for the scratch of so many samples."""
    return DeviceClass(name=name, accelerator="cpu", memory_bytes=int(samples * SCRATCH))


def scratch(x):
    torch.empty(len(x), SCRATCH, dtype=torch.uint8)


def hungry_model(place, spend=lambda: None):
    """Blocks `spend` a second, however many samples they have: the larger, the better."""

    def cost(x):
        spend()
        if place == "block":
            scratch(x)
        elif place == "backward of the block" and x.requires_grad:
            x.register_hook(scratch)

    model = costly_model(cost)
    if place == "head":
        model.norm.register_forward_pre_hook(lambda module, inputs: scratch(*inputs))
    return model


def swept(place, memory):
    """On a rank: the sizes that were tried, those that were recorded, and the bytes that were in
    use before each."""
    tried, in_use = [], []

    def make_batch(samples):
        tried.append(samples)
        in_use.append(device_in_use().current_bytes())
        return some_batch(samples)

    with virtual_time() as clock, open_device(device_class("small", memory), 0) as runtime:
        model = partial(hungry_model, place, partial(clock.spend, 1.0))
        found = measure(runtime, model, largest=8, make_batch=make_batch)
    return tried, sizes(found), in_use


SWEEPS = [
    (8.5, [1, 2, 4, 8], [1, 2, 4, 8]),
    (6.5, [1, 2, 4, 8, 6], [1, 2, 4, 6]),
    (5.5, [1, 2, 4, 8, 6], [1, 2, 4]),
    (2.5, [1, 2, 4, 3], [1, 2]),
    (1.5, [1, 2], [1]),
]
IN_PLACES = [
    *(("block", *sweep) for sweep in SWEEPS),
    *(("backward of the block", *sweep) for sweep in SWEEPS[1:3]),
    *(("head", *sweep) for sweep in SWEEPS[1:3]),
]
TELLING = [("block", 6.5), ("backward of the block", 6.5), ("head", 5.5)]


@pytest.mark.parametrize(
    ("place", "memory", "tried", "recorded"),
    left_out(IN_PLACES, [case for case in IN_PLACES if case[:2] not in TELLING]),
)
def test_half_way_is_tried_after_running_out(place, memory, tried, recorded):
    """What did not fit leaves nothing behind, so half-way has as much room as it would have had in
    the first place."""
    ((found, sizes_found, in_use),) = run_ranks(swept, 1, place, memory)
    # Once to tell units apart, and once to warm up.
    assert (found, sizes_found) == ([1, 1, *tried], recorded)
    if tried[-1] < tried[-2]:
        assert in_use[-1] == in_use[-2]


# -- not even one sample ---------------------------------------------------------------------------


def profile(place, cluster):
    """On a rank: how `gpumix.profile` fails."""
    with pytest.raises(NoFeasiblePlanError) as caught:
        gpumix.profile(
            partial(hungry_model, place),
            some_batch,
            sequence_length=ROWS,
            global_batch_size=2,
            cluster=cluster,
            progress=lambda line: None,
        )
    return str(caught.value)


@pytest.mark.parametrize("place", left_out(PLACES, PLACES[1:]))
def test_a_device_that_cannot_hold_one_sample_is_named_on_every_rank(place):
    classes = (device_class("big", 4), device_class("small", 0.5))
    devices = tuple(Device(id=f"{c.name}-0", device_class=c.name) for c in classes)
    told = run_ranks(profile, 2, place, Cluster(classes=classes, devices=devices))
    assert told[0] == told[1]
    what, why, fix = told[0].splitlines()
    assert what == "device class 'small', 2.0 MiB: one unit with one sample does not fit"
    assert f"tried to allocate {SCRATCH} bytes" in why
    assert "sequence_length" in fix and "out of the cluster" in fix


def wrong_at_two_samples(x):
    if len(x) == 2:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def measure_wrong():
    with open_device(device_class("small", 4), 0) as runtime:
        measure(runtime, lambda: costly_model(wrong_at_two_samples), largest=8)


def test_another_error_is_no_want_of_memory():
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_ranks(measure_wrong, 1)


# -- logits that find no room ----------------------------------------------------------------------

VOCABULARY, LENGTH = 8192, 512  # 16 MiB of logits a sample, of which a loss holds several


language_model = causal_model(
    "LlamaConfig",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
)


def tokens(samples):
    ids = torch.arange(samples * LENGTH).view(samples, LENGTH) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def profile_with_large_logits():
    memory = 24 * 2**20
    cluster = Cluster(
        classes=(DeviceClass(name="small", accelerator="cpu", memory_bytes=memory),),
        devices=(Device(id="small-0", device_class="small"),),
    )
    found = gpumix.profile(
        language_model,
        tokens,
        sequence_length=LENGTH,
        global_batch_size=2,
        cluster=cluster,
        progress=lambda line: None,
    )
    return found.model_dump_json()


@pytest.mark.extended
def test_whole_logits_may_be_too_much_where_chunks_fit():
    (told,) = run_ranks(profile_with_large_logits, 1)
    found = Profile.model_validate_json(told)
    root, of_class = found.model.root, found.classes[0]
    assert all(value >= 24 * 2**20 for value in root.head.values)
    assert all(value < 24 * 2**20 for value in root.chunked_cross_entropy.values)
    assert root.flops == pytest.approx(2 * LENGTH * 32 * VOCABULARY, rel=0.01)
    assert of_class.largest_micro_batch == 2
    assert {w.mode.head for w in gpumix.plan(found, global_batch_size=2).workers} == {"chunked"}
