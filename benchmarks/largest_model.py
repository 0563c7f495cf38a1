"""The largest model that trains on three small cards and little RAM, by each means in turn.

Cards of 24, 12 and 8 GB with 64 GB of RAM, all scaled down 1 : 256: a Llama in fp32 with AdamW,
trained in full, and with LoRA on a base in NF4. The deepest of one width is looked for: by an even
split; by FSDP2 in its thriftiest form, tried for real; by FSDP2 with offload, counted as an even
split whose state is in RAM, since FSDP2 cannot offload where the device is a CPU; by RoundPipe's
rule (all parameters in RAM, each card as large as 0.6 of the smallest); and by the planner, with
one technique more at a time. Plans are searched by predicted memory; the largest of full training
is then trained for some steps, with memory counted and limited to the byte.

    python benchmarks/largest_model.py [--json] [--part full qlora]

Figures: `full_...` and `qlora_...` in parameters of the largest model by each way, `full_vs_even`,
`full_vs_fsdp2_offload`, `full_vs_roundpipe`, `qlora_vs_even`; `worst_memory_fraction` (the highest
measured peak over its card's limit), `worst_ram_fraction` (what the plans keep in RAM over all of
it). QLoRA needs bitsandbytes and peft, and is left out without.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gpumix
from common import Figures, cluster_of, make_parser, print_figures
from compared.attempts import engine_attempt, fits, fsdp_attempt
from compared.setting import Model, Setting
from emulated.results import aligned
from emulated.rounds import joined
from engine_memory import largest
from gpumix.cost.predict import predict
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.planner.baselines.even import plan_even
from gpumix.planner.common.strategy import PlanRequest, is_within_memory
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.train.processes.local_launcher import RankAddress, launch

CARDS = cluster_of(
    ("gb24", 1, None, "96 MiB"), ("gb12", 1, None, "48 MiB"), ("gb8", 1, None, "32 MiB")
)
RAM_BYTES = 256 * 2**20
ROUNDPIPE_PART = 0.6
WIDTH, VOCABULARY, SEQUENCE = 192, 2048, 48
BATCH, PROFILED_LAYERS, MOST_LAYERS, BUDGET_S = 6, 4, 4096, 30.0
# What a search has from the first, and the techniques that come to it, one after another.
LEAST: dict[str, tuple[Any, ...]] = {
    "zero_stages": (3,),
    "orders": ("layered",),
    "gradient_checkpointing": (True,),
    "checkpoints_on": ("device",),
    "cross_entropy": ("whole",),
    "state_on": ("device",),
    "parameters_on": ("device",),
}
TECHNIQUES: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    ("recompute", {}),
    ("chunked_loss", {"cross_entropy": ("whole", "chunked")}),
    ("inputs_on_host", {"checkpoints_on": ("device", "host")}),
    ("state_on_host", {"state_on": ("device", "host")}),
    ("parameters_on_host", {"parameters_on": ("device", "host")}),
)
Planner = Callable[[Profile], Plan]


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    figures: Figures = {}
    if "full" in arguments.part:
        figures |= _of_full_training()
    if "qlora" in arguments.part:
        figures |= _of_adapters()
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)
    fractions = [v for k, v in figures.items() if k.endswith("_fraction") and v is not None]
    return int(any(float(fraction) > 1 for fraction in fractions))


def _arguments() -> argparse.Namespace:
    parts = ("full", "qlora")
    parser = make_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


def _of_full_training() -> Figures:
    profile = _limit_ram(launch(_profile_full, CARDS.in_rank_order())[0])
    found = _search("full", profile)
    guess = found["full_even"][0] or 1
    found["full_fsdp2"] = _sized(profile, largest(_fsdp2_trains, guess, MOST_LAYERS))
    figures: Figures = {name: elements for name, (_, elements) in found.items()}
    ours, plan = found["full_ours"], None
    figures |= _ratios("full", found, ("even", "fsdp2", "fsdp2_offload", "roundpipe"))
    plan = _planned(partial(_plan_ours, len(TECHNIQUES)), _with_layers(profile, ours[0]))
    assert plan is not None, "it was found before"
    attempts = engine_attempt(CARDS, _deep(ours[0]), _for_model(plan, ours[0]))
    limits = [CARDS.class_named(d.device_class).memory_bytes for d in CARDS.in_rank_order()]
    peaks = [(a.peak_bytes or 0) / limit for a, limit in zip(attempts, limits)]
    print(f"trained: {[a.error or 'done' for a in attempts]}", file=sys.stderr)
    figures["full_trains"] = fits(attempts)
    figures["worst_memory_fraction"] = round(max(peaks), 4)
    figures["worst_ram_fraction"] = round(_ram_of(plan) / RAM_BYTES, 4)
    _show(found)
    return figures


def _of_adapters() -> Figures:
    if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "peft")):
        print("QLoRA is left out: it needs bitsandbytes and peft", file=sys.stderr)
        return {"qlora_vs_even": None}
    with tempfile.TemporaryDirectory() as name:
        profile = _limit_ram(launch(_profile_adapted, CARDS.in_rank_order(), Path(name))[0])
    found = _search("qlora", profile)
    _show(found)
    figures: Figures = {name: elements for name, (_, elements) in found.items()}
    return figures | _ratios("qlora", found, ("even", "fsdp2_offload", "roundpipe"))


# -- profiles --------------------------------------------------------------------------------------


def _deep(layers: int) -> Model:
    return Model(width=WIDTH, layers=layers, vocabulary=VOCABULARY, sequence=SEQUENCE)


def _profile_full(seat: RankAddress) -> Profile:
    model = _deep(PROFILED_LAYERS)
    with joined(seat):
        return _profiled(model.build, lambda samples: model.rows(0, samples))


def _profile_adapted(seat: RankAddress, folder: Path) -> Profile:
    from helpers.training import quantised as q

    q.SIZES.update(
        hidden_size=WIDTH, intermediate_size=WIDTH * 11 // 4, num_hidden_layers=PROFILED_LAYERS
    )
    q.VOCABULARY = VOCABULARY
    rows = _deep(PROFILED_LAYERS).rows
    with joined(seat):
        if seat.rank == 0:
            q.save_base(folder)
        torch.distributed.barrier()
        return _profiled(lambda: q.load_adapted(folder, "nf4"), lambda samples: rows(0, samples))


def _profiled(build: Callable[[], Any], rows: Callable[[int], Any]) -> Profile:
    return gpumix.profile(
        build,
        rows,
        sequence_length=SEQUENCE,
        global_batch_size=BATCH,
        cluster=CARDS,
        budget_s=BUDGET_S,
        progress=lambda line: None,
    )


def _limit_ram(profile: Profile) -> Profile:
    """The RAM of the host, a third for each card."""
    each = RAM_BYTES // len(CARDS.devices)
    classes = tuple(c.model_copy(update={"host_bytes": each}) for c in profile.classes)
    return profile.model_copy(update={"classes": classes})


def _with_layers(profile: Profile, layers: int) -> Profile:
    """The profile of a model of so many layers; all are alike."""
    model = profile.model.model_copy(
        update={
            "calls": tuple(f"layers.{number}" for number in range(layers)),
            "kind_of_call": profile.model.kind_of_call[:1] * layers,
        }
    )
    return profile.model_copy(update={"model": model})


def _for_model(plan: Plan, layers: int) -> Plan:
    """The plan for the model itself, by its own names."""
    anatomy = split_into_units(gpumix.build(_deep(layers).build, 0))
    names = tuple(unit.name for unit in anatomy.units)
    stage = plan.stages[0].model_copy(update={"units": names})
    return plan.model_copy(update={"model": anatomy.fingerprint(), "stages": (stage,)})


# -- searches --------------------------------------------------------------------------------------

Found = dict[str, tuple[int, int]]  # layers and parameters by way


def _search(kind: str, profile: Profile) -> Found:
    every = len(TECHNIQUES)
    ways: dict[str, tuple[Planner, Profile]] = {
        "even": (_plan_even, profile),
        "fsdp2_offload": (_plan_offloaded, profile),
        "roundpipe": (partial(_plan_ours, every), _with_equal_cards(profile)),
        **{
            f"ours_{name}": (partial(_plan_ours, number), profile)
            for number, (name, _) in enumerate(TECHNIQUES, 1)
        },
    }
    found: Found = {}
    guess = PROFILED_LAYERS
    for name, (planner, of) in ways.items():
        layers = largest(
            lambda n, planner=planner, of=of: _planned(planner, _with_layers(of, n)) is not None,
            guess,
            MOST_LAYERS,
        )
        guess = max(1, layers)
        found[f"{kind}_{name}"] = _sized(profile, layers)
        print(f"{kind}, {name}: {layers} layers", file=sys.stderr, flush=True)
    found[f"{kind}_ours"] = found[f"{kind}_ours_{TECHNIQUES[-1][0]}"]
    return found


def _sized(profile: Profile, layers: int) -> tuple[int, int]:
    """Layers and all parameters, frozen ones included."""
    if not layers:
        return 0, 0
    model = profile.model
    kind = model.kind(model.kind_of_call[0])
    packed = 4.5 / 8  # bytes of a weight in NF4, with its constants
    plain = (kind.frozen_bytes - kind.packed_bytes) / 4
    of_layer = kind.trainable + kind.packed_bytes / packed + plain
    of_root = model.root.trainable + model.root.frozen_bytes / 4
    return layers, round(layers * of_layer + of_root)


def _with_equal_cards(profile: Profile) -> Profile:
    """All cards as RoundPipe takes them."""
    cluster = profile.cluster
    size = int(ROUNDPIPE_PART * min(c.memory_bytes for c in cluster.classes))
    classes = tuple(c.model_copy(update={"memory_bytes": size}) for c in cluster.classes)
    return profile.model_copy(update={"cluster": cluster.model_copy(update={"classes": classes})})


def _planned(planner: Planner, profile: Profile) -> Plan | None:
    try:
        return planner(profile)
    except NoFeasiblePlanError:
        return None


def _plan_even(profile: Profile) -> Plan:
    return plan_even(profile, PlanRequest(global_batch=BATCH, space=Space(**LEAST)))


def _plan_offloaded(profile: Profile) -> Plan:
    """Equal parts on all cards with all state in RAM, micro-batches of one sample."""
    devices = profile.cluster.in_rank_order()
    workers = tuple(
        Worker(
            device=device.id,
            device_class=device.device_class,
            samples=BATCH // len(devices),
            micro_batch=1,
            state_share=1 / len(devices),
            state_on="host",
        )
        for device in devices
    )
    plan = Plan(
        strategy="by hand",
        model=profile.model.fingerprint,
        sequence_length=SEQUENCE,
        global_batch=BATCH,
        stages=(Stage(units=profile.model.calls, workers=workers),),
        collectives=profile.collectives,
    )
    plan = plan.model_copy(update={"prediction": predict(profile, plan)})
    assert plan.prediction is not None
    if not is_within_memory(plan.prediction.workers) or _ram_of(plan) > RAM_BYTES:
        raise NoFeasiblePlanError("it does not fit")
    return plan


def _plan_ours(techniques: int, profile: Profile) -> Plan:
    allowed = dict(LEAST)
    for _, more in TECHNIQUES[:techniques]:
        allowed |= more
    return plan_one_stage(profile, PlanRequest(global_batch=BATCH, space=Space(**allowed)))


def _fsdp2_trains(layers: int) -> bool:
    ranks = len(CARDS.devices)
    each = BATCH // ranks
    return fits(fsdp_attempt(CARDS, Setting(_deep(layers), ranks, each, each, recompute=True)))


# -- figures ---------------------------------------------------------------------------------------


def _ratios(kind: str, found: Found, others: tuple[str, ...]) -> Figures:
    ours = found[f"{kind}_ours"][1]
    told: Figures = {}
    for name in others:
        elements = found[f"{kind}_{name}"][1]
        told[f"{kind}_vs_{name}"] = round(ours / elements, 3) if elements else None
    return told


def _ram_of(plan: Plan) -> int:
    assert plan.prediction is not None
    return sum(worker.host_bytes for worker in plan.prediction.workers)


def _show(found: Found) -> None:
    rows = [("way", "layers", "M parameters")]
    rows += [(name, str(n), f"{elements / 1e6:.1f}") for name, (n, elements) in found.items()]
    print(aligned(rows))


if __name__ == "__main__":
    sys.exit(main())
