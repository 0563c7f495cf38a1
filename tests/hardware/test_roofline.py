"""Estimates from the catalogue: every chip has its own constants, shared slots count in part."""

from __future__ import annotations

import pytest

from gpumix.hardware.catalogue import find, load
from gpumix.hardware.roofline import MATRIX, PLAIN, host_copy


def test_every_capability_has_a_reach_of_its_own():
    nvidia = [card for card in load() if card.vendor == "nvidia"]
    assert {card.compute_capability for card in nvidia} == set(PLAIN)
    assert {card.compute_capability for card in nvidia if card.matrix_units} == set(MATRIX)


@pytest.mark.parametrize(
    ("sharing", "alone", "part"), [("a16", "a40", 4), ("gb200", "gh200-96gb", 2)]
)
def test_gpus_that_share_a_link_to_the_host_copy_at_their_part(sharing, alone, part):
    ours, theirs = (host_copy(find(name)).values[-1] for name in (sharing, alone))
    assert ours / theirs == pytest.approx(part, rel=1e-3)
