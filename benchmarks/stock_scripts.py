"""Do training scripts, as people write them, give with one changed import what they gave before?

Each script of `scripts_of/scripts` is run as it is, in one process, with the stock `Trainer` of
`transformers`, `Accelerator`, `SFTTrainer` or Lightning; and with that one import changed on two or
three gloo ranks, by an uneven plan that is made by hand. Losses, norms, metrics, predictions and
saved weights of all that it reports have to agree within 1e-4 (low precision: as the script says).

    python benchmarks/stock_scripts.py [--json] [--only REGEX] [--part 2/5] [--list] [--out FILE]

Figures: `scripts`; of these `same`, `refused` before the first step with a way out, `different`,
`crashed` (any other end).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import common
from scripts_of.running import Script, scripts, try_script


def main() -> int:
    arguments = _arguments()
    chosen = chosen_of(scripts(), arguments.only, arguments.part)
    if arguments.list:
        print(*(script.name for script in chosen), sep="\n")
        return 0
    import_all()
    results = [_tried(script, arguments.out) for script in chosen]
    figures = figures_of(results)
    common.print_figures(figures, as_json=arguments.json)
    return int(bool(figures["different"] or figures["crashed"]))


def import_all() -> None:
    """What scripts import, once for all."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torchmetrics  # noqa: F401
    import transformers

    import gpumix.integrations.accelerate.accelerator
    import gpumix.integrations.lightning
    import gpumix.integrations.transformers
    import gpumix.integrations.trl  # noqa: F401

    for name in ("llama", "bert", "t5"):
        getattr(transformers, f"{name.capitalize()}Config")
        __import__(f"transformers.models.{name}.modeling_{name}")
    torch.set_num_threads(1)
    gc.freeze()  # children would copy the pages of what is collected


def _tried(script: Script, out: Path | None) -> dict[str, Any]:
    begun = time.perf_counter()
    found = {"name": script.name, **try_script(script)}
    found["seconds"] = round(time.perf_counter() - begun, 1)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    told = found.get("why", f"{found.get('error', 0):.0e}")
    words = f"{script.name}: {found['status']} {found['seconds']} s  {told}"
    print(words, file=sys.stderr, flush=True)
    return found


def figures_of(results: list[dict[str, Any]]) -> common.Figures:
    """Counts of scripts by what became of them."""
    counts = Counter(one["status"] for one in results)
    named = {status: counts[status] for status in ("same", "refused", "different")}
    return {"scripts": len(results), **named, "crashed": len(results) - sum(named.values())}


def chosen_of(every: list[Script], only: str, part: str) -> list[Script]:
    """Every so manieth of those whose name a regular expression finds."""
    number, parts = map(int, part.split("/"))
    return [one for one in every if re.search(only, one.name)][number - 1 :: parts]


def _arguments() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", default="", help="scripts whose name a regular expression finds")
    parser.add_argument("--part", default="1/1", help="every so manieth script: 2/5")
    parser.add_argument("--list", action="store_true", help="print names alone")
    parser.add_argument("--out", type=Path, help="file that gets one line of JSON for each script")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
