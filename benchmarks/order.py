"""Is the sequence of samples the same whoever reads it, and whatever happens on the way?

The samples of a run, and what they draw at random, are hashed over 1 to 4 ranks with equal and
unequal shares and plans of stages, 0 to 4 workers that are threads or processes, a resume in
mid-epoch on other ranks, a new plan in mid-run, and workers that are killed: numbers, samples of
unlike length that are bucketed, and streams. Of each there should be one hash; that of the order
itself, read by nobody's loader, is the truth.

    python benchmarks/order.py --json
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

import common
from gpumix.data.core import sample_rng
from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.order.length_buckets import BucketedOrder
from gpumix.data.order.sampler import DEFAULT_BY_LENGTH, ByLength
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.workers.worker_pool import Kind, ProcessWorkerPool
from gpumix.schema.plan.batch_shares import Shares
from gpumix.schema.plan.plan import Plan
from helpers.training.staging import rows, staged_plan

SAMPLES, BATCH, STEPS, SEED = 997, 24, 60, 3  # more than an epoch
SHARES = ((24,), (12, 12), (17, 7), (8, 8, 8), (20, 0, 4), (6, 6, 6, 6), (15, 5, 3, 1))
FEW_SHARES = ((24,), (17, 7), (20, 0, 4))
WORKERS: tuple[tuple[int, Kind], ...] = (
    *((0, "threads"), (1, "threads"), (3, "threads")),
    *((1, "processes"), (2, "processes"), (4, "processes")),
)
FEW_WORKERS: tuple[tuple[int, Kind], ...] = ((0, "threads"), (3, "processes"))
EVENTS = ("nothing", "resume", "replan", "killed")
BY_LENGTH = ByLength(bucketing=True, attention=0.01, window_batches=5)

Row = tuple[float, ...]


def drawn() -> torch.Tensor:
    """What a sample draws from each generator that it may draw from."""
    own = torch.rand((), generator=sample_rng.sample_generator())
    values = [random.random(), np.random.randn(), float(torch.rand(())), float(own)]
    return torch.tensor(values, dtype=torch.float64)


class Numbers:
    """Sample k is k, a number that goes by it, and what it draws."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"k": k, "drawn": drawn()}


class Unlike(Numbers):
    """Sample k has so many tokens."""

    lengths = np.random.default_rng(0).integers(1, 30, SAMPLES)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"input_ids": torch.full((int(self.lengths[k]),), k + 1), "drawn": drawn()}


def stream() -> Iterator[dict[str, Any]]:
    yield from ({"k": k} for k in range(SAMPLES))


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": drawn()}


class Shards:
    """A stream in four parts."""

    num_shards = 4

    def shard(self, *, num_shards: int, index: int) -> Callable[[], Iterator[dict[str, Any]]]:
        return lambda: ({"k": k} for k in range(index, SAMPLES, num_shards))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return stream()


@dataclass(frozen=True)
class Data:
    """
    Attributes:
        order: the samples' numbers, position by position.
        in_a_row: ranks read in a row: also their order in a batch is to be that one.
    """

    opened: Callable[[], Any]
    order: np.ndarray
    given: dict[str, Any]
    shares: tuple[Shares, ...]
    workers: tuple[tuple[int, Kind], ...] = FEW_WORKERS
    in_a_row: bool = True

    def truth(self) -> list[list[Row]]:
        """The rows of each step: read one by one, in order."""
        key, positions = sample_rng.derive_key(f"gpumix samples {SEED}"), np.arange(BATCH * STEPS)
        found: list[Row] = []
        with sample_rng.use_row_seeds(
            sample_rng.derive_seeds(key, positions).tolist(), everywhere=True
        ):
            for position, k in enumerate(self.order.tolist()):
                sample_rng.seed_row(position)
                found.append((float(k), *drawn().tolist()))
        return [found[first : first + BATCH] for first in range(0, len(found), BATCH)]


def _data() -> dict[str, Data]:
    count = BATCH * STEPS
    plain = GlobalOrder(SAMPLES, SEED)
    alike = BucketedOrder(plain, Unlike.lengths, BATCH, window_batches=BY_LENGTH.window_batches)
    endless = np.arange(count) % SAMPLES
    stages = (
        staged_plan("gpt2", rows([24], [12, 12]), zero_stage=1),
        staged_plan("gpt2", rows([16, 8], [24]), zero_stage=1),
    )
    return {
        "numbers": Data(Numbers, plain.span(0, count), {}, SHARES, WORKERS),
        "numbers in stages": Data(Numbers, plain.span(0, count), {}, stages, in_a_row=False),
        "bucketed": Data(
            lambda: OwnSamples(Unlike(), "unlike", longest=30),
            alike.span(0, count),
            {"by_length": BY_LENGTH},
            (*FEW_SHARES, *stages),
            in_a_row=False,
        ),
        "a stream": Data(lambda: stream, endless, {"transform": augmented}, FEW_SHARES),
        "a stream of shards": Data(Shards, _of_lanes(count), {"transform": augmented}, FEW_SHARES),
    }


