"""Whether the engine is ever slower than DDP and FSDP2 on equal devices, or than a plain loop.

A Llama of 10.6 M parameters trains on 2 and 4 CPU ranks (gloo on loopback, one thread each) with
fused AdamW, with and without recompute, with and without accumulation over 4 micro-batches. DDP,
FSDP2 in its forms, and the engine at each ZeRO stage live in the same processes and take turns; a
ratio is the median over rounds of one turn by another. Then one rank against a plain loop.

    python benchmarks/engine_equal.py [--json] [--rounds 20] [--steps 1] [--ranks 2 4]
        [--clock auto]

Baselines in their fastest setting for what they keep: DDP exchanges gradients in the last
micro-batch alone, FSDP2 in each or in the last one, weights resharded after forward or kept in the
step, the root's always kept between forward and backward, gathers ahead of use.

Each stage is compared with DDP and with that form of FSDP2 which keeps as much: stage 3 with all
sharded, 2 with the parameters kept during a step, 1 and 0 with whole gradients too. Where a stage
has two orders, the faster one counts: a plan chooses. On one rank stages mean nothing, and the
fastest counts. Ratios are ours over theirs in tokens/s; 1 or more is as fast.

`--clock`: wall-clock time, or the CPU time of all ranks, which does not see waiting; `auto` takes
wall-clock time where every rank has a core. Both are shown; the figures are of the one that
`clock_N_ranks` names.

Figures: `worst_vs_fsdp2`, `worst_vs_ddp` over ranks, stages, recompute, accumulation;
`accumulation_vs_fsdp2`: the layered order at stage 3, 4 micro-batches, the worst one against the
fully sharded FSDP2 (`accumulation_vs_fsdp2_whole_gradients`: against one that keeps all gradients);
`worst_vs_best_of_any_form`: against the fastest of all, whatever it keeps; `one_rank_vs_plain`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from itertools import product

from common import Figures, make_parser, print_figures
from compared.rounds import Clock, Results, Study
from compared.setting import Model, Order, Setting
from compared.systems import Ddp, Entrant, Fsdp, Gpumix, Plain
from compared.where import where_time_goes
from emulated.results import aligned
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.units import show_bytes

STAGES: tuple[ZeroStage, ...] = (3, 2, 1, 0)
ORDERS: tuple[Order, ...] = ("layered", "sequential")
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")
ACCUMULATION = 4
DDP, PLAIN = Ddp(), Plain()
SHARDED = Fsdp(reshard=True)
SUMMED = Fsdp(reshard=True, whole_gradients=True)


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    model = Model(
        arguments.model, width=arguments.width, layers=arguments.layers, sequence=arguments.sequence
    )
    every = [
        Results.of(Study(setting, (*others(setting), *ours()), arguments.rounds, arguments.steps))
        for setting in _settings(model, arguments)
    ]
    clocks: dict[int, Clock] = {n: _clock(n, arguments.clock) for n in (1, *arguments.ranks)}
    for results in every:
        show(results, clocks[results.study.setting.world])
    show_where(every)
    for clock in CLOCKS:
        print(f"by {clock} time: {figures_of(every, dict.fromkeys(clocks, clock))}")
    figures = figures_of(every, clocks) | {f"clock_{n}_ranks": c for n, c in clocks.items()}
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1, help="steps per system and round")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--clock", choices=("auto", "wall", "cpu"), default="auto")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, ACCUMULATION])
    parser.add_argument("--recompute", choices=("both", "on", "off"), default="both")
    parser.add_argument("--samples", type=int, default=4, help="of each rank in a step")
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128)
    return parser.parse_args()


def _settings(model: Model, arguments: argparse.Namespace) -> Iterator[Setting]:
    recompute = {"both": (True, False), "on": (True,), "off": (False,)}[arguments.recompute]
    for world, again, micro_batches in product(
        (1, *arguments.ranks), recompute, arguments.micro_batches
    ):
        yield Setting(model, world, arguments.samples, micro_batches, again)


def others(setting: Setting) -> tuple[Entrant, ...]:
    """What the engine is compared with."""
    if setting.world == 1:
        return (PLAIN,)
    forms = [Fsdp(reshard) for reshard in (True, False)]
    if setting.micro_batches > 1:
        forms += [Fsdp(reshard, whole_gradients=True) for reshard in (True, False)]
    return (DDP, *forms)


def ours() -> Iterator[Gpumix]:
    """The engine's stages and orders."""
    for stage, order in product(STAGES, ORDERS):
        if order == "sequential" and stage > 1:
            continue  # it would gather again for every micro-batch
        yield Gpumix(stage, order)


