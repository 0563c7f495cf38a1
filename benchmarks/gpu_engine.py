"""The comparisons of `engine_equal.py` on the GPUs of this host, in bf16.

With several GPUs: one rank on each, over NCCL, the engine at each ZeRO stage beside DDP and FSDP2.
In any case one rank beside a plain loop and FSDP2. Where there is one GPU, two ranks share it, each
with half of its memory, over gloo; if something cannot do that, it is said. DDP and the plain loop
compute in bf16 by autocast, FSDP2 by its mixed precision policy, the engine by its plan; so losses
differ by roundings.

    python benchmarks/gpu_engine.py [--json] [--rounds 5] [--steps 4] [--cpu]

`--layers 0`: as many as the memory holds with all systems side by side, 24 at most. `--cpu` runs a
tiny model on the CPU, to try the script. Figures: `gpus`, and those of `engine_equal.py` by
wall-clock time, with `shared_` before them for ranks that share a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product

import torch

from common import Figures, print_figures
from compared.rounds import Clock, Results, Study
from compared.setting import Model, Setting
from compared.systems import Ddp, Entrant, Fsdp, Plain
from engine_equal import ACCUMULATION, figures_of, others, ours, show, show_where
from gpumix.spec.errors import GpumixError
from gpumix.spec.stage import ComputeDtype

SYSTEMS = 11  # at the most, side by side
MOST_LAYERS = 24
STATE_BYTES = 16  # of a parameter, with its gradient and moments, and some of it gathered
TINY = Model(width=64, layers=2, vocabulary=256, sequence=16)


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    if not gpus and not arguments.cpu:
        print("torch sees no GPU here: nothing was measured (--cpu tries the script)")
        print_figures({"gpus": 0}, as_json=arguments.json)
        return
    model = TINY if arguments.cpu else _model(arguments.width, arguments.layers)
    print(_told(model, gpus))
    studies = list(_studies(model, gpus, arguments))
    every = [results for study in studies if (results := _results(study)) is not None]
    clock: Clock = "wall"
    for results in every:
        show(results, clock)
    show_where(every)
    alike = [r for r in every if not _shares(r.study, gpus)]
    shared = [r for r in every if _shares(r.study, gpus)]
    clocks = {r.study.setting.world: clock for r in every}
    figures: Figures = {"gpus": gpus}
    figures |= figures_of(alike, clocks) if alike else {}
    figures |= {f"shared_{n}": v for n, v in figures_of(shared, clocks).items()} if shared else {}
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per system and round")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--samples", type=int, default=8, help="of each rank in a step")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=0, help="0: as the memory allows")
    return parser.parse_args()


def _model(width: int, layers: int) -> Model:
    """A Llama; all systems' copies of it fill about half of the smallest GPU, so that activations
    have the other half."""
    smallest = min(
        torch.cuda.get_device_properties(gpu).total_memory
        for gpu in range(torch.cuda.device_count())
    )
    of_layer = 12.25 * width**2 * STATE_BYTES * SYSTEMS
    fitting = int(0.5 * smallest / of_layer)
    chosen = layers or max(2, min(fitting, MOST_LAYERS))
    return Model(width=width, layers=chosen, vocabulary=8192, sequence=512)


def _studies(model: Model, gpus: int, arguments: argparse.Namespace) -> Iterator[Study]:
    dtype: ComputeDtype = arguments.precision
    worlds = (1, max(2, gpus))
    for world, recompute, micro_batches in product(worlds, (True, False), (1, ACCUMULATION)):
        setting = Setting(model, world, arguments.samples, micro_batches, recompute, dtype)
        entrants = list(ours(setting))
        if not entrants:
            continue
        on_nccl = world <= gpus
        compared: tuple[Entrant, ...] = others(setting)
        if world == 1:
            compared = (Plain(), Fsdp(reshard=True))
        elif not on_nccl and gpus:
            compared = (Ddp(),)  # FSDP2 needs of gloo what it has not for tensors on GPUs
        yield Study(
            setting,
            (*compared, *entrants),
            arguments.rounds,
            arguments.steps,
            device="cuda" if gpus else "cpu",
            backend="nccl" if on_nccl else "gloo",
        )


def _results(study: Study) -> Results | None:
    """None, and why, where the ranks could not do it."""
    try:
        return Results.of(study)
    except GpumixError as error:
        print(f"{study.setting}, {study.device} over {study.backend}: failed: {error}")
        return None


def _shares(study: Study, gpus: int) -> bool:
    return 0 < gpus < study.setting.world


def _told(model: Model, gpus: int) -> str:
    names = {torch.cuda.get_device_name(gpu) for gpu in range(gpus)} or {"the CPU"}
    return f"{max(gpus, 1)} x {', '.join(sorted(names))}, torch {torch.__version__}; {model}"


if __name__ == "__main__":
    main()