def _of_lanes(count: int) -> np.ndarray:
    """Each lane has so many rows of a batch, and reads its own shard first."""
    own, shards = BATCH // Shards.num_shards, Shards.num_shards
    in_turn = [[(lane + aside) % shards for aside in (0, 1, -1, 2)] for lane in range(shards)]
    lanes = [
        np.resize(
            np.concatenate([np.arange(shard, SAMPLES, shards) for shard in turns]), own * STEPS
        ).reshape(STEPS, own)
        for turns in in_turn
    ]
    return np.concatenate(lanes, axis=1).reshape(count)


@dataclass(frozen=True)
class Configuration:
    data: Data
    shares: Shares
    workers: int
    kind: Kind
    event: str

    def open(self, shares: Shares) -> list[Loader]:
        how: dict[str, Any] = {"by_length": DEFAULT_BY_LENGTH, **self.data.given}
        how |= {"seed": SEED, "num_workers": self.workers, "kind": self.kind}
        return [Loader(self.data.opened(), shares, rank, **how) for rank in range(_ranks(shares))]

    def run(self, truth: list[list[Row]]) -> str:
        """The hash of all samples. Those of a step that are read by several ranks, for they are of
        several stages, count once, and must be alike."""
        found = hashlib.sha256()
        for step, own in enumerate(self._steps()):
            once = list(dict.fromkeys(own))
            in_order = once == truth[step] or not self.data.in_a_row
            found.update(repr((sorted(once), in_order)).encode())
        return found.hexdigest()

    def _steps(self) -> Iterator[list[Row]]:
        every = self.data.shares
        other = every[(every.index(self.shares) + 1) % len(every)]
        loaders = self.open(self.shares)
        for step in range(STEPS):
            if step == STEPS // 3 and self.event == "resume":
                state = loaders[-1].state_dict()
                _close(loaders)
                loaders = self.open(other)
                for loader in loaders:
                    next(loader)  # it has begun elsewhere
                    loader.load_state_dict(state)
            if step == STEPS // 3 and self.event == "replan":
                loaders = _replanned(loaders, self, other)
            if step % 20 == 10 and self.event == "killed":
                _kill_one(loaders[0])
            yield [row for loader in loaders for row in _rows(next(loader))]
        _close(loaders)


def _rows(batch: dict[str, torch.Tensor]) -> list[Row]:
    numbers = batch["k"] if "k" in batch else batch["input_ids"][:, 0] - 1
    return [
        (float(k), *values)
        for k, values in zip(numbers.tolist(), batch["drawn"].tolist(), strict=True)
    ]


def _ranks(shares: Shares) -> int:
    return len(shares.workers) if isinstance(shares, Plan) else len(shares)


def _replanned(loaders: list[Loader], of: Configuration, shares: Shares) -> list[Loader]:
    """Ranks that stay take new shares, others come or go."""
    state = loaders[0].state_dict()
    stay, go = loaders[: _ranks(shares)], loaders[_ranks(shares) :]
    for loader in stay:
        loader.replan(shares)
    _close(go)
    come = of.open(shares)[len(stay) :]
    for loader in come:
        loader.load_state_dict(state)
    return [*stay, *come]


def _kill_one(loader: Loader) -> None:
    crew = loader._feed._crew
    if isinstance(crew, ProcessWorkerPool):
        os.kill(crew.pids[0], signal.SIGKILL)


def _close(loaders: list[Loader]) -> None:
    for loader in loaders:
        loader.close()


def _hash_of(truth: list[list[Row]]) -> str:
    found = hashlib.sha256()
    for step in truth:
        found.update(repr((sorted(step), True)).encode())
    return found.hexdigest()


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", help="one kind of data")
    options = parser.parse_args()
    configurations = distinct = 0
    for name, data in _data().items():
        if options.only not in (None, name):
            continue
        truth = data.truth()
        hashes = {_hash_of(truth)}
        every = [
            Configuration(data, shares, workers, kind, event)
            for shares, (workers, kind), event in product(data.shares, data.workers, EVENTS)
            if event != "killed" or kind == "processes"
        ]
        for one in every:
            hashes.add(one.run(truth))
        print(f"{name}: {len(every)} configurations, {len(hashes)} hash(es)", flush=True)
        configurations += len(every)
        distinct = max(distinct, len(hashes))
    common.print_figures(
        {"configurations": configurations, "distinct_hashes": distinct}, as_json=options.json
    )


if __name__ == "__main__":
    main()
