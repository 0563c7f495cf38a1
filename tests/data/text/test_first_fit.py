"""First-fit: whole documents, none twice, as a plain loop packs them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.text.first_fit import pack_first_fit
from gpumix.schema.errors import InputError


def by_hand(lengths: list[int], capacity: int, seed: int, window: int) -> list[list[int]]:
    """Packs, each window's after the other's, by the textbook's loop."""
    order = GlobalOrder(len(lengths), seed).span(0, len(lengths)).tolist()
    packs: list[list[int]] = []
    for begin in range(0, len(order), window):
        own: list[list[int]] = []
        for document in sorted(order[begin : begin + window], key=lambda d: -lengths[d]):
            room = (p for p in own if sum(lengths[d] for d in p) + lengths[document] <= capacity)
            pack = next(room, None)
            if pack is None:
                own.append(pack := [])
            pack.append(document)
        packs += own
    return packs


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    seed=st.integers(0, 3),
    window=st.sampled_from([1, 2, 7, 64]),
)
def test_packs_are_those_of_the_plain_loop(lengths, seed, window):
    packs = pack_first_fit(np.array(lengths), 20, seed=seed, window=window)
    found = [packs.of(k).tolist() for k in range(len(packs))]
    # Inside a pack the order is that of the window, not of the lengths.
    wanted = by_hand(lengths, 20, seed, window)
    assert [sorted(pack) for pack in found] == [sorted(pack) for pack in wanted]
    assert sorted(d for pack in found for d in pack) == list(range(len(lengths)))


def test_many_windows_are_packed_as_few_are(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 50, 999)
    whole = pack_first_fit(lengths, 50, seed=1, window=16)
    monkeypatch.setattr("gpumix.data.text.first_fit._WINDOWS_AT_ONCE", 3)
    parts = pack_first_fit(lengths, 50, seed=1, window=16)
    assert parts.documents.tolist() == whole.documents.tolist()
    assert parts.begins.tolist() == whole.begins.tolist()


def test_little_room_is_left_of_text_of_usual_lengths():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).clip(1, 2048).astype(int)
    packs = pack_first_fit(lengths, 2048, seed=0)
    assert lengths.sum() / (len(packs) * 2048) > 0.995


def test_another_seed_gives_other_packs():
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    one, other = (pack_first_fit(lengths, 50, seed=seed, window=32) for seed in (0, 1))
    assert one.documents.tolist() != other.documents.tolist()


@pytest.mark.parametrize("lengths", [[], [0, 3], [3, 9]])
def test_what_does_not_go_into_packs_is_refused(lengths):
    with pytest.raises(InputError):
        pack_first_fit(np.array(lengths, dtype=int), 8, seed=0)
