"""What ranks tell each other for a checkpoint, and who writes what of it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.errors import GpumixError
from gpumix.train.checkpoint.dcp_storage import Index, StoredBox, StoredTensor
from gpumix.train.checkpoint.manifest import INDEX
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    UNEVEN,
    assert_same,
    blank,
    checkpointer,
    model_values,
    trained,
)
from helpers.training.reference import Share

SAME = [Share(2, 2, 1)] * 3


def _saved_and_loaded(shares, folder: Path, settings: dict[str, Any]) -> bool:
    """Where unpickling is an error."""
    group = dist.new_group(backend="gloo")
    pickle.loads = pickle.Unpickler = _refuse  # type: ignore[assignment,misc]
    dist.distributed_c10d._unpickler = _refuse  # type: ignore[attr-defined]
    engine, optimizer = trained(shares, **settings)
    with pytest.raises(AssertionError, match="came over the network"):
        dist.all_gather_object([None] * len(shares), "an object", group=group)
    path = checkpointer(folder).save(2, engine, optimizer, cursor={})
    other, its_optimizer = blank(shares, **settings)
    checkpointer(folder).load(other, its_optimizer, source=path)
    assert_same(model_values(other), model_values(engine))
    return True


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pickle came over the network")


def test_nothing_that_ranks_tell_each_other_is_a_pickle(tmp_path):
    assert all(run_ranks(_saved_and_loaded, 4, UNEVEN, tmp_path, {}))


def test_ranks_that_have_the_same_write_a_part_each(tmp_path):
    assert all(run_ranks(_saved_and_loaded, 3, SAME, tmp_path, {"zero_stage": 0}))
    (path,) = tmp_path.glob("step-*")
    index = Index.model_validate_json((path / INDEX).read_text())
    written: dict[str, int] = {}
    for tensor in index.tensors.values():
        for box in tensor.boxes:
            written[box.file] = written.get(box.file, 0) + box.length
    assert len(written) == 3
    assert max(written.values()) < 0.8 * sum(written.values())


def box(offset: int, size: int) -> StoredBox:
    return StoredBox(offset=(offset,), size=(size,), file="__0_0.distcp", start=0, length=4 * size)


@pytest.mark.parametrize(
    ("boxes", "code"),
    [
        ([box(0, 4)], "elements-not-saved"),
        ([box(0, 4), box(0, 4)], "elements-not-saved"),
        ([box(0, 8), box(4, 4)], "elements-not-saved"),
        ([box(0, 4), box(1, 4)], "boxes-overlap"),
        ([], "elements-not-saved"),
    ],
    ids=["half", "twice", "more", "shifted", "nothing"],
)
def test_what_is_not_saved_whole_is_an_error(boxes, code):
    tensor = StoredTensor(dtype="float32", shape=(8,), boxes=tuple(boxes))
    with raises(GpumixError, code=code, what="model.a"):
        Index(tensors={"model.a": tensor}).check_complete()
    whole = tensor.model_copy(update={"boxes": (box(0, 4), box(4, 4))})
    Index(tensors={"model.a": whole}).check_complete()
    assert json.loads(Index(tensors={"model.a": whole}).model_dump_json())


Place = tuple[slice, ...]


@st.composite
def tiles(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Place]]:
    """A shape, and boxes that tile it: some of them are cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes: list[Place] = [tuple(slice(0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        one = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(one[dim].start, one[dim].stop))
        if cut in (one[dim].start, one[dim].stop):
            boxes.append(one)
        else:
            halves = (slice(one[dim].start, cut), slice(cut, one[dim].stop))
            boxes += [(*one[:dim], half, *one[dim + 1 :]) for half in halves]
    return shape, draw(st.permutations(boxes))


def is_whole(shape: tuple[int, ...], boxes: list[Place]) -> bool:
    stored = [
        StoredBox(
            offset=tuple(side.start for side in one),
            size=tuple(side.stop - side.start for side in one),
            file="a",
            start=0,
            length=0,
        )
        for one in boxes
    ]
    tensor = StoredTensor(dtype="float32", shape=shape, boxes=tuple(stored))
    try:
        Index(tensors={"model.a": tensor}).check_complete()
    except GpumixError:
        return False
    return True


@given(tiles(), st.data())
def test_boxes_are_whole_if_each_element_is_in_one(tiled, data):
    """By counting in which boxes each element is."""
    shape, boxes = tiled
    assert is_whole(shape, boxes)
    for _ in range(data.draw(st.integers(1, 2)) if shape else 0):
        number = data.draw(st.integers(0, len(boxes) - 1))
        dim = data.draw(st.integers(0, len(shape) - 1))
        side = boxes[number][dim]
        length = side.stop - side.start
        start = data.draw(st.integers(0, shape[dim] - length))
        moved = (*boxes[number][:dim], slice(start, start + length), *boxes[number][dim + 1 :])
        boxes = [*boxes[:number], moved, *boxes[number + 1 :]]
    held = np.zeros(shape, int)
    for one in boxes:
        held[one] += 1
    assert is_whole(shape, boxes) == bool((held == 1).all())
