"""What samples draw at random goes by their places in the order, whoever reads them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from gpumix.data.core import sample_rng
from gpumix.data.core.sample_rng import sample_generator
from gpumix.data.loader import Loader, evaluation_batches
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.text.document_packing import PackedDocuments
from gpumix.data.workers.worker_pool import ProcessWorkerPool
from helpers.extended import every_second, left_out

N, BATCH, STEPS = 40, 8, 12  # more than two epochs


def drawn() -> dict[str, Any]:
    """From each generator that a dataset may draw from; numpy's normal numbers come in pairs."""
    return {
        "python": random.random(),
        "numpy": np.random.randn(),
        "torch": torch.rand(2),
        "own": torch.rand((), generator=sample_generator()),
    }


class Augmented:
    def __init__(self, draw: Callable[[], dict[str, Any]] = drawn) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"k": k, **self.draw()}


class Together(Augmented):
    """Samples come many at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[k] for k in indices]


def own() -> dict[str, Any]:
    return {"x": torch.rand(2, generator=sample_generator())}


OWN = Augmented(own)
Rows = list[tuple[float, ...]]


def rows_of(batch: dict[str, torch.Tensor]) -> Rows:
    columns = [
        value.double().reshape(len(value), -1).T for _, value in sorted(batch.items()) if len(value)
    ]
    return [tuple(row) for row in torch.cat(columns).T.tolist()] if columns else []


def together(loaders: list[Loader], steps: int) -> Rows:
    return [row for _ in range(steps) for loader in loaders for row in rows_of(next(loader))]


def life(dataset: Any, cut: list[int], **given: Any) -> Rows:
    """The samples of all ranks, step by step."""
    loaders = [Loader(dataset, cut, rank, seed=3, **given) for rank in range(len(cut))]
    try:
        return together(loaders, STEPS)
    finally:
        for loader in loaders:
            loader.close()


@cache
def by_one_process(dataset: Any, **given: Any) -> Rows:
    """The samples of one rank, which must be those of all; read once."""
    return life(dataset, [BATCH], num_workers=1, kind="processes", **given)


READERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 0},
    {"num_workers": 1, "kind": "processes"},
    {"num_workers": 3, "kind": "processes", "prefetch": 5},
    {"num_workers": 3, "kind": "threads"},
]


@pytest.fixture(scope="module")
def truth() -> Rows:
    found = by_one_process(Augmented())
    assert len(set(found)) == len(found) == BATCH * STEPS  # each epoch draws anew
    assert [int(row[0]) for row in found] == GlobalOrder(N, 3).span(0, BATCH * STEPS).tolist()
    return found


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        *left_out(
            [(given, [5, 3]) for given in READERS], [(READERS[n], [5, 3]) for n in (0, 2, 3)]
        ),
        *every_second((given, [0, 1, 7]) for given in reversed(READERS[-2:])),
        *every_second([(READERS[-1], [8]), (READERS[0], [8])]),
    ],
)
def test_draws_are_the_same_whoever_reads(truth, cut, given):
    assert life(Augmented(), cut, **given) == truth


@pytest.mark.parametrize("given", left_out(READERS, READERS[:-1]))
def test_samples_that_come_many_at_once_draw_what_each_would_alone(truth, given):
    assert life(Together(), [5, 3], **given) == truth


def test_a_resume_and_a_new_plan_repeat_them(truth):
    with Loader(Augmented(), [5, 3], 1, seed=3, num_workers=0) as first:
        found = together([first], 4)
        state = first.state_dict()
    with Loader(Augmented(), [2, 6], 1, seed=3, num_workers=2, kind="processes") as other:
        together([other], 1)
        other.load_state_dict(state)
        found += together([other], 3)
        other.replan([8, 0])
        together([other], 1)
        other.replan([0, 8])
        found += together([other], 2)
    steps = [truth[first : first + BATCH] for first in range(0, len(truth), BATCH)]
    expected = [step[5:] for step in steps[:4]] + [step[2:] for step in steps[4:7]]
    assert found == [row for part in expected + steps[8:10] for row in part]


def test_what_takes_a_killed_workers_place_repeats_them(truth):
    found = []
    with Loader(Augmented(), [BATCH], 0, seed=3, num_workers=2, kind="processes") as loader:
        for _ in range(STEPS):
            found += rows_of(next(loader))
            crew = loader._feed._crew
            assert isinstance(crew, ProcessWorkerPool)
            with suppress(ProcessLookupError):  # it may be one that was killed before
                os.kill(crew.pids[0], signal.SIGKILL)
    assert found == truth


@pytest.mark.parametrize("given", left_out(READERS, READERS[1:-1]))
def test_a_generator_of_the_samples_own_serves_threads_too(given):
    found = life(OWN, [5, 3], **given)
    assert found == by_one_process(OWN)
    assert len(set(found)) == len(found)


def test_threads_stay_where_samples_draw_from_a_generator_of_their_own():
    """Nobody waits for them then."""
    with Loader(Augmented(own), [8], 0, num_workers=3, kind="threads", prefetch=4) as loader:
        next(loader), next(loader)
        assert (loader.setting.workers, loader.setting.ahead) == (3, 4)


def test_where_samples_draw_from_the_processs_generators_processes_are_chosen():
    with Loader(Augmented(), [8], 0) as loader:
        next(loader)
        assert loader.setting.kind == "processes"
    with Loader(Augmented(), [8], 0, kind="threads", num_workers=3) as loader:
        next(loader)
        assert (loader.setting.kind, loader.setting.workers) == ("threads", 1)
        ((step, why),) = loader.reasons
        assert step == 0 and "they are read while `next` waits" in why


def of_trainer() -> tuple[Any, ...]:
    return random.random(), np.random.randn(), torch.rand(2).tolist()


@pytest.mark.parametrize(
    ("given", "dataset"),
    [
        *((given, Augmented()) for given in READERS),
        *((given, Together()) for given in READERS[-1:]),
        pytest.param(READERS[-2], Together(), marks=pytest.mark.extended),
        *((given, Augmented(own)) for given in READERS[-1:]),
        pytest.param(READERS[-2], Augmented(own), marks=pytest.mark.extended),
    ],
)
def test_who_trains_draws_as_if_nothing_were_read(dataset, given):
    def trained(loader: Iterator[Any]) -> list[Any]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        found = []
        for _ in range(6):
            found.append(of_trainer())
            next(loader)
        return found

    alone = trained(iter(range(6)))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with Loader(dataset, [8], 0, **given) as loader:
        assert of_trainer() == alone[0]  # a sample was read
        assert trained(loader) == alone


class Late(Augmented):
    """The first sample, by which all are judged, draws nothing."""

    thread_safe = True

    def __getitem__(self, k: int) -> dict[str, Any]:
        return super().__getitem__(k) if k else {"k": 0, **{key: v * 0 for key, v in KEPT.items()}}


LATE = Late()
KEPT = {"python": 0.0, "numpy": 0.0, "torch": torch.zeros(2), "own": torch.zeros(())}


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        *left_out(
            [(given, [5, 3]) for given in READERS], [(given, [5, 3]) for given in READERS[:-1]]
        ),
        (READERS[-1], [8]),
    ],
)
def test_that_samples_draw_is_seen_while_threads_read_them(cut, given):
    assert life(LATE, cut, **given) == by_one_process(LATE)


@pytest.mark.parametrize("given", left_out(READERS, READERS[2:4]))
def test_who_trains_draws_as_if_nothing_were_read_also_then(given):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    alone = [of_trainer() for _ in range(6)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with Loader(Late(), [8], 0, **given) as loader:
        found = []
        for _ in range(6):
            next(loader)
            found.append(of_trainer())
    assert found == alone


@pytest.mark.extended
def test_that_samples_draw_is_told(caplog):
    with Loader(Late(), [8], 0) as loader:
        next(loader)
        assert loader.setting.kind == "processes"
    with Loader(Late(), [8], 0, kind="threads", num_workers=2) as loader:
        next(loader)
        assert (loader.setting.workers, loader.setting.ahead) == (1, 1)
        assert "they are read while `next` waits" in loader.reasons[-1][1]
    assert sum("draw at random, which was not seen" in r.message for r in caplog.records) == 2


@pytest.mark.extended
def test_it_is_looked_for_where_nobody_waits_for_data(monkeypatch):
    """Batches lie ready, and samples draw from the 20th batch on."""
    # As long as a busy machine takes, not a fraction of a step.
    monkeypatch.setattr(Loader, "_patience_s", lambda *_: 60.0)
    order = GlobalOrder(8000, 0).span(0, 8 * 20)

    class Much(Late):
        def __len__(self) -> int:
            return 8000

        def __getitem__(self, k: int) -> dict[str, Any]:
            return {"k": k, "x": 0.0 if k in early else random.random()}

    early = {0, *order.tolist()}
    # Not so far ahead that the 20th is read while others are looked at, at the 16th.
    with Loader(Much(), [8], 0, prefetch=4) as loader:
        for step in range(40):
            while step and not loader._feed.is_ready(8 * step):
                time.sleep(0.001)
            next(loader)
            assert loader._feed.draws == (step >= 32)
        assert loader.setting.kind == "processes"
        assert [step for step, why in loader.reasons if "were seen to draw" in why] == [31]


def test_to_look_for_it_does_not_hold_up_a_batch_that_is_there():
    """Behind eight batches it looks, and what is read then hangs."""
    returned, waited_out, over = [], [], threading.Event()

    def hang(k: int) -> None:
        if len(returned) == 8 and not over.wait(10.0):
            waited_out.append(k)

    with Loader(Still(hang), [4], 0, num_workers=2, kind="threads", prefetch=4) as loader:
        while len(returned) < 7:
            returned.append(next(loader))
        while loader.ready < 4:
            time.sleep(0.001)
        returned.append(next(loader))  # behind it none is begun, so that all is seen of the next
        returned.append(next(loader))
        assert not waited_out
        over.set()


def test_other_samples_in_the_places_of_bad_ones_draw_the_same_in_every_plan():
    class Bad(Augmented):
        def __getitem__(self, k: int) -> dict[str, Any]:
            if k % 9 == 5:
                raise ValueError("no such picture")
            return super().__getitem__(k)

    one = life(Bad(), [8], bad_samples="skip", num_workers=2, kind="processes")
    assert one == life(Bad(), [3, 5], bad_samples="skip", num_workers=0)


def test_a_batch_draws_by_its_first_sample():
    """As far as it is the same batch: with other shares it is another one."""

    def masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        noise = np.random.rand(len(samples)) + random.random() + float(torch.rand(()))
        return {"k": torch.tensor([s["k"] for s in samples]), "noise": torch.from_numpy(noise)}

    plain = Augmented(dict)
    every = [life(plain, [5, 3], collate=masked, **given) for given in READERS[1:3]]
    assert all(one == every[0] for one in every)
    assert len(set(every[0])) == len(every[0])


class Documents(Augmented):
    lengths = np.arange(N) % 4 + 1

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(10**9, (int(self.lengths[k]),))}


def test_documents_in_packs_draw_by_the_places_of_the_packs():
    def packs() -> PackedDocuments:
        documents = OwnSamples(Documents(), "documents", longest=8)
        return PackedDocuments(documents, seed=0, predicts_next=True)

    one = life(packs(), [8], num_workers=2, kind="processes")
    assert one == life(packs(), [6, 2], num_workers=0)
    tokens = [row[:8] for row in one]  # two documents of a pack are never alike
    assert all(len({t for t in row if t}) == sum(map(bool, row)) for row in tokens)


# -- streams ---------------------------------------------------------------------------------------


def numbers() -> Iterator[dict[str, Any]]:
    yield from ({"k": k} for k in range(N))


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, **drawn()}


STREAM_READERS: list[tuple[Any, ...]] = [
    ([5, 3], {"num_workers": 0}),
    ([5, 3], {"num_workers": 2, "kind": "processes"}),
    ([5, 3], {}),
    ([8], {}),
]


class Shuffled(IterableDataset):
    """Its files come in another order each time, and it draws as it reads."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        files = list(range(4))
        random.shuffle(files)
        for file in files:
            for k in range(10):
                yield {"k": 100 * file + k, **drawn()}


