"""What packing and dealing by length save: padding, and waits of unequal devices for each other.

Documents are drawn with lognormal lengths, and are the files of Python's own library. Nothing of
it is emulated: shares of padding and imbalances are counted over steps, a sample's cost being
`len + len**2 / (6 * 768)`, its rank's speed 4, 2, 1 and 1.

    python benchmarks/packing.py [--json]

Figures, each with `_files` for the library's files:
`padding_share_unpacked` (every document padded to a sample), `padding_share_as_they_come`,
`padding_share_balanced` and `padding_share_bucketed` (to the longest of its micro-batch),
`padding_share_packed`;
`token_imbalance_by_count` (contiguous shares, as many samples as a rank is fast: how much longer
the last rank takes than the mean), `token_imbalance_balanced` (the same counts, dealt by cost),
`token_imbalance_bucketed` (that, and samples of like length in a batch).
`worst_loss_difference` is that of the real engine on three uneven ranks, packed, against plain
PyTorch on the same documents one by one, over three models; `worst_loss_difference_padded` of
padded ones. `pack_1e6_s` of one core pack a million documents.
"""

from __future__ import annotations

import sysconfig
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from common import Figures, make_parser, print_figures
from compared.curves import worst_difference
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.data.order.balance_by_length import compute_costs
from gpumix.data.order.global_order import Cursor, GlobalOrder
from gpumix.data.order.sampler import ByLength, RankSampler
from gpumix.data.sources.documents import TokenFileDocuments
from gpumix.data.text.files import pack_text
from gpumix.data.text.first_fit import pack_first_fit
from gpumix.engine.model.deferred_init import build
from gpumix.hardware.host.environment import cache_folder
from gpumix.schema.job.job import DataSpec
from helpers.training.documents import STEPS, documents, one_by_one, packs, trained
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, Share, plan_for

SPEEDS = (4, 2, 1, 1)
BATCH, MICRO_BATCH = 256, 8
COUNTS = tuple(BATCH * speed // sum(SPEEDS) for speed in SPEEDS)
ATTENTION = 1 / (6 * 768)
DEALT = ByLength(attention=ATTENTION)
BUCKETED = ByLength(bucketing=True, attention=ATTENTION)
UNEVEN = [Share(4, 2, 1), Share(1, 1, 0), Share(3, 3, 2)]


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(5.5, 1.0, 100_000)
    figures = lengths_figures(drawn.clip(2, 2048).astype(np.int32), 2048)
    of_files = lengths_figures(*files())
    figures |= {f"{name}_files": value for name, value in of_files.items()}
    figures["worst_loss_difference"] = max(map(packed_difference, ("gpt2", "llama", "qwen3")))
    figures["worst_loss_difference_padded"] = padded_difference("qwen3")
    figures["pack_1e6_s"] = packing_s()
    print_figures(figures, as_json=arguments.json)


def files(longest: int = 16384) -> tuple[np.ndarray, int]:
    """Lengths, in bytes, of the files of Python's library."""
    spec = DataSpec(text=(Path(sysconfig.get_path("stdlib")),), pattern="*.py", packing="none")
    text = pack_text(spec, ByteTokenizer(), longest, cache_folder() / "tokens")
    lengths = TokenFileDocuments(text, pad_token=0).lengths
    print(f"{len(lengths)} documents of {lengths.sum()} bytes in {spec.text[0]}")
    return lengths, longest


# -- counted ---------------------------------------------------------------------------------------


def lengths_figures(lengths: np.ndarray, longest: int) -> Figures:
    packed = pack_first_fit(lengths, longest, seed=0)
    total = int(lengths.sum(dtype=np.int64))
    return {
        "documents": len(lengths),
        "padding_share_unpacked": round(1 - total / (len(lengths) * longest), 4),
        "padding_share_as_they_come": padding(lengths, in_turn(lengths)),
        "padding_share_balanced": padding(lengths, dealt(lengths, DEALT)),
        "padding_share_bucketed": padding(lengths, dealt(lengths, BUCKETED)),
        "padding_share_packed": round(1 - total / (len(packed) * longest), 4),
        "token_imbalance_by_count": imbalance(lengths, in_turn(lengths)),
        "token_imbalance_balanced": imbalance(lengths, dealt(lengths, DEALT)),
        "token_imbalance_bucketed": imbalance(lengths, dealt(lengths, BUCKETED)),
    }


Steps = list[list[np.ndarray]]
"""Of each step, of each rank, its samples."""


def in_turn(lengths: np.ndarray) -> Steps:
    """Contiguous shares of the global order."""
    order = GlobalOrder(len(lengths), 0)
    ends = np.cumsum([0, *COUNTS])
    batches = (order.span(BATCH * n, BATCH * (n + 1)) for n in range(len(lengths) // BATCH))
    return [[batch[begin:end] for begin, end in pairwise(ends)] for batch in batches]


def dealt(lengths: np.ndarray, by_length: ByLength) -> Steps:
    cursor = Cursor(0, len(lengths), "")
    courses = [
        RankSampler(cursor, COUNTS, rank, lengths=lengths, by_length=by_length)
        for rank in range(len(COUNTS))
    ]
    firsts = range(0, len(lengths) // BATCH * BATCH, BATCH)
    return [[course.indices(first) for course in courses] for first in firsts]


def imbalance(lengths: np.ndarray, steps: Steps) -> float:
    """How much longer the last rank takes than the mean, over all steps."""
    worst = [
        max(times) / np.mean(times)
        for times in (
            [compute_costs(lengths[own], ATTENTION).sum() / v for own, v in zip(step, SPEEDS)]
            for step in steps
        )
    ]
    return round(float(np.mean(worst)), 4)


def padding(lengths: np.ndarray, steps: Steps) -> float:
    """The part of what is computed, each micro-batch being as wide as its longest sample."""
    used, computed = 0, 0
    for own in (own for step in steps for own in step):
        for first in range(0, len(own), MICRO_BATCH):
            part = lengths[own[first : first + MICRO_BATCH]]
            used, computed = used + int(part.sum()), computed + int(part.max()) * len(part)
    return round(1 - used / computed, 4)


def packing_s() -> float:
    lengths = np.random.default_rng(1).lognormal(5.5, 1.0, 1_000_000).clip(2, 2048).astype(np.int32)
    times = []
    for _ in range(3):
        begun = time.process_time()
        pack_first_fit(lengths, 2048, seed=0)
        times.append(time.process_time() - begun)
    return round(sorted(times)[1], 3)


# -- trained ---------------------------------------------------------------------------------------


def packed_difference(name: str) -> float:
    source = packs(name, 90)
    plan = plan_for(build(ARCHITECTURES[name].factory, SEED), UNEVEN, zero_stage=3)
    found, _, read = trained(source, name, plan, ByLength())
    batches = [
        np.concatenate([source.documents_in(k) for own in read for k in own[step]])
        for step in range(STEPS)
    ]
    held_out = np.concatenate([source.documents_in(k) for k in range(8)])
    wanted, _ = one_by_one(name, documents(name, 90), batches, held_out)
    return worst_difference(found.losses, wanted.losses)


def padded_difference(name: str) -> float:
    source = documents(name, 90)
    plan = plan_for(build(ARCHITECTURES[name].factory, SEED), UNEVEN, zero_stage=3)
    found, _, read = trained(source, name, plan, ByLength(bucketing=True, attention=0.02))
    batches = [np.array([k for own in read for k in own[step]]) for step in range(STEPS)]
    wanted, _ = one_by_one(name, source, batches, np.arange(8))
    return worst_difference(found.losses, wanted.losses)


if __name__ == "__main__":
    main()
