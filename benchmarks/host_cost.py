"""What a step costs the host: CPU time of the engine against FSDP2 and against a plain loop.

A Llama of 24 tiny blocks trains in fp32 with fused AdamW, so that a step is almost nothing but
Python and dispatch. The engine at ZeRO stage 3 in layered order, FSDP2 in all its forms, and on one
rank a plain loop live in the same processes and take turns. The cost of a step is the CPU time of
all ranks and all their threads, per rank, block and micro-batch.

    python benchmarks/host_cost.py [--json] [--rounds 20] [--steps 2] [--ranks 1 2]
        [--micro-batches 1 4] [--recompute both]

Figures (ratios are ours over theirs, medians over rounds):

- `worst_vs_fsdp2` over ranks, micro-batches, with and without recompute: against the cheapest form
  of FSDP2 that shards parameters, gradients and optimizer state, with gathers ahead of use or
  without, and gradients exchanged once a step or once a micro-batch. `worst_vs_any_fsdp2`: against
  the cheapest of all forms, also of those that keep whole parameters until the step's end.
- `worst_vs_plain`: on one rank, graphs kept.
- `growth_64_to_10240`: the CPU time in which a rank prepares a collective among 10,240 ranks over
  that among 64, without copies of the buffer. The process group is a fake one, which sends
  nothing.
- `look_up_ms`: the longest look-up in a plan for 10,240 ranks, after the first.
- `host_waits`: how often one `engine.step` makes the host wait for its device; null, with
  `host_waits_reason`, where no device can be made to count on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

from common import Figures, make_parser, print_figures
from compared.preparation import growths, look_ups_s
from compared.rounds import Results, Study
from compared.setting import Model, Setting
from compared.systems import Entrant, Fsdp, Gpumix, Plain
from compared.waits import waits_on_device
from emulated.results import aligned

BLOCKS = 24
OURS = Gpumix(3)
PLAIN = Plain()
BARS = {
    "worst_vs_fsdp2": 0.60,
    "worst_vs_plain": 1.25,
    "growth_64_to_10240": 1.5,
    "look_up_ms": 1.0,
    "host_waits": 0,
}


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    every = []
    for setting in _settings(arguments):
        entrants = (OURS, *_forms_of_fsdp2(setting), *([PLAIN] if setting.world == 1 else []))
        every.append(Results.of(Study(setting, entrants, arguments.rounds, arguments.steps)))
        _show(every[-1])
    figures = _figures(every) | growths()
    look_ups_ms = {name: round(1e3 * seconds, 4) for name, seconds in look_ups_s().items()}
    figures |= {f"look_up_ms_{name}": ms for name, ms in look_ups_ms.items()}
    figures["look_up_ms"] = max(look_ups_ms.values())
    figures["host_waits"], figures["host_waits_reason"] = waits_on_device()
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)
    missed = [
        f"{name} is {figures[name]}, more than {bar}"
        for name, bar in BARS.items()
        if (found := figures.get(name)) is not None and float(found) > bar
    ]
    print(*missed, sep="\n", end="\n" * bool(missed), file=sys.stderr)
    return int(bool(missed))


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps per system and round")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recompute", choices=("both", "on", "off"), default="both")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    model = Model(width=64, layers=BLOCKS, vocabulary=256, sequence=16)
    recompute = {"both": (False, True), "on": (True,), "off": (False,)}[arguments.recompute]
    for world, number, again in product(arguments.ranks, arguments.micro_batches, recompute):
        yield Setting(model, world, samples=number, micro_batches=number, recompute=again)


def _forms_of_fsdp2(setting: Setting) -> Iterator[Fsdp]:
    """All that can differ in CPU time: gathers ahead of use only where there is another rank."""
    for reshard, whole, ahead in product((True, False), (False, True), (True, False)):
        if (setting.world == 1 and ahead) or (setting.micro_batches == 1 and whole):
            continue
        yield Fsdp(reshard, whole_gradients=whole, ahead=ahead)


def _cost_us(results: Results, entrant: Entrant) -> float:
    """CPU microseconds of a step per rank, block and micro-batch."""
    setting = results.study.setting
    parts = setting.world * setting.micro_batches * setting.model.layers
    return 1e6 * median(results.step_s(entrant.name, "cpu")) / parts


def _over(results: Results, theirs: Sequence[Entrant]) -> float:
    """Our cost over that of the cheapest of `theirs`."""
    cheapest = min(theirs, key=lambda entrant: _cost_us(results, entrant))
    return 1 / results.ratio(OURS.name, cheapest.name, "cpu").median


def _ratios(results: Results) -> dict[str, float]:
    """Our cost over that of each kind of system in this setting."""
    forms = [entrant for entrant in results.study.entrants if isinstance(entrant, Fsdp)]
    ratios = {
        "vs_fsdp2": _over(results, [form for form in forms if form.reshard]),
        "vs_any_fsdp2": _over(results, forms),
    }
    setting = results.study.setting
    if PLAIN in results.study.entrants and not setting.recompute:
        ratios["vs_plain"] = _over(results, [PLAIN])
    return ratios


def _name(setting: Setting) -> str:
    kept = "recompute" if setting.recompute else "kept"
    return f"{setting.world}_ranks_{setting.micro_batches}_micro_batches_{kept}"


def _figures(every: Sequence[Results]) -> Figures:
    figures: Figures = {}
    worst: dict[str, float] = {}
    for results in every:
        name = _name(results.study.setting)
        figures[f"us_{name}"] = round(_cost_us(results, OURS), 1)
        for kind, ratio in _ratios(results).items():
            figures[f"{name}_{kind}"] = round(ratio, 4)
            worst[kind] = max(ratio, worst.get(kind, 0.0))
    ends: Figures = {f"worst_{kind}": round(ratio, 4) for kind, ratio in worst.items()}
    ends["worst_loss_difference"] = max(results.worst_loss_difference for results in every)
    return figures | ends


def _show(results: Results) -> None:
    """One row per system: its cost, and ours over it."""
    rows = [("system", "CPU us per rank, block and micro-batch", "ours over it")]
    for entrant in results.study.entrants:
        rows.append(
            (
                entrant.name,
                f"{_cost_us(results, entrant):.0f}",
                f"{_over(results, [entrant]):.3f}",
            )
        )
    print(f"\n{results.study.setting}")
    print(aligned(rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
