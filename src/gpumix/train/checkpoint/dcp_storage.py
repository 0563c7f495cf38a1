"""Saving and loading of sharded tensors as boxes through torch.distributed.checkpoint.

Its planner maps the boxes to read onto the stored boxes. Their locations are kept in a JSON index
of gpumix: the pickled metadata, which can run code, is never read. Tensors are read as
`weights_only`.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from pydantic import AfterValidator, Field
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.schema.errors import GpumixError, get_first_line
from gpumix.schema.value import Value
from gpumix.train.checkpoint.collective_errors import NONE_TYPE, CollectiveActions, make_joint_error
from gpumix.train.checkpoint.manifest import INDEX, FileName, SavedFile, make_damaged_error


@dataclass(frozen=True)
class BoxedTensor:
    """This rank's part of a global tensor of `shape`: views of local memory by offset.

    The methods with underscores are called by torch.distributed.checkpoint on a sharded tensor.
    """

    shape: torch.Size
    views: dict[torch.Size, torch.Tensor]

    @classmethod
    def interval(cls, window: ParameterSlice, start: int, flat: torch.Tensor) -> BoxedTensor:
        """Box `flat`: the flattened elements from `start` on of the tensor part seen by a
        window."""
        views = window.boxes(start, flat.detach())
        return cls(window.shape, {torch.Size(offset): view for (offset, _), view in views})

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> BoxedTensor:
        return cls(tensor.shape, {torch.Size((0,) * tensor.dim()): tensor.detach()})

    def beside(self, other: BoxedTensor) -> BoxedTensor:
        """Merge the boxes of two parts of a tensor."""
        return BoxedTensor(self.shape, {**self.views, **other.views})

    def size(self) -> torch.Size:
        return self.shape

    def _chunks(self) -> dict[torch.Size, ChunkStorageMetadata]:
        return {o: ChunkStorageMetadata(o, view.size()) for o, view in self.views.items()}

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self._chunks().values())

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.views[offset].dtype),
                    size=self.shape,
                ),
            )
            for offset, chunk in self._chunks().items()
        ]


# -- where boxes are -------------------------------------------------------------------------------


_PRIME = 2**61 - 1
MOST_ELEMENTS = 2**56  # of a tensor
MOST_EMPTY = 10_000  # empty tensors allowed even in a small model


def _known_dtype(name: str) -> str:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype '{name}'")
    if not _can_be_copied(dtype):
        raise ValueError(f"tensors of dtype '{name}' cannot be copied")
    return name


@cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Return whether torch can copy a dtype; quantized and sub-byte dtypes cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized dtypes are deprecated
        try:
            torch.zeros(1, dtype=dtype).clone()
        except RuntimeError:
            return False
    return True


class StoredBox(Value):
    """A box of a tensor: bytes [start, start + length) of a file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: FileName
    start: int = Field(ge=0)
    length: int = Field(ge=0)

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies inside a tensor of `shape`."""
        if not len(self.offset) == len(self.size) == len(shape):
            return False
        every = zip(self.offset, self.size, shape)
        return all(first >= 0 and 0 <= n <= of - first for first, n, of in every)


def _validate_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Validate a shape creatable by torch; the strides of an empty tensor must fit too."""
    if any(n < 0 for n in shape) or math.prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {list(shape)}")
    return shape


