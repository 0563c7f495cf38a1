"""Show what happens to documents of unlike length: padding, packs, work of two unequal ranks.

    python examples/packing.py

The documents are the lines of this repository's pages. A job chooses with `data.packing` and
`data.bucketing`; this script prints the samples of a few steps and trains nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gpumix
from gpumix.data.sources.open_data import open_data
from gpumix.schema.reading.read import read_job

JOB = Path(__file__).with_name("gpt2-text.yaml")
SHARES, STEPS = [24, 8], 20  # the first rank is three times as fast
WAYS = {
    "each line padded": ["data.packing=none"],
    "lines of like length together": ["data.packing=none", "data.bucketing=true"],
    "whole lines packed": ["data.packing=documents"],
}


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for name, settings in WAYS.items():
            job = read_job(JOB, ["data.document=line", *settings])
            lines, _ = open_data(job, JOB.parent, Path(cache))
            by_length = gpumix.ByLength(bucketing=job.data.bucketing)
            tokens, places = zip(*(count(lines, rank, by_length) for rank in range(len(SHARES))))
            padding = 1 - sum(tokens) / sum(places)
            fast, slow = (of_rank / share for of_rank, share in zip(tokens, SHARES))
            print(
                f"{name}: {len(lines)} samples, {padding:.1%} padding, for its speed the fast rank "
                f"has {fast / slow:.2f} times the tokens of the slow one"
            )


def count(lines: object, rank: int, by_length: gpumix.ByLength) -> tuple[int, int]:
    """A rank's tokens, and places for tokens, of some steps."""
    tokens = places = 0
    with gpumix.Loader(lines, SHARES, rank, by_length=by_length) as loader:
        for _ in range(STEPS):
            batch = next(loader)
            places += batch["input_ids"].numel()
            counted = batch["labels"] != -100  # not padding, nor a packed document's first token
            tokens += int(counted.sum())
            if "position_ids" in batch:
                tokens += int((counted & (batch["position_ids"] == 1)).sum())  # those first ones
    return tokens, places


if __name__ == "__main__":
    main()
