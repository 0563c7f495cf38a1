"""A small Llama, its profile, and what ranks count while they train it by plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

import gpumix
from gpumix.engine.prepare import prepare
from gpumix.hardware.device import open_device
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.processes.harness import run_ranks
from helpers.training.known_losses import known_loss
from helpers.training.models import LENGTH, causal_model, packed_lm
from helpers.training.reference import SEED
from helpers.training.staging import own_samples

CLASS = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=512 * 2**20)
BESIDE_THE_MODEL_BYTES = 16 * 1024  # the batch, and a state of the random number generator
LAYERS, WIDTH, VOCABULARY = 6, 128, 512
llama = causal_model(
    "LlamaConfig",
    hidden_size=WIDTH,
    intermediate_size=3 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
    tie_word_embeddings=False,
)


class Counted(NamedTuple):
    """Of one rank: collectives and messages of a step, their bytes, and the peak of two steps.
    Flags, a byte for each parameter, are in no plan's traffic."""

    counts: dict[str, int]
    bytes: dict[str, int]
    peak_bytes: int


def profiled(ranks: int = 1) -> Profile:
    """Measured in processes of its own, on so many devices."""
    return Profile.model_validate_json(run_ranks(_profile, ranks)[0])


def counted(plans: Mapping[str, Plan]) -> dict[str, list[Counted]]:
    """What the ranks of each plan count, by its name."""
    found = {}
    for world in {len(plan.workers) for plan in plans.values()}:
        some = {n: p.model_dump_json() for n, p in plans.items() if len(p.workers) == world}
        ranks = run_ranks(_count, world, some)
        found |= {name: [of_rank[name] for of_rank in ranks] for name in some}
    return found


def _profile() -> str:
    generator = torch.Generator().manual_seed(1)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    profile = gpumix.profile(
        llama,
        lambda n: packed_lm(n, generator),
        sequence_length=LENGTH,
        global_batch_size=6,
        cluster=Cluster(
            classes=(CLASS,),
            devices=tuple(Device(id=f"d{n}", device_class="cpu", ordinal=n) for n in range(ranks)),
        ),
        budget_s=20,
        progress=lambda line: None,
    )
    return profile.model_dump_json()


def _count(plans: dict[str, str]) -> dict[str, Counted]:
    found, rank = {}, torch.distributed.get_rank()
    for name, plan_json in plans.items():
        plan = Plan.model_validate_json(plan_json)
        with open_device(CLASS, 0) as runtime:
            model = gpumix.build(llama, SEED)
            engine = prepare(model, plan, loss=known_loss(model))
            optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
            batch = packed_lm(plan.global_batch, torch.Generator().manual_seed(2))
            own = own_samples(plan, rank, batch)
            runtime.reset_peak()
            for _ in range(2):
                counts, sizes = engine.comm.counts.copy(), engine.comm.bytes.copy()
                engine.step(own)
                counts, sizes = engine.comm.counts - counts, engine.comm.bytes - sizes
                optimizer.step()
                optimizer.zero_grad()
            if engine.comm.world > 1:
                meetings = plan.parameters_on == "host"
                flags = counts.pop("flags")
                assert (flags > 1 if meetings else flags == 1) and sizes.pop("flags") > 0
            found[name] = Counted(dict(counts), dict(sizes), runtime.peak_bytes())
            del engine, optimizer
    return found
