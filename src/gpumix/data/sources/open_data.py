"""Sources of a job's training data: text, a saved dataset, or a factory's dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpumix.data.core.factory import call_factory
from gpumix.data.core.read_policy import Reading
from gpumix.data.core.source import (
    LabelingSource,
    PackedSource,
    Source,
    VocabularyCheckedSource,
    split_held_out,
)
from gpumix.data.core.token_file import PackedText
from gpumix.data.core.tokenizer import Tokenizer, open_tokenizer
from gpumix.data.sources.documents import TokenFileDocuments
from gpumix.data.sources.iterable import UNPROCESSED, StreamProcessing, StreamSource, is_stream
from gpumix.data.sources.iterable_documents import (
    SampleConversion,
    StreamDocuments,
    TextConversion,
    TokenConversion,
)
from gpumix.data.sources.length_cache import load_or_count_lengths
from gpumix.data.sources.map_style import SampleSource
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.sources.saved_dataset import open_saved, open_saved_documents, open_saved_texts
from gpumix.data.sources.tokenize_on_read import TokenizedTexts
from gpumix.data.text.document_packing import PackedDocuments
from gpumix.data.text.files import pack_text
from gpumix.data.workers.padding import (
    RaggedSource,
    VocabularyCheckedDocuments,
    get_declared_lengths,
    require_lengths,
)
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job


def open_data(
    job: Job, folder: Path, cache: Path, *, vocabulary: int | None = None
) -> tuple[Source, Source]:
    """Open (train, held out) as named by `job.data`; held out is empty if the job says 0.

    Of a stream the first samples of each pass are held out, as many as an evaluation takes.

    Args:
        job: the job.
        folder: base of the job's relative paths, and location of a factory's module.
        cache: folder of token files; best on a disk of this machine.
        vocabulary: number of tokens known to the model, if known.

    Raises:
        InputError: the data is missing, unfit, or too little for one sample.
        MachineError: a package is missing, or the cache cannot be written.
    """
    opened = _JobData(job, folder, cache, vocabulary)
    whole = opened.whole() if job.data.packing == "concatenate" else opened.open_documents()
    if opened.is_text and job.model.task != "causal-lm":
        raise InputError(
            f"text has its own tokens as labels, from which a {job.model.task} learns to copy",
            code="labels-copy-input",
            where="model.task",
            fix="give samples with `labels`: data.factory, or a data.dataset that has that column",
        )

    def known(source: Source) -> Source:
        if opened.lacks_labels:
            source = LabelingSource(source)
        # The job's own tokenizer is compared with the model earlier.
        own = job.data.factory is None and opened.is_text
        if vocabulary is None or own:
            return source
        return VocabularyCheckedSource(source, vocabulary, aligned=opened.aligned)

    if isinstance(whole, StreamSource):
        batches = job.eval_batches if job.data.validation_split else 0
        train, held_out = whole.split(batches, read=job.eval_steps > 0)
        return known(train), known(held_out)
    return split_held_out(known(whole), job.data.validation_split)


def require_held_out(job: Job, held_out: Source) -> None:
    """Raise InputError if a job evaluates, and no samples are held out for it."""
    if job.eval_steps and not len(held_out):
        raise InputError(
            "there are no held-out samples to evaluate on",
            code="no-held-out-samples",
            fix="set data.validation_split above 0, or eval_steps to 0",
        )


class _JobData:
    """The data of a job, on its way from files to samples.

    Attributes:
        is_text: whether the labels are the tokens.
        lacks_labels: whether the tokens must become the labels.
        aligned: whether labels are known to correspond to tokens: a user's own model decides that
            itself, and a decoder has tokens of its own.
    """

    def __init__(self, job: Job, folder: Path, cache: Path, vocabulary: int | None) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._folder = folder
        self._cache = cache
        self._length = job.sequence_length
        self._reading = Reading(job.data.bad_samples, job.advanced.timeout)
        self.is_text = False
        self.lacks_labels = False
        self.aligned = job.model.config is not None and job.model.task != "seq2seq-lm"

    def whole(self) -> Source:
        """Open concatenated documents, cut into samples; or samples with one length already."""
        data = self._job.data
        if data.factory is not None:
            return self._open_fixed_samples(data.factory)
        source: Source
        if data.dataset is not None:
            tokenizer = self._tokenizer()
            source = open_saved(self._place, data.column, tokenizer, self._length, self._cache)
        else:
            source = PackedSource(self._text())
        self.is_text = isinstance(source, PackedSource)
        return source

    def open_documents(self) -> Source:
        """Open documents as separate samples, or packed without cuts."""
        data = self._job.data
        made = None if data.factory is None else self._made(data.factory)
        if is_stream(made) and not isinstance(made, Source):
            return self._open_stream_documents(made)
        documents = self._documents(made)
        self.is_text = isinstance(documents, TokenFileDocuments | TokenizedTexts)
        if data.packing == "none":
            if data.bucketing:
                require_lengths(documents, "data.bucketing", "leave it out")
            return documents
        predicts_next = self._predicts_next()
        if self._vocabulary is not None and not self.is_text:
            documents = VocabularyCheckedDocuments(
                documents, self._vocabulary, reading=self._reading
            )
        return PackedDocuments(documents, seed=self._job.seed, predicts_next=predicts_next)

    def _open_stream_documents(self, stream: Any) -> StreamSource:
        """Open the documents of a stream: padded, or packed in order of arrival."""
        job, data = self._job, self._job.data
        assert data.factory is not None, "it made the stream"
        if data.bucketing:
            raise InputError(
                "a stream's samples cannot be sorted by length",
                code="stream-not-sortable",
                where="data.bucketing",
                why="how long they are is known once they are read",
                fix="leave it out, or set data.packing to documents",
            )
        self.is_text = data.tokenize == "on-the-fly"
        kind: SampleConversion = (
            TextConversion(self._tokenizer(), data.column)
            if self.is_text
            else TokenConversion(aligned=self.aligned)
        )
        vocabulary = None if self.is_text else self._vocabulary
        documents = StreamDocuments(data.factory, kind, self._length, self._reading, vocabulary)
        if data.packing == "none":
            return self._stream(stream, documents.padded())
        form = documents.packed(seed=job.seed, predicts_next=self._predicts_next())
        return self._stream(stream, form)

    def _stream(self, stream: Any, form: StreamProcessing = UNPROCESSED) -> StreamSource:
        job = self._job
        assert job.data.factory is not None, "it made the stream"
        return StreamSource(
            stream,
            job.data.factory,
            job.global_batch_size,
            form=form,
            seed=job.seed,
            reading=self._reading,
        )

    def _predicts_next(self) -> bool:
        """Return whether labels of packed documents are compared with outputs one token earlier;
        raise InputError if documents cannot be packed for the job's task."""
        if self._job.model.task == "seq2seq-lm":
            raise InputError(
                "documents of a seq2seq-lm cannot be packed: what its encoder and its decoder see "
                "must go together",
                code="seq2seq-not-packable",
                where="data.packing",
                fix="set data.packing to none",
            )
        return self._job.model.task == "causal-lm"

    def _documents(self, made: Any) -> RaggedSource:
        """Open the documents; `made` is the result of the factory, if any."""
        data = self._job.data
        if data.text:
            return TokenFileDocuments(self._text(), pad_token=self._tokenizer().end_of_text)
        if data.tokenize == "on-the-fly":
            return self._open_tokenized_texts(made)
        if data.factory is not None:
            if isinstance(made, RaggedSource):
                return made
            return OwnSamples(
                made,
                data.factory,
                longest=self._length,
                aligned=self.aligned,
                reading=self._reading,
            )
        tokenizer = self._tokenizer()
        return open_saved_documents(self._place, data.column, tokenizer, self._length, self._cache)

    def _open_tokenized_texts(self, made: Any) -> TokenizedTexts:
        data, tokenizer = self._job.data, self._tokenizer()
        if data.dataset is not None:
            texts = open_saved_texts(self._place, data.column, tokenizer, self._length)
        else:
            assert data.factory is not None
            texts = self._texts_of_factory(made, data.factory, tokenizer)
        needed = data.packing == "documents" or data.bucketing
        if needed and texts.lengths is None and texts.has_content_fingerprint:
            key = f"lengths-{texts.fingerprint}"
            texts.set_lengths(
                load_or_count_lengths(self._cache, key, len(texts), texts.count_tokens)
            )
        return texts

    def _texts_of_factory(self, made: Any, reference: str, tokenizer: Tokenizer) -> TokenizedTexts:
        texts = TokenizedTexts(
            made,
            tokenizer,
            column=self._job.data.column,
            longest=self._length,
            name=reference,
            content=str(getattr(made, "_fingerprint", "")),  # of `datasets`: how it was made
            reading=self._reading,
        )
        texts.set_lengths(get_declared_lengths(made, len(texts), reference))
        return texts

    @property
    def _place(self) -> Path:
        """The folder of the saved dataset."""
        assert self._job.data.dataset is not None, "there is one"
        return self._folder / self._job.data.dataset

    def _text(self) -> PackedText:
        data = self._job.data
        spec = data.model_copy(update={"text": tuple(self._folder / path for path in data.text)})
        return pack_text(spec, self._tokenizer(), self._length, self._cache)

    def _tokenizer(self) -> Tokenizer:
        named = self._job.tokenizer
        return open_tokenizer(self._folder / named if isinstance(named, Path) else named)

    def _made(self, reference: str) -> Any:
        """Call a factory. A generator is made again for each pass."""
        given = self._job.data.arguments
        make = partial(call_factory, reference, given, self._folder, key="data")
        made = make()
        return (lambda: make()) if isinstance(made, Iterator) else made

    def _open_fixed_samples(self, reference: str) -> Source:
        made = self._made(reference)
        source: Source
        if isinstance(made, Source):
            source = made
        elif is_stream(made):
            source = self._stream(made)
        else:
            source = SampleSource(made, reference, reading=self._reading)
        sample = source.rows(np.empty(0, dtype=np.int64))
        if self._job.model.config is not None:
            self._check_keys(sample.keys(), reference)
        tokens = sample.get("input_ids")
        if tokens is not None and tokens.shape[-1:] != (self._length,):
            raise InputError(
                f"'input_ids' of a sample has the shape {list(tokens.shape[1:])}, the job's "
                f"sequence_length is {self._length}",
                code="sample-not-sequence-length",
                where=reference,
                why="times and memory are planned for sequence_length",
                fix="change sequence_length in the job, or set data.packing to none (pads) or "
                "documents (packs)",
            )
        return source

    def _check_keys(self, keys: Collection[str], reference: str) -> None:
        """Check the keys of samples for a language model; find out if labels are missing."""
        task, has = self._job.model.task, ", ".join(sorted(keys))
        if not {"input_ids", "inputs_embeds"} & set(keys):
            raise InputError(
                f"the samples have no 'input_ids', they have {has}",
                code="input-ids-missing",
                where=reference,
                fix="let the factory give dictionaries of 'input_ids' and, if they are not the "
                "tokens, 'labels'",
            )
        self.lacks_labels = "labels" not in keys and task == "causal-lm" and "input_ids" in keys
        if "labels" not in keys and not self.lacks_labels:
            raise InputError(
                f"the samples have no 'labels', they have {has}",
                code="labels-missing",
                where=reference,
                fix=f"let the factory give what a {task} is to learn in 'labels'",
            )
