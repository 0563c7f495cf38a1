"""What crosses a unit's boundary is taken apart as pytree does it, and put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from torch.utils._pytree import tree_flatten

from gpumix.engine.model.unit_values import ArgumentsStructure, flatten, unflatten

ONE, TWO = torch.zeros(1), torch.ones(2)
Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        None,
        (),
        {},
        (ONE, None, (TWO, 3, "x")),
        [ONE, (TWO, [1.5])],
        {"b": ONE, "a": {"c": (TWO,), "d": []}},
        Pair(ONE, (TWO, None)),
        OrderedDict(z=ONE, y=[TWO]),
        (ONE, Pair({"k": TWO}, object)),
    ],
    ids=str,
)
def test_leaves_are_those_of_pytree_and_make_the_value_again(value):
    leaves: list = []
    structure = flatten(value, leaves)
    wanted, spec = tree_flatten(value)
    assert len(leaves) == len(wanted) and all(a is b for a, b in zip(leaves, wanted))
    again, same = tree_flatten(unflatten(structure, iter(leaves)))
    assert same == spec and all(a is b for a, b in zip(again, wanted))


class Named(UserDict):
    """With an attribute of its own."""

    name = "none"


def test_an_open_object_is_made_again_with_its_attributes():
    value = Named(a=ONE, b=(TWO, None))
    value.name = "own"
    leaves: list = []
    structure = flatten((value, 3), leaves)
    assert leaves[0] is ONE and leaves[1] is TWO and leaves[2:] == [None, "own", 3]
    again, _ = unflatten(structure, iter(leaves))
    assert type(again) is Named and again is not value and again.name == "own"
    assert again["a"] is ONE and again["b"][0] is TWO
    leaves, structure = ArgumentsStructure.of((value,), {"k": value})
    (one,), others = structure.filled(leaves)
    assert one["a"] is others["k"]["a"] is ONE and one is not others["k"]