def _like(stage: ZeroStage, setting: Setting) -> Fsdp:
    """The form of FSDP2 that keeps as much as a ZeRO stage."""
    return Fsdp(reshard=stage == 3, whole_gradients=stage <= 1 and setting.micro_batches > 1)


def _clock(world: int, wanted: str) -> Clock:
    if wanted == "auto":
        return "wall" if world <= len(os.sched_getaffinity(0)) else "cpu"
    return "cpu" if wanted == "cpu" else "wall"


def _best(results: Results, stage: ZeroStage | None, clock: Clock) -> Gpumix | None:
    """The fastest of ours, of a stage or of all."""
    ours = [e for e in results.study.entrants if isinstance(e, Gpumix)]
    possible = [e for e in ours if stage is None or e.zero_stage == stage]
    return max(possible, key=lambda e: results.tokens_per_s(e.name, clock), default=None)


def figures_of(every: Sequence[Results], clocks: dict[int, Clock]) -> Figures:
    """What comes of all settings; what was not measured is left out."""
    found: dict[str, list[float]] = {}

    def note(name: str, results: Results, ours: Entrant | None, theirs: Entrant) -> None:
        known = results.study.entrants
        if ours is None or ours not in known or theirs not in known:
            return
        clock = clocks[results.study.setting.world]
        found.setdefault(name, []).append(results.ratio(ours.name, theirs.name, clock).median)

    for results in every:
        setting = results.study.setting
        clock = clocks[setting.world]
        if setting.world == 1:
            note("one_rank_vs_plain", results, _best(results, None, clock), PLAIN)
            continue
        theirs = [e for e in results.study.entrants if not isinstance(e, Gpumix)]
        best_other = max(theirs, key=lambda e: results.tokens_per_s(e.name, clock))
        for stage in STAGES:
            mine = _best(results, stage, clock)
            note("worst_vs_fsdp2", results, mine, _like(stage, setting))
            note("worst_vs_ddp", results, mine, DDP)
            note("worst_vs_best_of_any_form", results, mine, best_other)
        if setting.micro_batches > 1:
            for name, other in (
                ("accumulation_vs_fsdp2", SHARDED),
                ("accumulation_vs_fsdp2_whole_gradients", SUMMED),
            ):
                note(name, results, Gpumix(3), other)
    figures: Figures = {name: round(min(ratios), 4) for name, ratios in found.items()}
    figures["worst_loss_difference"] = max(r.worst_loss_difference for r in every)
    return figures


def show(results: Results, clock: Clock) -> None:
    """One row per system: speeds by both clocks, and ours against each baseline."""
    theirs = [e for e in results.study.entrants if not isinstance(e, Gpumix)]
    headings = ("system", "tokens/s", "tokens per CPU s", "peak")
    rows = [(*headings, *(f"vs {e.name}" for e in theirs))]
    for entrant in results.study.entrants:
        speeds = (f"{results.tokens_per_s(entrant.name, c):.0f}" for c in CLOCKS)
        peak = results.peak_bytes(entrant.name)
        ratios = ["" for _ in theirs]
        if isinstance(entrant, Gpumix):
            ratios = [str(results.ratio(entrant.name, e.name, clock)) for e in theirs]
        known = "" if peak is None else show_bytes(peak)
        rows.append((entrant.name, *speeds, known, *ratios))
    print(f"\n{results.study.setting}; ratios by {clock} time: median over rounds (quartiles)")
    print(aligned(rows), flush=True)


def show_where(every: Sequence[Results]) -> None:
    recorded = {
        f"{results.study.setting}: {entrant.name}": results.recordings(entrant.name)
        for results in every
        for entrant in results.study.entrants
        if isinstance(entrant, Gpumix)
    }
    print(f"\nwhere the time of one step goes\n{where_time_goes(recorded)}\n")


if __name__ == "__main__":
    main()
