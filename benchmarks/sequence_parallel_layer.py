"""Tensor parallelism with sequence parallelism against without: memory, time, bytes.

A Llama of four layers is trained by two ranks (gloo, loopback, one thread each) in both ways, in
alternating rounds in the same processes; with recompute, and with graphs that are kept.

    python benchmarks/sequence_parallel_layer.py [--json] [--rounds 8]

Figures, of the divided way as a part of the other: `step_recomputed` and `step_kept`, seconds of a
step (medians); `activations_recomputed` and `activations_kept`, the most that a step holds beside
what is there before it; `bytes_recomputed`, what ranks give to collectives, a sum counting as the
reduction and the gather that it is.
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median

import torch
import torch.distributed as dist

import gpumix
from common import Figures, make_parser, print_figures
from gpumix.engine.engine import Engine
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from helpers.processes.harness import run_ranks
from helpers.training.models import causal_model
from helpers.training.reference import SEED

CLASS = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**32)
LAYERS, WIDTH, LENGTH, SAMPLES, VOCABULARY = 4, 256, 512, 2, 512
WARM_UP = 2
MODES = {"recomputed": Mode(), "kept": Mode(recompute=False)}
llama = causal_model(
    "LlamaConfig",
    hidden_size=WIDTH,
    intermediate_size=3 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
)
Measured = dict[bool, tuple[float, int, int]]
"""By whether the sequence is divided: seconds, bytes held, bytes given, of a step."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    figures: Figures = {}
    for name in MODES:
        found: Measured = run_ranks(_measured, 2, name, arguments.rounds)[0]
        step, held, given = (divided / whole for divided, whole in zip(found[True], found[False]))
        figures[f"step_{name}"], figures[f"activations_{name}"] = step, held
        if name == "recomputed":
            figures["bytes_recomputed"] = given
    print_figures(figures, as_json=arguments.json)


def _measured(mode: str, rounds: int) -> Measured:
    """On a rank."""
    torch.set_num_threads(1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    held, given = {}, {}
    with open_device(CLASS, 0) as runtime:
        engines = {way: _engine(MODES[mode], sequence=way) for way in (False, True)}
        for _ in range(WARM_UP + rounds):
            for way, engine in engines.items():
                dist.barrier()
                seconds[way].append(_step_s(engine))
        for way, engine in engines.items():
            held[way], given[way] = _held(engine, runtime)
    return {way: (median(seconds[way][WARM_UP:]), held[way], given[way]) for way in engines}


def _engine(mode: Mode, *, sequence: bool) -> Engine:
    model = gpumix.build(llama, SEED)
    units = tuple(f"model.layers.{number}" for number in range(LAYERS))
    workers = tuple(
        Worker(
            device=f"d{rank}",
            device_class="cpu",
            samples=SAMPLES,
            micro_batch=SAMPLES,
            state_share=1.0,
            mode=mode,
        )
        for rank in range(2)
    )
    plan = Plan(
        strategy="by hand",
        model=split_into_units(model).fingerprint(),
        sequence_length=LENGTH,
        global_batch=SAMPLES,
        zero_stage=0,
        stages=(Stage(units=units, workers=workers, tensor=2, sequence=sequence),),
    )
    return prepare(model, plan)


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _step_s(engine: Engine) -> float:
    batch, begun = _batch(), time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - begun


def _held(engine: Engine, runtime: DeviceRuntime) -> tuple[int, int]:
    """Bytes that a step holds beside what is there, and bytes that it gives to collectives."""
    before, sizes = runtime.current_bytes(), engine.comm.bytes.copy()
    runtime.reset_peak()
    engine.step(_batch())
    given: Counter[str] = engine.comm.bytes - sizes
    peak = runtime.peak_bytes()
    assert peak is not None and before is not None, "memory of CPUs is counted"
    weights = {"all_reduce": 2, "reduce": 1, "exchange": engine.comm.world}
    return peak - before, sum(weights[name] * size for name, size in given.items())


if __name__ == "__main__":
    main()
