"""Opens what a job trains on: text, a saved dataset, or a factory's dataset."""

from __future__ import annotations

from pathlib import Path

from gpumix.data.factory import call_factory
from gpumix.data.rows import KnownTokens, PackedSource, Source, split_held_out
from gpumix.data.samples import SampleSource
from gpumix.data.saved_dataset import open_saved
from gpumix.data.text import pack_text
from gpumix.data.tokenizer import open_tokenizer
from gpumix.spec.errors import InputError
from gpumix.spec.job import Job


def open_data(
    job: Job, folder: Path, cache: Path, *, vocabulary: int | None = None
) -> tuple[Source, Source]:
    """(train, held out) as `job.data` names them; held out is empty where it says 0.

    Args:
        job: the job.
        folder: what the job's relative paths start from, and where a factory's module lies.
        cache: where token files are kept; best on a disk of this machine.
        vocabulary: how many tokens the model knows, if that is known.

    Raises:
        InputError: the data is missing, unfit, or too little for one sample.
        MachineError: a package is missing, or the cache cannot be written.
    """
    whole = _open_whole(job, folder, cache)
    if not isinstance(whole, PackedSource):
        whole = whole if vocabulary is None else KnownTokens(whole, vocabulary)
    elif job.model.task != "causal-lm":
        raise InputError(
            f"text has its own tokens as labels, from which a {job.model.task} learns to copy",
            where="model.task",
            fix="give samples with `labels`: data.factory, or a data.dataset that has that column",
        )
    return split_held_out(whole, job.data.held_out)


def _open_whole(job: Job, folder: Path, cache: Path) -> Source:
    data = job.data
    if data.factory is not None:
        return _open_factory(job, data.factory, folder)
    named = job.tokenizer
    tokenizer = open_tokenizer(folder / named if isinstance(named, Path) else named)
    if data.dataset is not None:
        place = folder / data.dataset
        return open_saved(place, data.column, tokenizer, job.sequence_length, cache)
    spec = data.model_copy(update={"text": tuple(folder / path for path in data.text)})
    return PackedSource(pack_text(spec, tokenizer, job.sequence_length, cache))


def _open_factory(job: Job, reference: str, folder: Path) -> Source:
    made = call_factory(reference, job.data.arguments, folder)
    source = made if isinstance(made, Source) else SampleSource(made, reference)
    tokens = source[0].get("input_ids") if len(source) else None
    if tokens is not None and tokens.shape[-1:] != (job.sequence_length,):
        raise InputError(
            f"'input_ids' of a sample has the shape {list(tokens.shape)}, the job's "
            f"sequence_length is {job.sequence_length}",
            where=reference,
            why="times and memory are planned for sequence_length",
            fix="change sequence_length in the job, or cut and pad in the dataset",
        )
    return source
