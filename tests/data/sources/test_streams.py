"""Streams: one order for all ranks, workers and plans, though nothing is asked for by number."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from gpumix.data.loader import Loader
from gpumix.data.sources.iterable import StreamSource, _lanes_of, is_stream
from gpumix.schema.errors import InputError, TrainingError
from helpers.errors import raises
from helpers.extended import every_second, left_out

N = 50


def numbers() -> Iterator[dict[str, int]]:
    yield from ({"k": k} for k in range(N))


def passes(epoch: int) -> Iterator[dict[str, int]]:
    yield from ({"k": 1000 * epoch + k} for k in range(N))


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return numbers()


class Numbered(list):
    """What is no stream."""


def squared(sample: dict[str, int]) -> dict[str, Any]:
    return {**sample, "square": sample["k"] ** 2}


def steps_of(stream: Any, cut: list[int], steps: int, **given: Any) -> list[list[int]]:
    """Per step, the samples of all ranks in rank order."""
    loaders = [Loader(stream, cut, rank, **given) for rank in range(len(cut))]
    found = [[k for loader in loaders for k in next(loader)["k"].tolist()] for _ in range(steps)]
    for loader in loaders:
        loader.close()
    return found


def in_a_row(batch: int, steps: int) -> list[list[int]]:
    endless = itertools.cycle(range(N))
    return [list(itertools.islice(endless, batch)) for _ in range(steps)]


STREAMS: list[tuple[Any, dict[str, Any]]] = [
    (numbers, {}),
    (Numbers(), {}),
    (numbers, {"num_workers": 1, "kind": "processes"}),
    (numbers, {"num_workers": 3, "kind": "processes", "transform": squared}),
    (numbers, {"num_workers": 0, "transform": squared}),
]


READ: list[tuple[Any, ...]] = [
    *((*of, [4, 2]) for of in STREAMS),
    *((*of, [0, 5, 1]) for of in STREAMS[::3]),
    (*STREAMS[0], [1, 1, 1, 3]),
    (*STREAMS[3], [6]),
]


@pytest.mark.parametrize(
    ("stream", "given", "cut"), left_out(READ, [READ[0], READ[2], READ[3], READ[6], READ[8]])
)
def test_the_order_is_that_of_the_stream_which_goes_round(cut, stream, given):
    assert steps_of(stream, cut, 20, **given) == in_a_row(6, 20)


def test_a_pass_knows_its_number():
    found = [k for step in steps_of(passes, [10], 12) for k in step]
    assert found == [1000 * epoch + k for epoch in range(3) for k in range(N)][:120]


def test_samples_are_transformed():
    with Loader(numbers, [4], 0, transform=squared) as loader:
        batch = next(loader)
    assert batch["square"].tolist() == [0, 1, 4, 9]


def takes_away(sample: dict[str, Any]) -> dict[str, Any]:
    return {"k": sample.pop("k")}


def doubles(sample: dict[str, Any]) -> dict[str, Any]:
    sample["k"] *= 2
    sample["list"][0] += 1
    return {"k": sample["k"] + sample["list"][0] + sample["tensor"].add_(1)}


def nested() -> Iterator[dict[str, Any]]:
    for sample in numbers():
        yield {"k": np.array(sample["k"]), "list": [0], "tensor": torch.tensor(0)}


@pytest.mark.parametrize("kind", every_second(["threads", "processes"]))
def test_a_transform_may_change_what_it_is_given(kind):
    found = steps_of(numbers, [4], 3, transform=takes_away, num_workers=1, kind=kind)
    assert found == in_a_row(4, 3)
    found = steps_of(nested, [4], 3, transform=doubles, num_workers=1, kind=kind)
    assert found == [[2 * k + 2 for k in step] for step in in_a_row(4, 3)]


def test_a_collate_may_change_what_it_is_given():
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"k": torch.tensor([sample.pop("k") for sample in samples])}

    assert steps_of(numbers, [4], 3, collate=collate) == in_a_row(4, 3)


@pytest.mark.parametrize("bad_samples", ["stop", "skip"])
def test_beside_a_bad_sample_too_a_transform_may_change_what_it_is_given(bad_samples):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        k = sample.pop("k")
        if k == 6:
            raise ValueError("it is torn")
        return {"k": k}

    given = {"transform": transform, "bad_samples": bad_samples}
    if bad_samples == "skip":
        assert steps_of(numbers, [4], 3, **given) == [[0, 1, 2, 3], [4, 5, 7, 7], [8, 9, 10, 11]]
        return
    with raises(TrainingError, code="sample-unreadable", what=(6, "it is torn")):
        steps_of(numbers, [4], 2, **given)


def two(begin: int) -> Iterator[dict[str, int]]:
    yield from ({"k": 1000 * begin + k} for k in range(2))


def from_three(begin: int = 3) -> Iterator[dict[str, int]]:
    yield from two(begin)


def by_name(epoch: int = 7) -> Iterator[dict[str, int]]:
    yield from two(epoch)


@pytest.mark.parametrize(
    ("stream", "begins"),
    [
        (partial(two, 5), [5, 5]),
        (partial(two, begin=5), [5, 5]),
        (from_three, [3, 3]),
        (by_name, [0, 1]),
        (partial(by_name, epoch=2), [2, 2]),
    ],
)
def test_what_has_a_value_already_is_not_the_number_of_the_pass(stream, begins):
    found = steps_of(stream, [2], 2)
    assert found == [[1000 * begin, 1000 * begin + 1] for begin in begins]


def test_a_run_goes_on_elsewhere():
    with Loader(numbers, [4, 2], 1) as first:
        for _ in range(11):
            next(first)
        state = first.state_dict()
    with Loader(numbers, [3, 3], 0, num_workers=1, kind="processes") as other:
        other.load_state_dict(state)
        assert next(other)["k"].tolist() == in_a_row(6, 12)[11][:3]
        other.replan([1, 5])
        assert next(other)["k"].tolist() == in_a_row(6, 13)[12][:1]
        other.load_state_dict(state)  # backwards: it is read anew
        assert next(other)["k"].tolist() == in_a_row(6, 12)[11][:1]


def test_a_file_that_is_read_on_is_not_shared_with_workers(tmp_path):
    """Those that are forked open it anew."""
    path = tmp_path / "lines"
    path.write_text("".join(f"{k:05}\n" for k in range(N)))

    def lines() -> Iterator[dict[str, int]]:
        with path.open() as file:
            yield from ({"k": int(line)} for line in file)

    assert steps_of(
        lines, [3, 3], 20, num_workers=2, kind="processes", transform=squared
    ) == in_a_row(6, 20)


# -- shards ----------------------------------------------------------------------------------------


def sharded(shards: int) -> Any:
    datasets = pytest.importorskip("datasets")

    def of(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            yield from ({"k": 100 * shard + k} for k in range(10))

    return datasets.IterableDataset.from_generator(of, gen_kwargs={"shards": list(range(shards))})


@pytest.mark.parametrize("cut", left_out([[6], [4, 2], [1, 2, 3]], [[6], [4, 2]]))
def test_lanes_of_shards_are_the_same_for_all_ranks(cut):
    """Four shards: two divide them and a batch of six."""
    stream = sharded(4)
    expected = steps_of(stream, [6], 8)
    assert steps_of(stream, cut, 8) == expected
    read = {k for step in expected for k in step}
    assert {k // 100 for k in read} == {0, 1, 2, 3}
    assert all(
        {k // 100 for k in step[:3]}.isdisjoint(k // 100 for k in step[3:]) for step in expected
    )


@pytest.mark.parametrize(("shards", "batch"), [(3, 8), (4, 6), (5, 4), (6, 6), (7, 12)])
def test_all_samples_of_shards_come_equally_often(shards, batch):
    """As from one process that reads the stream itself, whatever divides a batch."""
    found = steps_of(sharded(shards), [batch], 4 * shards * 10 // batch)
    times = Counter(k for step in found for k in step)
    assert len(times) == 10 * shards and max(times.values()) - min(times.values()) <= 1


class Shards:
    """Sample k of shard s is 1000 s + k; shards are of unlike sizes."""

    def __init__(self, *sizes: int, only: int | None = None) -> None:
        self.sizes, self.only, self.num_shards = sizes, only, len(sizes)

    def shard(self, *, num_shards: int, index: int) -> Shards:
        assert num_shards == self.num_shards, "each is a lane"
        return Shards(*self.sizes, only=index)

    def __iter__(self) -> Iterator[dict[str, int]]:
        assert self.only is not None, "it is read by lanes"
        yield from ({"k": 1000 * self.only + k} for k in range(self.sizes[self.only]))


@pytest.mark.parametrize("sizes", [(10, 100, 100, 100), (30, 0, 50, 1), (7, 13, 0, 0)])
def test_of_shards_of_unlike_sizes_too_all_samples_come_equally_often(sizes):
    """A lane reads its own first, then those of the others, all of them before any comes again."""
    total = sum(sizes)
    found = steps_of(Shards(*sizes), [4], 2 * total)
    samples = {1000 * s + k for s, size in enumerate(sizes) for k in range(size)}
    for lane in zip(*found):
        assert len(set(lane[:total])) == total and lane[total:] == lane[:total]
    times: Counter[int] = Counter()
    for step, batch in enumerate(found, 1):
        times.update(batch)
        most, least = max(times.values()), min(times[k] for k in samples)
        assert most - least <= len(sizes)
        assert step % total or (most == least and set(times) == samples)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_lanes_that_meet_at_a_shard_do_not_go_on_to_the_same_one(shards):
    """Else one of them would go on repeating what the other one reads."""
    found = steps_of(Shards(*[1] * shards), [shards], shards)
    assert all(len(set(step)) == shards for step in found)
    assert all(len(set(lane)) == shards for lane in zip(*found))
    after = Counter(pair for lane in zip(*found) for pair in itertools.pairwise(lane))
    assert set(after.values()) == {1}


@pytest.mark.extended
def test_streamed_datasets_of_unlike_shards_come_equally_often():
    datasets = pytest.importorskip("datasets")

    def of(sizes: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
        for shard, size in sizes:
            yield from ({"k": 1000 * shard + k} for k in range(size))

    sizes = [(0, 2), (1, 30), (2, 0), (3, 9)]
    stream = datasets.IterableDataset.from_generator(of, gen_kwargs={"sizes": sizes})
    found = steps_of(stream, [4], 2 * 41)
    times = Counter(k for step in found for k in step)
    assert len(times) == 41 and set(times.values()) == {8}


UNLIKE: list[tuple[Any, ...]] = [
    ([2, 0, 5, 1], {"num_workers": 0}),
    ([8], {"kind": "processes", "num_workers": 2}),
    ([8], {"num_workers": 0}),
    ([2, 0, 5, 1], {"kind": "processes", "num_workers": 2}),
    ([3, 3, 1, 1], {"kind": "processes", "num_workers": 2}),
    ([3, 3, 1, 1], {"num_workers": 0}),
]


@pytest.mark.parametrize(("cut", "given"), left_out(UNLIKE, UNLIKE[2:]))
def test_shards_of_unlike_sizes_come_in_one_order(cut, given):
    """Whoever reads them, and after a resume."""
    stream = Shards(3, 20, 0, 11)
    expected = steps_of(stream, [8], 40)
    assert steps_of(stream, cut, 20, **given) == expected[:20]
    with Loader(stream, [8], 0) as loader:
        states = []
        for _ in range(25):
            next(loader)
            states.append(loader.state_dict())
    for step in (24,) if given["num_workers"] else (2, 13, 24):
        with Loader(stream, [8], 0, **given) as loader:
            loader.load_state_dict(states[step])
            assert [next(loader)["k"].tolist() for _ in range(5)] == expected[step + 1 : step + 6]


def test_of_many_shards_a_lane_may_have_one_more():
    assert _lanes_of(sharded(103), 8) == 8 and _lanes_of(sharded(79), 8) == 4


def test_a_rank_reads_its_own_lanes_only():
    opened: list[int] = []

    class Shards:
        num_shards = 6

        def shard(self, *, num_shards: int, index: int) -> Any:
            assert num_shards == 6
            return lambda: self._of(index)

        def _of(self, index: int) -> Iterator[dict[str, int]]:
            opened.append(index)
            yield from ({"k": 100 * index + k} for k in itertools.count())

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("it has lanes")

    with Loader(Shards(), [4, 2], 1, num_workers=0) as loader:
        assert next(loader)["k"].tolist() == [400, 500]
    assert set(opened) == {0, 4, 5}  # the first says what samples look like


# -- what is held out ------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_the_first_batches_of_each_pass_are_held_out(shards):
    """Of all shards alike; the rest comes as it would."""
    stream = sharded(shards)
    whole = StreamSource(stream, "mine", 6)
    train, held_out = whole.split(1, read=True)
    assert held_out[3]["k"] == whole[3]["k"] and len(held_out) == 6
    held = set(held_out.rows(np.arange(6))["k"].tolist())
    per_pass = 10 * shards - 6
    found = [train.rows(np.array([p]))["k"].item() for p in range(2 * per_pass)]
    assert not held & set(found)
    left = [whole.rows(np.array([6 + p]))["k"].item() for p in range(per_pass)]
    assert found[:per_pass] == left and sorted(found[per_pass:]) == sorted(left)


def test_shards_that_are_all_held_out_are_passed_over():
    """Who evaluates goes on in others, to what is held out there too."""
    whole = StreamSource(Shards(2, 10, 0, 7), "mine", 4)
    train, held_out = whole.split(3, read=True)
    held = set(held_out.rows(np.arange(12))["k"].tolist())
    assert held == {0, 1, *range(1000, 1003), *range(3000, 3003)}
    found = train.rows(np.arange(4 * 11))["k"].reshape(11, 4).T.tolist()
    left = [*range(1003, 1010), *range(3003, 3007)]
    assert all(sorted(lane) == left for lane in found)
    with raises(InputError, code="stream-empty-after-split"):
        whole.split(10, read=False)


def test_a_specimen_reads_nothing():
    opened = []

    def counted() -> Iterator[dict[str, int]]:
        opened.append(1)
        yield from numbers()

    source = StreamSource(counted, "mine", 2)
    assert source.specimen(np.arange(3))["k"].tolist() == [0, 0, 0]
    assert source.rows(np.arange(4))["k"].tolist() == [0, 1, 2, 3]
    assert len(opened) == 1


def test_a_stream_that_is_all_held_out_is_refused():
    with raises(InputError, code="stream-empty-after-split") as caught:
        StreamSource(numbers, "mine", 10).split(5, read=True)
    assert "the first 50 samples of each pass" in caught.value.why
    assert "data.validation_split" in caught.value.fix


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_generator_goes_through_once():
    with Loader(numbers(), [8], 0) as loader:
        found = [k for _ in range(6) for k in next(loader)["k"].tolist()]
        assert found == list(range(48))
        assert loader.setting.kind == "threads"  # a process would have a copy of it
        with raises(InputError, code="stream-ended", what=50) as caught:
            next(loader)
        assert "a function that makes it" in caught.value.fix


def test_a_generator_cannot_go_back():
    with Loader(numbers(), [8], 0) as loader:
        state = loader.state_dict()
        for _ in range(3):
            next(loader)
        loader.load_state_dict(state)
        with raises(InputError, code="stream-sample-passed"):
            next(loader)


def test_an_empty_stream_is_refused():
    with raises(InputError, code="stream-empty"):
        Loader(lambda: iter(()), [2], 0)


def test_samples_that_are_no_dictionaries_are_refused():
    with raises(InputError, code="sample-not-dict", what=0):
        Loader(lambda: iter(range(3)), [2], 0)


def bad(sample: dict[str, int]) -> dict[str, int]:
    if sample["k"] % 10 == 7:
        raise ValueError("no such picture")
    return sample


def test_a_bad_sample_is_named_or_the_next_one_takes_its_place():
    with (
        Loader(numbers, [8], 0, transform=bad) as loader,
        raises(TrainingError, code="sample-unreadable", what=("ValueError: no such picture", 7)),
    ):
        next(loader)
    with Loader(numbers, [10], 0, transform=bad, bad_samples="skip") as loader:
        assert next(loader)["k"].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 8, 9]
        assert [(one.index, one.instead) for one in loader.skipped] == [(7, 8)]


@pytest.mark.parametrize("shapes", [False, True])
def test_of_a_generator_too_only_the_bad_samples_are_skipped(shapes):
    """What goes by once was read before the bad one was found."""

    def other_shape(sample: dict[str, int]) -> dict[str, Any]:
        return {**sample, "x": torch.zeros(3 + (sample["k"] % 10 == 7))}

    given = {"transform": other_shape if shapes else bad, "bad_samples": "skip"}
    with Loader(numbers(), [5], 0, **given) as loader:
        found = [k for _ in range(6) for k in next(loader)["k"].tolist()]
        assert found == [k + (k % 10 == 7) for k in range(30)]
        assert [one.index for one in loader.skipped] == [7, 17, 27]


def test_a_bad_sample_does_not_begin_a_stream_anew():
    begun = []

    def counted() -> Iterator[dict[str, int]]:
        begun.append(1)
        return numbers()

    with Loader(counted, [5], 0, transform=bad, bad_samples="skip", num_workers=0) as loader:
        for _ in range(6):
            next(loader)
        assert len(loader.skipped) == 3
    assert len(begun) == 1


def test_a_first_sample_that_cannot_be_read_is_named_or_another_tells_what_all_are_like():
    def first_is_bad(sample: dict[str, int]) -> dict[str, int]:
        return bad({"k": sample["k"] + 7})

    with raises(
        TrainingError, code="sample-unreadable", what=("ValueError: no such picture", 0)
    ) as caught:
        Loader(numbers, [8], 0, transform=first_is_bad)
    assert "in bad" in caught.value.where
    with Loader(numbers, [4], 0, transform=first_is_bad, bad_samples="skip") as loader:
        assert next(loader)["k"].tolist() == [8, 8, 9, 10]
        assert [(one.index, one.instead) for one in loader.skipped] == [(0, 1)]


def test_a_stream_that_cannot_be_begun_is_named():
    def breaking() -> Iterator[dict[str, int]]:
        raise OSError("no such bucket")
        yield {"k": 0}

    for policy in ("stop", "skip"):
        with raises(TrainingError, code="sample-unreadable", what=0) as caught:
            Loader(breaking, [4], 0, bad_samples=policy)
        assert "no such bucket" in str(caught.value)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("bad_samples", ["stop", "skip"])
@pytest.mark.parametrize("good", [0, 2])
def test_a_stream_that_breaks_stops_the_run(good, bad_samples, once):
    """Nothing could take the place of what does not come."""
    begun = []

    def breaking() -> Iterator[dict[str, int]]:
        begun.append(1)
        yield from ({"k": k} for k in range(good))
        raise OSError("the line is dead")

    dataset = breaking() if once else breaking
    named = (good, "breaking", "OSError: the line is dead")
    with (
        raises(TrainingError, code="sample-unreadable", what=named) as caught,
        Loader(dataset, [4], 0, bad_samples=bad_samples, num_workers=0) as loader,
    ):
        next(loader)
    assert "test_streams.py" in caught.value.where
    assert "bad_samples" not in caught.value.fix and "inside of the stream" in caught.value.fix
    assert len(begun) <= 4


def test_a_stream_that_breaks_once_is_read_anew(tmp_path):
    """A generator that raised has ended; what it had left is not lost, nor is its next pass taken
    for that."""
    failed = tmp_path / "failed"

    def breaking() -> Iterator[dict[str, int]]:
        for k in range(N):
            if k == 24 and not failed.exists():
                failed.touch()
                raise OSError("the line is dead")
            yield {"k": k}

    found = []
    with Loader(breaking, [1], 0, num_workers=0) as loader:
        for _ in range(2 * N):
            found += next(loader)["k"].tolist()
    assert failed.exists() and found == 2 * list(range(N))


def test_a_generator_that_broke_does_not_go_on():
    def breaking() -> Iterator[dict[str, int]]:
        yield {"k": 0}
        raise OSError("the line is dead")

    with Loader(breaking(), [1], 0) as loader:
        next(loader)
        for _ in range(2):
            with raises(TrainingError, code="sample-unreadable", what="the line is dead"):
                next(loader)


def test_the_sample_at_which_a_generator_broke_is_named():
    """Not those before it of the same batch, which cannot be read again either."""

    def breaking() -> Iterator[dict[str, int]]:
        yield from ({"k": k} for k in range(6))
        raise OSError("the line is dead")

    with Loader(breaking(), [4], 0) as loader:
        next(loader)
        for _ in range(2):
            with raises(TrainingError, code="sample-unreadable", what=6) as caught:
                next(loader)
            assert "test_streams.py" in caught.value.where


def test_transforms_are_for_streams():
    with raises(InputError, code="transform-without-stream"):
        Loader([{"k": 1}], [1], 0, transform=squared)


def test_a_loader_of_torch_is_no_stream():
    """Its batches are not samples."""
    whole = torch.utils.data.DataLoader(Numbers(), batch_size=3)
    with raises(InputError, code="stream-gives-batches", what="DataLoader") as refused:
        Loader(whole, [4], 0)
    assert "give its dataset" in refused.value.fix


def test_what_is_a_stream():
    assert all(map(is_stream, (numbers, numbers(), Numbers())))
    assert not any(map(is_stream, ([], {}, torch.zeros(3), Numbered())))


@pytest.mark.parametrize("given", every_second([{"kind": "threads"}, {}]))
def test_one_thread_at_a_time_reads_a_stream(given):
    """However many workers are wanted: a generator that two of them run breaks."""
    inside = threading.Lock()

    def stream() -> Iterator[dict[str, int]]:
        for k in range(400):
            assert inside.acquire(blocking=False), "another thread is inside"
            time.sleep(0.0005)
            inside.release()
            yield {"k": k}

    with Loader(stream, [4], 0, num_workers=3, **given) as loader:
        found = [k for _ in range(60) for k in next(loader)["k"].tolist()]
    assert found == list(range(240))