@pytest.mark.parametrize(
    ("stream", "given"), [(numbers, {"transform": augmented}), (Shuffled(), {})]
)
@pytest.mark.parametrize(
    ("cut", "workers"),
    left_out(STREAM_READERS, STREAM_READERS[1:]),
)
def test_streams_draw_by_their_places(stream, given, cut, workers):
    found = life(stream, cut, **given, **workers)
    assert found == by_one_process(stream, **given)
    assert len(set(found)) == len(found)


def test_a_streams_own_order_goes_by_the_seed():
    orders = []
    for seed in (1, 2, 1):
        with Loader(Shuffled(), [N], 0, seed=seed) as loader:
            orders.append([int(k) for k in next(loader)["k"]])
    assert orders[0] == orders[2] != orders[1]


# -- evaluations, and by hand ----------------------------------------------------------------------


def test_an_evaluation_draws_the_same_each_time():
    def evaluated(cut: list[int]) -> Rows:
        ranks = [
            list(evaluation_batches(Augmented(), cut, rank, batches=3)) for rank in range(len(cut))
        ]
        return [row for step in zip(*ranks) for batch, _ in step for row in rows_of(batch)]

    before = torch.get_rng_state()
    assert evaluated([8]) == evaluated([5, 3]) == evaluated([8])
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_loader_the_generator_is_torchs_own():
    assert sample_generator() is torch.default_generator


