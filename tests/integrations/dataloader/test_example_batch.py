"""What devices are measured with: the longest sample, the same on ranks that read unlike fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from gpumix.integrations.dataloader import example_batch
from gpumix.integrations.dataloader.example_batch import (
    MAX_STREAM_SAMPLES,
    find_example,
    needs_padding,
)
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks

LENGTHS = [3, 4, 2, 9, 5]
SECONDS = [0.1, 0.7]  # for a sample, by rank: the second one has no time to come to the longest


class Slow(Dataset[Any]):
    """Takes time to read, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        self.now += self.seconds
        return {"input_ids": torch.full((LENGTHS[place],), place)}


class SlowStream(IterableDataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.samples = Slow(seconds)

    def __iter__(self):
        return (self.samples[place] for place in range(len(LENGTHS)))


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}


def at_its_speed(streamed: bool) -> tuple[int, list[int]]:
    samples = Slow(SECONDS[dist.get_rank()])
    dataset: Any = samples
    if streamed:
        dataset = SlowStream(0.0)
        dataset.samples = samples
    example_batch.time = SimpleNamespace(monotonic=lambda: samples.now)
    found = find_example(dataset, padded)
    return found.sequence_length, found.batch(1)["input_ids"][0].tolist()


def drawn() -> int:
    """Of a collator that makes batches as long as it likes."""
    longer = dist.get_rank()

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(len(samples), 5 + longer, dtype=torch.long)}

    return find_example(Slow(0.0), collate).sequence_length


def everything() -> list[Any]:
    return [at_its_speed(False), at_its_speed(True), drawn()]


def test_ranks_of_unlike_reading_speed_take_the_same_sample():
    longest = (max(LENGTHS), [LENGTHS.index(max(LENGTHS))] * max(LENGTHS))
    assert run_ranks(everything, 2) == [[longest, longest, 6]] * 2


def made(lengths: list[int]) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [[number] * length for number, length in enumerate(lengths)]
    return datasets.Dataset.from_dict({"input_ids": rows, "more": lengths})


# The longest lies behind what is looked at one by one.
MANY = [1 + n % 7 for n in range(example_batch.MAX_SAMPLES)] + [30, 40, 2]
SHOWN = {
    "as it is": (lambda all_: all_, 40),
    "shuffled": (lambda all_: all_.shuffle(seed=1), 40),
    "split": (lambda all_: all_.train_test_split(test_size=0.5, seed=4)["train"], None),
    "selected": (lambda all_: all_.select([*range(len(MANY) - 2), len(MANY) - 1]), 30),
    "in turn": (lambda all_: all_.select(range(1, len(MANY))), 40),
}


@pytest.mark.parametrize("name", SHOWN)
def test_of_a_table_the_longest_of_all_is_taken(name, monkeypatch):
    show, longest = SHOWN[name]
    dataset = show(made(MANY))
    monkeypatch.setattr(example_batch, "MAX_SEARCH_S", -1.0)
    assert find_example(dataset, padded).sequence_length == (longest or max(dataset["more"]))


@pytest.mark.parametrize("as_tensors", [True, False])
def test_of_samples_with_several_rows_the_longest_row_counts(as_tensors):
    """Each has as many rows as a question has choices; what differs is how long these are."""

    def choices(length):
        rows = torch.full((2, length), length)
        return {"input_ids": rows if as_tensors else rows.tolist()}

    def collate(samples):
        rows = [torch.as_tensor(sample["input_ids"]).T for sample in samples]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": padded.transpose(1, 2)}

    found = find_example([choices(length) for length in LENGTHS], collate)
    assert found.batch(1)["input_ids"].shape == (1, 2, max(LENGTHS))
    narrow, wide = found.padded()
    assert (narrow["input_ids"].shape[2], wide["input_ids"].shape[2]) == (2, max(LENGTHS))


def test_a_dataset_without_samples_is_told():
    for none in (made([]), []):
        with raises(InputError, code="dataset-empty"):
            find_example(none, padded)


def test_of_a_stream_so_many_are_looked_at():
    class Longer(IterableDataset[Any]):
        def __iter__(self):
            return ({"input_ids": [0] * length} for length in range(1, 2 * MAX_STREAM_SAMPLES))

    assert find_example(Longer(), padded).sequence_length == MAX_STREAM_SAMPLES


def test_of_texts_the_longest_one_is_taken():
    """A collator makes tokens of them."""

    def collate(texts: list[str]) -> dict[str, torch.Tensor]:
        return padded([{"input_ids": [ord(letter) for letter in text]} for text in texts])

    for of in (lambda text: text, lambda text: {"text": text}, lambda text: (text, 1)):
        texts = [of(text) for text in ("one", "a longer one", "two")]
        found = find_example(
            texts, lambda rows: collate([text for row in rows for text in _text_of(row)])
        )
        assert found.sequence_length == len("a longer one")


def _text_of(row: Any) -> list[str]:
    return [row] if isinstance(row, str) else [row["text"] if isinstance(row, dict) else row[0]]


@pytest.mark.parametrize("lengths, found", [([4, 4, 4], False), ([4, 4, 3], True)])
def test_samples_are_padded_where_their_lengths_differ(lengths, found):
    assert needs_padding([{"input_ids": [1] * length} for length in lengths], padded) is found


def test_samples_that_a_collator_cuts_are_padded():
    samples = [{"input_ids": [cut] * 8} for cut in (3, 3, 2)]

    def collate(rows):
        return padded([{"input_ids": row["input_ids"][: row["input_ids"][0]]} for row in rows])

    assert needs_padding(samples, collate)
