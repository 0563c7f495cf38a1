"""Do model classes that nobody here wrote train as under stock libraries, or say why not?

Every class with a head in the registry of `transformers`, and modules of plain torch, `timm` and
`diffusers` as far as they are installed, is made small, is given data that fits its forward, and is
trained for three steps: by the Trainer of `transformers` in one process, and by that of gpumix

    A  on two ranks of unlike shares, ZeRO 3, ends of the root apart as the planner puts them
    B  on three ranks, ZeRO 0, 1 or 2 by the class's place in the list; one stores nothing
    C  in two pipeline stages

with the same values, data and AdamW. Losses of all steps, gradients of the first and weights at the
end have to agree within 1e-4; or training has to be refused before its first step, with a way out.

    python benchmarks/zoo.py [--json] [--only REGEX] [--part 3/8] [--plans A,B,C] [--list]
        [--out FILE]    one line of JSON for each class; classes in it are not tried again

Figures: `classes` that torch trains deterministically; of these `exact` (A and B),
`refused_before_training`, `refused_without_reason` (without a way out), `deviates_silently`,
`crashed` (any other error, or no end in time); `exact_staged` (C). Beside them `not_deterministic`
(as a second run, or one in float64, shows) and `not_built`, for which no
small configuration or no input was found.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import common
from zoo_of.classes import Entry, entries
from zoo_of.running import try_class


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    chosen = _chosen(arguments)
    if arguments.list:
        print(*(entry.name for _, entry in chosen), sep="\n")
        return 0
    done = _read(arguments.out)
    for number, entry in chosen:
        if entry.name not in done:
            done[entry.name] = _tried(number, entry, arguments)
    results = [done[entry.name] for _, entry in chosen]
    figures = figures_of(results)
    common.print_figures(figures, as_json=arguments.json)
    return int(bool(figures["deviates_silently"] or figures["crashed"]))


def _tried(number: int, entry: Entry, arguments: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    found = try_class(number, entry, arguments.plans.replace(",", ""))
    found |= {"name": entry.name, "seconds": round(time.perf_counter() - begun, 1)}
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    plans = " ".join(f"{kind}: {own['verdict']}" for kind, own in found.get("plans", {}).items())
    why = found.get("why", "")[:150]
    print(f"{entry.name}: {found['status']} {plans} {why}".rstrip(), file=sys.stderr, flush=True)
    return found


def figures_of(results: list[dict[str, Any]]) -> common.Figures:
    """Counts of classes by what became of them."""
    counts = Counter(one["status"] for one in results)
    left_out = counts["not built"] + counts["not deterministic"]
    staged = (one.get("plans", {}).get("C", {}).get("verdict") for one in results)
    return {
        "classes": len(results) - left_out,
        "exact": counts["exact"],
        "exact_staged": sum(verdict == "exact" for verdict in staged),
        "refused_before_training": counts["refused"] + counts["refused without reason"],
        "refused_without_reason": counts["refused without reason"],
        "deviates_silently": counts["deviates"],
        "crashed": counts["crashed"] + counts["broken"],  # broken: this walk itself
        "not_deterministic": counts["not deterministic"],
        "not_built": counts["not built"],
    }


def _chosen(arguments: argparse.Namespace) -> list[tuple[int, Entry]]:
    """With their places in the whole list."""
    part, parts = map(int, arguments.part.split("/"))
    every = [one for one in enumerate(entries()) if re.search(arguments.only, one[1].name)]
    return every[part - 1 :: parts]


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one["name"]: one for one in map(json.loads, lines)}


def _arguments() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", default="", help="classes whose name a regular expression finds")
    parser.add_argument("--part", default="1/1", help="every so manieth class: 3/8")
    parser.add_argument("--plans", default="A,B,C")
    parser.add_argument("--list", action="store_true", help="print names alone")
    parser.add_argument("--out", type=Path, help="file of results, gone on with if it is there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