def test_seeds_are_those_of_one_place_each():
    places = np.array([0, 1, 2**40, 2**62])
    seeds = sample_rng.derive_seeds(17, places).tolist()
    assert seeds == [sample_rng.derive_seed(17, place) for place in places.tolist()]
    many = sample_rng.derive_seeds(sample_rng.derive_key("a"), np.arange(10**5))
    assert len(np.unique(many)) == 10**5
    assert not set(many[:100]) & set(
        sample_rng.derive_seeds(sample_rng.derive_key("b"), np.arange(10**5)).tolist()
    )


class Still:
    """Draws nothing; `read` is called for each sample."""

    def __init__(self, read: Callable[[int], object]) -> None:
        self.read = read

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> dict[str, Any]:
        self.read(k)
        return {"k": k}


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_loaders_that_are_built_at_once_leave_generators_as_they_were():
    """The second one is begun while the first reads, and ends after it."""
    first_reads, second_reads, first_over = (threading.Event() for _ in range(3))

    def first(k: int) -> None:
        first_reads.set()
        second_reads.wait(0.5)

    def second(k: int) -> None:
        second_reads.set()
        first_over.wait(0.5)

    def build_first() -> None:
        Loader(Still(first), [8], 0).close()
        first_over.set()

    def build_second() -> None:
        first_reads.wait()
        Loader(Still(second), [8], 0).close()

    alone = seeded()
    of_both = [in_a_thread(build_first), in_a_thread(build_second)]
    for one in of_both:
        one.join()
    assert of_trainer() == alone


