"""What a plan of stages says beforehand of collectives, messages and peaks is what ranks do."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

import gpumix
from gpumix.cost.predict import predict
from gpumix.cost.traffic import traffic
from gpumix.engine.prepare import prepare
from gpumix.hardware.runtime import open_device
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.plan import Mode, Plan, Stage
from gpumix.spec.profile import Profile
from harness import run_ranks
from models import causal_model, packed_lm
from reference import SEED, Share, plan_for
from staging import own_samples

MIB = 2**20
CLASS = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=512 * MIB)
BESIDE_THE_MODEL_BYTES = 16 * 1024
LAYERS = 6
model_of = causal_model(
    "LlamaConfig",
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
    tie_word_embeddings=False,
)

KEEP = Mode(recompute=False)
# Of each stage its layers, and the samples, micro-batch, share and mode of each worker.
PLANS = {
    "1f1b": ([(3, [Share(6, 2, 1)]), (3, [Share(6, 2, 1)])], {"zero_stage": 0}),
    "kept": ([(4, [Share(6, 2, 1, KEEP)]), (2, [Share(6, 2, 1, KEEP)])], {"zero_stage": 0}),
    "gpipe": ([(3, [Share(6, 1, 1)]), (3, [Share(6, 1, 1)])],
              {"zero_stage": 1, "schedule": "gpipe"}),
    "uneven": ([(2, [Share(4, 1, 1), Share(2, 1, 2)]), (4, [Share(6, 1, 1)])], {"zero_stage": 1}),
    "stage 2": ([(3, [Share(4, 1, 1), Share(2, 1, 2)]), (3, [Share(4, 1, 2), Share(2, 1, 1)])],
                {"zero_stage": 2, "waves": 2}),
    "stage 3": ([(3, [Share(4, 1, 1), Share(2, 1, 2)]), (3, [Share(4, 1, 2), Share(2, 1, 1)])],
                {"zero_stage": 3, "waves": 2}),
    "zero-bubble": ([(3, [Share(6, 1, 1, KEEP)]), (3, [Share(6, 1, 1, KEEP)])],
                    {"zero_stage": 0, "schedule": "zero-bubble"}),
}  # fmt: skip


def _profile() -> str:
    generator = torch.Generator().manual_seed(1)
    profile = gpumix.profile(
        model_of,
        lambda n: packed_lm(n, generator),
        sequence_length=1,
        global_batch=6,
        cluster=Cluster(classes=(CLASS,), devices=(Device(id="d0", device_class="cpu"),)),
        budget_s=20,
        progress=lambda line: None,
    )
    return profile.model_dump_json()


def _plan(profile: Profile, name: str) -> Plan:
    stages, settings = PLANS[name]
    model = gpumix.build(model_of, SEED)
    ends = [0, *accumulate(layers for layers, _ in stages)]
    found, device = [], 0
    for (begin, end), (_, shares) in zip(pairwise(ends), stages):
        one = plan_for(model, shares)
        needs = profile.model.needs_of(begin, end)
        workers = [
            w.model_copy(update={"device": f"d{device + n}"}) for n, w in enumerate(one.workers)
        ]
        device += len(workers)
        found.append(
            Stage(
                units=profile.model.calls[begin:end],
                workers=tuple(workers),
                root=needs.root,
                takes=needs.outputs,
            )
        )
    whole = plan_for(model, [Share(6, 2, 1)])
    update = {"stages": tuple(found), **settings}
    return Plan.model_validate(whole.model_dump() | update)


def _run(plans: dict[str, str]) -> dict[str, tuple[dict[str, int], dict[str, int], int]]:
    """On a rank: of each plan the counts and bytes of a later step, and the peak of three."""
    found, rank = {}, torch.distributed.get_rank()
    for name, plan_json in plans.items():
        plan = Plan.model_validate_json(plan_json)
        with open_device(CLASS, 0) as runtime:
            engine = prepare(gpumix.build(model_of, SEED), plan)
            optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
            batch = packed_lm(plan.global_batch, torch.Generator().manual_seed(2))
            own = own_samples(plan, rank, batch)
            runtime.reset_peak()
            for _ in range(3):
                counts, sizes = engine.comm.counts.copy(), engine.comm.bytes.copy()
                engine.step(own)
                counts, sizes = engine.comm.counts - counts, engine.comm.bytes - sizes
                optimizer.step()
                optimizer.zero_grad()
            found[name] = dict(counts), dict(sizes), runtime.peak_bytes()
            del engine, optimizer
    return found


@pytest.fixture(scope="module")
def profile() -> Profile:
    (found,) = run_ranks(_profile, 1)
    return Profile.model_validate_json(found)


@pytest.fixture(scope="module")
def plans(profile) -> dict[str, Plan]:
    return {name: _plan(profile, name) for name in PLANS}


@pytest.fixture(scope="module")
def done(plans):
    """What the engine counted, by plan and rank."""
    found = {}
    for world in {len(plan.workers) for plan in plans.values()}:
        some = {n: p.model_dump_json() for n, p in plans.items() if len(p.workers) == world}
        ranks = run_ranks(_run, world, some)
        found |= {name: [of_rank[name] for of_rank in ranks] for name in some}
    return found


@pytest.mark.parametrize("name", PLANS)
def test_collectives_and_messages_are_those_that_were_counted(profile, plans, done, name):
    for counted, (counts, sizes, _) in zip(traffic(profile, plans[name]), done[name], strict=True):
        assert dict(counted.counts) == counts
        assert dict(counted.bytes) == sizes


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_that_which_was_predicted(profile, plans, done, name):
    predicted = predict(profile, plans[name]).workers
    for worker, (_, _, peak) in zip(predicted, done[name], strict=True):
        assert peak - BESIDE_THE_MODEL_BYTES <= worker.peak_bytes <= 1.01 * peak
