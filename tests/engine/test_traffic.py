"""What a plan says beforehand of a step, its collectives and its peak, is what the engine does."""

from __future__ import annotations

import pytest
import torch

import gpumix
from gpumix.cost.predict import predict
from gpumix.cost.traffic import traffic
from gpumix.engine.prepare import prepare
from gpumix.hardware.runtime import open_device
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.plan import Mode, Plan
from gpumix.spec.profile import End, Profile
from harness import run_ranks
from models import causal_model, packed_lm
from reference import SEED, Share, own_rows, plan_for

MIB = 2**20
CLASS = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=512 * MIB)
LAYERS, WIDTH = 6, 128
BESIDE_THE_MODEL_BYTES = 16 * 1024  # the batch, and a state of the random number generator
model_of = causal_model(
    "LlamaConfig",
    hidden_size=WIDTH,
    intermediate_size=3 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
    tie_word_embeddings=False,
)
ENDS = {"before": ("model.embed_tokens.weight",), "after": ("lm_head.weight",)}

INLINE, KEEPING = Mode(order="sequential", recompute=False), Mode(recompute=False)
ONE_BY_ONE = Mode(order="sequential")
UNEVEN = [Share(3, 2, 1), Share(4, 1, 3), Share(0, 0, 2), Share(5, 3, 0)]
EVEN = [Share(4, 2, 1)] * 4
HOSTS = [Share(3, 2, (1, 3)[n % 2], host="ab"[n // 2]) for n in range(4)]
PLANS = {
    "stage 3": (UNEVEN, {}),
    "stage 3, two ranks, kept": ([Share(6, 2, 1, kept=7), Share(6, 2, 1, KEEPING)], {}),
    "stage 3, joined": (UNEVEN, {"stage": {"joined": 4}}),
    "stage 3, ends": (EVEN, {"stage": ENDS}),
    "stage 3, head in chunks": (UNEVEN, {"head": "chunked", "stage": ENDS}),
    "stage 3, state on hosts": (UNEVEN, {"on_host": (0, 2)}),
    "stage 1, state on hosts": (UNEVEN, {"on_host": (0, 1, 2, 3), "zero_stage": 1}),
    "stage 2, joined, ends": (UNEVEN, {"zero_stage": 2, "stage": {"joined": 2, **ENDS}}),
    "stage 1": (
        [Share(4, 2, 1, ONE_BY_ONE), Share(3, 1, 2, INLINE), Share(4, 2, 3), Share(3, 1, 0)],
        {"zero_stage": 1},
    ),
    "stage 1, kept one by one": ([Share(5, 2, 1, ONE_BY_ONE, kept=8)] * 2, {"zero_stage": 1}),
    "stage 0": ([Share(4, 2, 1, INLINE), Share(3, 3, 2, ONE_BY_ONE)], {"zero_stage": 0}),
    "hosts alike": (HOSTS, {"sharding": "host"}),
    "hosts unlike": ([*HOSTS[:2], Share(3, 2, 1, host="b"), Share(1, 1, 1, host="b")],
                     {"sharding": "host", "zero_stage": 2}),
}  # fmt: skip


def _profile() -> str:
    generator = torch.Generator().manual_seed(1)
    cluster = Cluster(classes=(CLASS,), devices=(Device(id="d0", device_class="cpu"),))
    profile = gpumix.profile(
        model_of,
        lambda n: packed_lm(n, generator),
        sequence_length=1,
        global_batch=6,
        cluster=cluster,
        budget_s=20,
        progress=lambda line: None,
    )
    return profile.model_dump_json()


def _run(plans: dict[str, str]) -> dict[str, tuple[dict[str, int], dict[str, int], int]]:
    """On a rank: of each plan the counts and bytes of a later step, and the peak of three."""
    found, rank = {}, torch.distributed.get_rank()
    for name, plan_json in plans.items():
        plan = Plan.model_validate_json(plan_json)
        with open_device(CLASS, 0) as runtime:
            engine = prepare(gpumix.build(model_of, SEED), plan)
            optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
            batch = packed_lm(plan.global_batch, torch.Generator().manual_seed(2))
            own = own_rows(batch, [_share(w) for w in plan.workers], rank)
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


def _share(worker) -> Share:
    return Share(worker.samples, worker.micro_batch, 1)


@pytest.fixture(scope="module")
def profile() -> Profile:
    (found,) = run_ranks(_profile, 1)
    profile = Profile.model_validate_json(found)
    sizes = {"trainable": 512 * WIDTH}
    ends = {end: End(names=names, **sizes) for end, names in ENDS.items()}
    root = profile.model.root.model_copy(update=ends)
    return profile.model_copy(update={"model": profile.model.model_copy(update={"root": root})})


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    model = gpumix.build(model_of, SEED)
    return {name: plan_for(model, shares, **more) for name, (shares, more) in PLANS.items()}


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
def test_collectives_and_bytes_are_those_that_were_counted(profile, plans, done, name):
    for counted, (counts, sizes, _) in zip(traffic(profile, plans[name]), done[name], strict=True):
        assert counts == dict(counted.counts)
        assert sizes == dict(counted.bytes)


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_that_which_was_predicted(profile, plans, done, name):
    predicted = predict(profile, plans[name]).workers
    above = 1.01 if name == "stage 3, head in chunks" else 1.005
    for worker, (_, _, peak) in zip(predicted, done[name], strict=True):
        assert peak - BESIDE_THE_MODEL_BYTES <= worker.peak_bytes <= above * peak
