"""FLOPs of a plan's workers: what is computed again counts for the hardware alone."""

from __future__ import annotations

import itertools

import pytest

from gpumix.cost.flops import _StageFlopCounter
from gpumix.schema.curve import Curve
from gpumix.schema.plan.splitting import split_micro_batches
from gpumix.schema.profile.profile import UnitKind

NOTHING = Curve(sizes=(1.0,), values=(0.0,))


def kind(name: str, flops: float, rerun: float = 0.0) -> UnitKind:
    return UnitKind(
        name=name, trainable=1, kept=NOTHING, gradient=NOTHING, forward=NOTHING, backward=NOTHING,
        flops=flops, backward_flops=2 * flops, rerun_flops=rerun,
    )  # fmt: skip


CALLS = [kind("a", 3.0), kind("b", 5.0, 1.0), kind("a", 3.0)]


def test_the_models_flops_do_not_depend_on_the_plan():
    counted = _StageFlopCounter(CALLS, root=7.0)
    found = {
        counted(6, m, r, k).model for m, r, k in itertools.product((1, 4, 6), (True, False), (0, 2))
    }
    assert found == {6 * (3 * (3.0 + 5.0 + 3.0) + 7.0)}


@pytest.mark.parametrize("kept", range(8))
@pytest.mark.parametrize(("samples", "micro_batch"), [(5, 2), (4, 4), (3, 1)])
def test_each_pair_that_keeps_no_graph_is_computed_again(samples, micro_batch, kept):
    sizes = split_micro_batches(samples, micro_batch)
    pairs = [call.flops * size for call in CALLS for size in sizes]
    again = sum(pairs[: max(0, len(pairs) - kept)])
    found = _StageFlopCounter(CALLS, root=7.0)(samples, micro_batch, True, kept)
    assert found.hardware - found.model == pytest.approx(again + samples * 1.0)


def test_whoever_keeps_graphs_or_has_no_samples_computes_nothing_again():
    assert _StageFlopCounter(CALLS, 7.0)(4, 2, False, 0).hardware == 4 * (33.0 + 7.0) + 4 * 1.0
    assert _StageFlopCounter(CALLS, 7.0)(0, 0, True, 0) == (0.0, 0.0)
