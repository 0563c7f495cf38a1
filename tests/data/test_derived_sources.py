"""Sources that are made of others say of themselves what those say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_helpers import Numbers

from gpumix.data.rows import KnownTokens, Source, View

SAYS = {  # each unlike what a source says by itself
    "name": "mine:make",
    "splits": False,
    "thread_safe": True,
    "in_order": True,
    "parallel": False,
    "once": True,
}


class Peculiar(Numbers):
    """Is in everything unlike other sources."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        for key, value in SAYS.items():
            setattr(self, key, value)

    @property
    def lengths(self) -> np.ndarray:
        return np.arange(self.n)

    def specimen(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        return {"k": torch.full((len(indices),), 9)}


DERIVED = {
    "known tokens": (lambda: KnownTokens(Peculiar(), 32), range(10)),
    "a view": (lambda: View(Peculiar(), 2, 6), range(2, 6)),
    "a view of known tokens": (lambda: View(KnownTokens(Peculiar(), 32), 2, 6), range(2, 6)),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_what_a_source_says_of_itself_holds_for_what_is_made_of_it(kind):
    make, samples = DERIVED[kind]
    source = make()
    assert Source.__annotations__.keys() == SAYS.keys()
    assert {key: getattr(source, key) for key in SAYS} == SAYS
    assert source.specimen(np.arange(2))["k"].tolist() == [9, 9]
    assert source.lengths is not None and source.lengths.tolist() == list(samples)
    assert source.rows(np.arange(len(source)))["k"].tolist() == list(samples)
