"""A plan of several stages trains like one process."""

from __future__ import annotations

import pytest

from models import ARCHITECTURES
from reference import Share, train_alone, worst_error
from staging import Row, train_in_stages

STEPS = 3
TOLERANCE = 1e-5


def even(calls, samples, micro_batch=2):
    return Row(calls, tuple(Share(n, micro_batch, 1) for n in samples))


LAYOUTS = {
    "1 + 1": [(6,), (6,)],
    "1 + 2": [(6,), (2, 4)],
    "1 + 2 + 1": [(6,), (4, 2), (6,)],
    "2 + 2, crossing": [(4, 2), (2, 4)],
}


def rows_of(name, layout):
    """Calls divided over stages, the later ones getting more."""
    calls, stages = len(train_calls(name)), len(LAYOUTS[layout])
    cuts = [n * calls // stages for n in range(stages + 1)]
    return [even(b - a, samples) for a, b, samples in zip(cuts, cuts[1:], LAYOUTS[layout])]


def train_calls(name):
    from gpumix.engine.deferred import build
    from gpumix.engine.units import dissect

    return dissect(build(ARCHITECTURES[name].factory, 0)).units


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1])
def test_layouts(layout, schedule, stage):
    assert_parity("gpt2", rows_of("gpt2", layout), schedule=schedule, zero_stage=stage)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    assert_parity(name, rows_of(name, "1 + 2"), zero_stage=1)


def assert_parity(name, rows, **settings):
    size = sum(share.samples for share in rows[0].shares)
    expected = train_alone(ARCHITECTURES[name], size, STEPS)
    seen, found = train_in_stages(name, rows, STEPS, **settings)
    assert worst_error(found, expected) < TOLERANCE
    assert len({tuple(one.losses) for one in seen}) == 1
