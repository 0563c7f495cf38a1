"""Models that do not call all of their units in one order are told so while they are measured."""

from __future__ import annotations

import pytest
from jobs import train, write_job

from gpumix.engine.coroutine import ModelError

CARD = [{"class": "only", "accelerator": "cpu", "memory": "64 MiB"}]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"calls": []}, "the model called none of its units: 'blocks.0'"),
        ({"calls": [0, 2]}, "the model did not call its unit 'blocks.1'"),
        ({"calls": [0, 2, 1], "by_size": True}, "call 2 was of 'blocks.2' for one batch, of"),
        ({"calls": [0, 1, 2, 2], "by_size": True}, "call 4 was of 'blocks.2' for one batch, of"),
    ],
)
def test_refused(tmp_path, arguments, told):
    model = {"factory": "toys:selective", "arguments": arguments}
    job = write_job(tmp_path, model=model, cluster=CARD)
    with pytest.raises(ModelError, match=told) as caught:
        train(job)
    assert "plan" not in caught.value.fix