def seeded() -> tuple[Any, ...]:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = of_trainer()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return found


@pytest.mark.extended
def test_what_another_loader_reads_is_not_taken_for_draws(caplog):
    """It is built while this one watches whether its samples draw."""
    waited_for, other_reads, seen = (threading.Event() for _ in range(3))

    def wait_for_other(k: int) -> None:
        if waited_for.is_set():
            other_reads.wait(0.5)

    def read(k: int) -> None:
        other_reads.set()
        seen.wait(2)

    def build_other() -> None:
        Loader(Still(read), [8], 0).close()

    with Loader(Still(wait_for_other), [8], 0, num_workers=2, kind="threads") as loader:
        alone = seeded()
        waited_for.set()
        other = in_a_thread(build_other)
        next(loader)
        seen.set()
        other.join()
        assert loader.setting.workers == 2 and not loader._feed.draws
        assert of_trainer() == alone
    assert not caplog.records


def test_a_thread_that_is_stuck_has_the_generators_no_longer():
    """Samples that draw from them are read by another one, and so are those of other loaders."""
    stuck, over = threading.Event(), threading.Event()

    class Sticks(Augmented):
        def __getitem__(self, k: int) -> dict[str, Any]:
            found = super().__getitem__(k)
            if k == bad and not stuck.is_set():
                stuck.set()
                over.wait(60)
            return found

    bad = int(GlobalOrder(N, 3).span(0, 8)[-1])
    alone = seeded()
    with (
        Loader(Sticks(), [8], 0, seed=3, kind="threads", timeout_s=0.5) as loader,
        Loader(Augmented(), [8], 0, kind="threads") as other,
    ):
        assert rows_of(next(loader)) == by_one_process(Augmented())[:8]
        next(other)
        over.set()
        assert of_trainer() == alone
