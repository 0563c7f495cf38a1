"""Models that do not call all of their units in one order are told so while they are measured."""

from __future__ import annotations

import pytest
import toys
from jobs import LENGTH, train, write_job
from sweeps import measure
from torch.utils.data import default_collate

from gpumix.engine.coroutine import ModelError
from gpumix.hardware.runtime import open_device
from gpumix.spec.cluster import DeviceClass

CARD = [{"class": "only", "accelerator": "cpu", "memory": "64 MiB"}]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"calls": []}, "the model called none of its units: 'blocks.0'"),
        ({"calls": [0, 2]}, "the model did not call its unit 'blocks.1'"),
        ({"calls": [0, 2, 1], "by_size": True}, "call 2 was of 'blocks.2' in one pass, of"),
        ({"calls": [0, 1, 2, 2], "by_size": True}, "call 4 was of 'blocks.2' in one pass, of"),
    ],
)
def test_refused(tmp_path, arguments, told):
    model = {"factory": "toys:selective", "arguments": arguments}
    job = write_job(tmp_path, model=model, cluster=CARD)
    with pytest.raises(ModelError, match=told) as caught:
        train(job)
    assert "plan" not in caught.value.fix


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("calls", [[0, 2], [0, 2, 1], [0, 1, 2, 2]])
def test_of_one_batch_too_all_passes_are_alike(calls, before):
    """Layers that are left out at random, say: whichever pass of what is measured they lack in."""
    samples = toys.tokens(length=LENGTH)
    with (
        open_device(DeviceClass(name="one", accelerator="cpu", memory_bytes=2**26), 0) as runtime,
        pytest.raises(ModelError, match=r"call \d was of '.+' in one pass, of '.+' in another"),
    ):
        measure(
            runtime,
            lambda: toys.selective(calls, before=before),
            largest=1,
            make_batch=lambda n: default_collate(samples[:n]),
        )
