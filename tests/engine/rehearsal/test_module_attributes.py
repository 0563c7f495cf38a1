"""What a rehearsal leaves in attributes of modules: nothing."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
import torch
from torch import nn

from gpumix.engine.rehearsal.module_attributes import MAX_COPIED_ELEMENTS, preserve_attributes


class Keeps(nn.Module):
    """Keeps something of each call, in all ways that scripts do."""

    seen = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.mean, self.first = 0, 0.5, True
        self.outputs = [torch.ones(1)]
        self.by_name = {"losses": [1.0], "counts": 3}
        self.lists = defaultdict(list)
        self.recent = deque([1, 2], maxlen=2)
        self.known = {1}
        self.total, self.added = torch.zeros(2), torch.zeros(2)
        self.many = list(range(MAX_COPIED_ELEMENTS + 1))

    def forward(self, x):
        self.count += len(x)
        self.first = False
        self.seen += 1
        self.mean *= 2
        self.outputs.append(x)
        self.by_name["losses"].append(2.0)
        self.by_name["counts"] += 1
        self.lists["loss"].append(x)
        self.recent.append(3)
        self.known.add(2)
        self.total = self.total + x.sum()
        self.added += 1
        self.many.append(0)
        return self.inner(x)

    def kept(self):
        return {
            name: str(value)
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "training"
        } | {"seen": self.seen}


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_are_what_they_were(fails):
    module = nn.Sequential(Keeps())
    before, objects = module[0].kept(), {name: id(one) for name, one in vars(module[0]).items()}
    try:
        with preserve_attributes(module):
            module(torch.ones(3, 2))
            assert module[0].kept().keys() == before.keys()
            assert all(value != before[name] for name, value in module[0].kept().items())
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert module[0].kept() == before
    assert {name: id(one) for name, one in vars(module[0]).items()} == objects
    assert "seen" not in vars(module[0])


def test_what_a_list_held_is_the_same_object():
    module = Keeps()
    first = module.outputs[0]
    with preserve_attributes(module):
        module.outputs.clear()
        module.outputs.append(torch.zeros(1))
    assert module.outputs[0] is first


def test_a_container_that_holds_itself():
    module = nn.Linear(2, 2)
    module.tree = {"children": []}
    module.tree["children"].append(module.tree)
    with preserve_attributes(module):
        module.tree["children"].append(1)
    (child,) = module.tree["children"]
    assert child is module.tree


def test_a_tensor_of_an_evaluation_may_be_replaced():
    """It was made in inference mode, and has no version."""
    module = Keeps()
    with torch.inference_mode():
        module.total = kept = torch.ones(2)
    with preserve_attributes(module):
        module.total = module.total + 1
    assert module.total is kept
    assert torch.equal(kept, torch.ones(2))