class StoredTensor(Value):
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    shape: Annotated[tuple[int, ...], AfterValidator(_validate_shape)] = Field(max_length=64)
    boxes: tuple[StoredBox, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.torch_dtype.itemsize

    def is_tiled(self) -> bool:
        """Return whether the boxes cover each element exactly once.

        Each gap between bounds of boxes, in each dimension, gets a random length, and the volumes
        of the boxes must add up to the volume of the tensor. Boxes tiling it always do. Otherwise
        the difference is a nonzero polynomial in the lengths, and random lengths modulo a large
        prime are a root of it once in 10**17 times. So the check takes time linear in the boxes.
        """
        place = partial(secrets.randbelow, _PRIME)
        places: list[defaultdict[int, int]] = [defaultdict(place) for _ in self.shape]

        def volume(offset: Sequence[int], size: Sequence[int]) -> int:
            every = zip(places, offset, size)
            return math.prod(at[first + n] - at[first] for at, first, n in every) % _PRIME

        held = sum(volume(box.offset, box.size) for box in self.boxes) % _PRIME
        return held == volume([0] * len(self.shape), self.shape)


class Index(Value):
    """All tensors of a checkpoint by name."""

    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, metadata: Metadata) -> Index:
        """Build from the metadata returned by a save of torch.distributed.checkpoint."""
        stored = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            places = [metadata.storage_data[MetadataIndex(name, c.offsets)] for c in tensor.chunks]
            stored[name] = StoredTensor(
                dtype=str(tensor.properties.dtype).removeprefix("torch."),
                shape=tensor.size,
                boxes=tuple(
                    StoredBox(
                        offset=chunk.offsets,
                        size=chunk.sizes,
                        file=place.relative_path,
                        start=place.offset,
                        length=place.length,
                    )
                    for chunk, place in zip(tensor.chunks, places)
                ),
            )
        return cls(tensors=stored)

    @classmethod
    def merged(cls, parts: Iterable[Index]) -> Index:
        """Merge the indexes of several ranks."""
        stored: dict[str, StoredTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in stored:
                    boxes = (*stored[name].boxes, *tensor.boxes)
                    tensor = stored[name].model_copy(update={"boxes": boxes})
                stored[name] = tensor
        return cls(tensors=stored)

    def check_complete(self) -> None:
        """Raise a GpumixError if elements of a tensor are in no box or in two boxes, or if there
        are more empty tensors than any model has."""
        empty = sum(not tensor.elements for tensor in self.tensors.values())
        if empty > max(MOST_EMPTY, len(self.tensors) / 2):
            raise GpumixError(
                f"{empty:,} of its {len(self.tensors):,} tensors hold nothing", code="tensors-empty"
            )
        for name, tensor in self.tensors.items():
            held = sum(box.elements for box in tensor.boxes)
            if held != tensor.elements or len({b.offset for b in tensor.boxes}) < len(tensor.boxes):
                raise GpumixError(
                    f"of the {tensor.elements} elements of '{name}' {held} are saved",
                    code="elements-not-saved",
                )
            if not tensor.is_tiled():
                raise GpumixError(
                    f"boxes of '{name}' overlap, and leave elements out", code="boxes-overlap"
                )

    def check_fits(self, sizes: Mapping[str, int]) -> None:
        """Raise a GpumixError if a box is outside its tensor or its file, before memory is
        allocated; `sizes` are bytes by file."""
        for name, tensor in self.tensors.items():
            for box in tensor.boxes:
                needed = box.elements * tensor.torch_dtype.itemsize
                if not box.is_inside(tensor.shape):
                    raise GpumixError(
                        f"a box of '{name}' is not of a tensor of {tensor.shape}",
                        code="box-of-another-tensor",
                    )
                if box.length < needed or box.start + box.length > sizes.get(box.file, -1):
                    raise GpumixError(
                        f"a box of '{name}' is not in {box.file}", code="box-not-in-file"
                    )

    def metadata(self) -> Metadata:
        """Return the metadata needed by torch.distributed.checkpoint for a load."""
        tensors: dict[str, Any] = {}
        places = {}
        for name, stored in self.tensors.items():
            chunks = []
            for box in stored.boxes:
                offset = torch.Size(box.offset)
                chunks.append(ChunkStorageMetadata(offset, torch.Size(box.size)))
                places[MetadataIndex(name, offset)] = _StorageInfo(box.file, box.start, box.length)
            properties = TensorProperties(dtype=stored.torch_dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        return Metadata(tensors, storage_data=places)


# -- to files and back -----------------------------------------------------------------------------


def write_boxes(
    folder: Path, tensors: Mapping[str, Mapping[str, Any]], ranks: CollectiveActions
) -> tuple[Index, dict[str, SavedFile]]:
    """Write all ranks' boxes into `folder`, a file per rank. Collective.

    Each rank writes on its own: ranks of torch.distributed.checkpoint exchange pickles. Rank 0
    merges the results.

    Args:
        tensors: nested dictionaries of `BoxedTensor`; names are the keys joined by dots. Ranks must
        not
            share a box.

    Returns:
        The index, of all boxes on rank 0 and of the rank's own boxes elsewhere. And size and digest
        of this rank's files, by the content written.

    Raises:
        GpumixError: a rank could not write; the same on all ranks.
    """
    doing = "write its part of a checkpoint"

    def save() -> _Written:
        planner = _SavePlanner(flatten_sharded_tensors=False)
        writer = _Writer(folder, ranks.rank)
        with _run_single_process(), count_as_host_memory():  # staging goes through host memory
            metadata = dcp.save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)
        found = writer.files.written()
        return _Written(index=Index.of(metadata), paths=planner.mappings, files=found)

    own: list[_Written] = []
    ranks.run_on_all(lambda: own.append(save()), NONE_TYPE, doing, folder)
    written = [
        _Written.model_validate_json(text)
        for text in ranks.collect(own[0].model_dump_json(), doing)
    ]
    index = Index.merged(one.index for one in written or own)
    ranks.first(lambda: _describe(folder, index, written), NONE_TYPE, "describe tensors", folder)
    return index, own[0].files


class _Written(Value):
    """The boxes and files written by a rank, and the key path of each tensor."""

    index: Index
    paths: dict[str, tuple[str | int, ...]]
    files: dict[str, SavedFile]


def _describe(folder: Path, index: Index, written: Sequence[_Written]) -> None:
    """Write `.metadata` for readers based on torch.distributed.checkpoint."""
    index.check_complete()
    metadata = index.metadata()
    metadata.planner_data = {name: path for one in written for name, path in one.paths.items()}
    results = [WriteResult(i, place.length, place) for i, place in metadata.storage_data.items()]
    dcp.FileSystemWriter(folder).finish(metadata, [results])


def read_boxes(
    folder: Path, index: Index, tensors: Mapping[str, BoxedTensor], ranks: CollectiveActions
) -> None:
    """Fill the boxes in `tensors` with the values stored under the boxes' names. Collective.

    Raises:
        GpumixError: a rank could not read; the same on all ranks.
    """
    ranks.run_on_all(
        lambda: _load(tensors, _Reader(folder, index)), NONE_TYPE, "read a checkpoint", folder
    )


class ByteSource(Protocol):
    """Source of boxes stored in no file of the host."""

    def fetch(self, wanted: Sequence[StoredBox]) -> None:
        """Prepare the boxes for `bytes_of`. Collective."""
        ...

    def bytes_of(self, box: StoredBox) -> torch.Tensor: ...


def read_from(
    index: Index, tensors: Mapping[str, BoxedTensor], ranks: CollectiveActions, source: ByteSource
) -> None:
    """Fill the boxes in `tensors` like `read_boxes`, from memory."""
    reader = _BytesReader(index, source)
    ranks.run_on_all(
        lambda: _load(tensors, reader), NONE_TYPE, "read a checkpoint in memory", Path("memory")
    )


def _load(tensors: Mapping[str, BoxedTensor], reader: dcp.StorageReader) -> None:
    """Load this rank's boxes as a single process: each rank knows the location of all boxes."""
    with _run_single_process(), count_as_host_memory():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


@contextmanager
def _run_single_process() -> Iterator[None]:
    """Run torch.distributed.checkpoint as a single process: suppress the warning, and raise the
    cause instead of its CheckpointException."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            cause, _ = error.failures[min(error.failures)]
            raise cause from error


class _SavePlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan for the boxes of a rank, which need not cover complete tensors."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].views[index.offset]


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].views[index.offset]


class _Files(FileSystem):
    """File system hashing the written content: content read later may differ."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[int, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashed = _HashingStream(stream)
            yield hashed
            self._written[Path(path).name] = hashed.length, hashed.digest

    def written(self) -> dict[str, SavedFile]:
        return {
            name: SavedFile(bytes=length, sha256=digest.hexdigest())
            for name, (length, digest) in self._written.items()
        }


class _HashingStream:
    """A file hashed while written sequentially."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.length, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.length += memoryview(data).nbytes
        return int(self._stream.write(data))

    def tell(self) -> int:
        return self.length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Writer(dcp.FileSystemWriter):
    """Writer raising errors on the rank of origin."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self._folder, self._own_rank = folder, rank
        self.fs = self.files = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            what = f"rank {self._own_rank} could not write its part of a checkpoint"
            raise make_joint_error(error, what, self._folder) from error

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prefix = _StoragePrefix(f"__{self._own_rank}_")
        return [replace(plan, storage_data=prefix) for plan in plans]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the locations only; `_describe` writes `.metadata` for all ranks."""
        metadata.storage_data = {one.index: one.storage_data for of in results for one in of}


class _Reader(dcp.FileSystemReader):
    """Reader taking the locations of boxes from an `Index`."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index.metadata()

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().read_data(plan, planner)
        except OSError as error:
            raise make_joint_error(
                error, "a rank could not read a checkpoint", self._folder
            ) from error
        except Exception as error:  # unpickling may raise anything
            why = f"its tensors cannot be read: {get_first_line(error)}"
            raise make_damaged_error(self._folder / INDEX, why) from error


class _BytesReader(dcp.StorageReader):
    """Reader taking boxes from memory."""

    def __init__(self, index: Index, source: ByteSource) -> None:
        self._index, self._source = index, source

    def reset(self, checkpoint_id: Any = None) -> None:
        return

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        boxes = [self._box(item.storage_index) for item in plan.items]
        self._source.fetch(boxes)
        for item, box in zip(plan.items, boxes):
            dtype = self._index.tensors[item.storage_index.fqn].torch_dtype
            stored = self._source.bytes_of(box).view(dtype).view(box.size)
            part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _box(self, index: MetadataIndex) -> StoredBox:
        boxes = self._index.tensors[index.fqn].boxes
        return next(b for b in boxes if torch.Size(b.offset) == index.offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
