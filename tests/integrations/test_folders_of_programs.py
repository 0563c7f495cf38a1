"""Where a program's run writes: what it may not replace is told before anything is measured."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gpumix.integrations import hosted
from gpumix.spec.errors import InputError


@pytest.mark.parametrize("kind", ["run", "plan", "profile"])
def test_what_a_newer_gpumix_left_is_kept(tmp_path, monkeypatch, kind):
    def measured(*arguments, **options):
        raise AssertionError("the model was measured")

    monkeypatch.setattr(hosted, "profile", measured)
    file = tmp_path / f"{kind}.json"
    newer = json.dumps({"kind": kind, "schema_version": 99})
    file.write_text(newer)
    training = hosted.Training(torch.zeros, sequence_length=1, global_batch=1)
    with pytest.raises(InputError) as caught:
        hosted.host(nn.Linear(1, 1), training, folder=tmp_path)
    assert caught.value.why == "a newer gpumix wrote it"
    assert file.read_text() == newer
