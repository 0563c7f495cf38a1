"""What crosses a unit's boundary is taken apart as pytree does it, and put together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils._pytree import tree_flatten

from gpumix.engine.values import Arguments, flatten, unflatten

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


def change_nothing(args, kwargs):
    """The unit leaves its arguments alone."""


@pytest.mark.parametrize(
    ("args", "kwargs", "change", "holds"),
    [
        ((ONE, (TWO,)), {"k": None}, change_nothing, True),
        (([ONE],), {}, change_nothing, True),
        (([ONE],), {}, lambda args, kwargs: args[0].append(TWO), False),
        ((({"a": ONE},),), {}, lambda args, kwargs: args[0][0].update(a=TWO), False),
        ((), {"k": {"a": ONE}}, lambda args, kwargs: kwargs["k"].pop("a"), False),
        ((), {"k": (ONE, [TWO])}, lambda args, kwargs: kwargs["k"][1].clear(), False),
    ],
)
def test_a_change_of_what_a_unit_is_given_is_noticed(args, kwargs, change, holds):
    leaves, structure = Arguments.of(args, kwargs)
    given = structure.filled(leaves)
    change(*given)
    assert structure.still_hold(leaves, *given) is holds
