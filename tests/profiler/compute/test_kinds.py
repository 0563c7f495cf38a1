"""Units of one structure that do not do alike are measured each by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.device import open_device
from gpumix.schema.cluster.cluster import DeviceClass
from helpers.devices.sweeps import measure
from helpers.extended import every_third
from helpers.training.staging import EVERY, calls_of

LARGEST = 2


@pytest.mark.parametrize(
    ("name", "alike"),
    every_third(
        [
            ("by_number", [0, 1, 0, 0]),
            ("halves", [0, 0, 1, 2, 0]),
            ("fills_in_the_likeness", [0, 1, 1, 1]),
            ("called_again", [0] * 7),
            ("goes_by_numbers", [0, 0, 0]),
        ]
    ),
)
def test_what_is_measured_is_true_of_each_call(name, alike):
    architecture = EVERY[name]
    with open_device(DeviceClass(name="one", accelerator="cpu", memory_bytes=2**26), 0) as runtime:
        found = measure(
            runtime,
            architecture.factory,
            largest=LARGEST,
            make_batch=partial(architecture.batch, generator=torch.Generator().manual_seed(0)),
        ).model
    kinds = list(dict.fromkeys(found.kind_of_call))
    assert [kinds.index(kind) for kind in found.kind_of_call] == alike
    assert found.calls == calls_of(name)
    assert found.fingerprint == split_into_units(architecture.factory()).fingerprint()
    for size in range(1, LARGEST + 1):
        measured = [
            [curve.values[curve.sizes.index(size)] for _, curve in sorted(outputs.items())]
            for outputs in (found.kind(kind).outputs for kind in found.kind_of_call)
        ]
        assert measured == _bytes_returned(name, size)


def _bytes_returned(name: str, samples: int) -> list[list[int]]:
    """By each call of the model's blocks, run as it is."""
    architecture, found = EVERY[name], []
    model = architecture.factory()
    for unit in split_into_units(model).units:
        unit.module.register_forward_hook(
            lambda _, __, out: found.append(
                [t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            )
        )
    model(**architecture.batch(samples, torch.Generator().manual_seed(0)))
    return found
