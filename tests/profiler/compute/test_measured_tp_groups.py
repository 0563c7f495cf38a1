"""What is measured of devices that compute units together: whether they can divide a sequence too,
and what they tell each other then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.hardware.device import open_device
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.profile.measurements import TensorParallelMeasurement
from gpumix.schema.profile.profile import ROOT
from helpers.devices.sweeps import subject, virtual_time
from helpers.errors import raises
from helpers.extended import every_third
from helpers.training.models import ARCHITECTURES, LENGTH, WIDTH, Regression

DEGREE = 2
CLASS = DeviceClass(name="one", accelerator="cpu", memory_bytes=64 * 2**20)
# Of hidden states of one sample in fp32, a member's part.
PART = LENGTH // DEGREE * WIDTH * 4


def measured(what: Workload) -> dict[bool, TensorParallelMeasurement]:
    """By whether the sequence was divided."""
    what = replace(what, degrees={"one": (DEGREE,)})
    with virtual_time(), open_device(CLASS, 0) as runtime:
        found = measure_class(what, runtime, device_class="one", progress=lambda line: None)
    return {one_rank.sequence: one_rank for one_rank in found.tp_measurements}


def of_architecture(name: str) -> Workload:
    architecture, generator = ARCHITECTURES[name], torch.Generator().manual_seed(0)
    return subject(
        architecture.factory, largest=1, make_batch=lambda n: architecture.batch(n, generator)
    )


@pytest.mark.parametrize(
    ("name", "enters", "leaves"),
    every_third([("bert", (1,), ()), ("gpt2", (0,), ()), ("t5", (0, 2), (1,))]),
)
def test_where_a_sequence_is_divided_and_whole_again(name, enters, leaves):
    """BERT's first unit are its embeddings; T5 has two stacks. The head makes it whole too."""
    one_rank = measured(of_architecture(name))[True]
    assert (one_rank.enters, one_rank.leaves) == (enters, leaves)
    by_kind = dict(zip(one_rank.model.calls, one_rank.model.kind_of_call))
    for number, call in enumerate(one_rank.model.calls):
        part = one_rank.told[by_kind[call]].part
        assert (part is not None and part.values[0] == PART) == (number >= enters[0])
    assert ("exchange", PART) in [
        (one.operation, one.bytes.values[0] // one.times) for one in one_rank.told[ROOT].backward
    ]


@pytest.fixture(scope="module")
def of_llama() -> dict[bool, TensorParallelMeasurement]:
    return measured(of_architecture("llama"))


def test_each_sum_of_a_block_is_a_reduction_and_a_gather_of_its_halves(of_llama):
    whole, divided = (told(of_llama[way], "LlamaDecoderLayer") for way in (False, True))
    assert whole["forward"] == {("all_reduce", 2 * PART): 2}
    assert divided["forward"] == {("exchange", PART): 2, ("reduce", 2 * PART): 2}
    assert whole["gradient"] == whole["forward"] and divided["gradient"] == divided["forward"]
    assert of_llama[True].told["LlamaDecoderLayer"].summed == 2 * WIDTH  # of both norms


def told(one_rank: TensorParallelMeasurement, kind: str) -> dict[str, dict[tuple[str, float], int]]:
    return {
        way: {(c.operation, c.bytes.values[0] / c.times): c.times for c in collectives}
        for way, collectives in one_rank.told[kind]
        if way in ("forward", "gradient")
    }


def test_less_is_kept_of_a_divided_sequence(of_llama):
    (whole,), (divided,) = (of_llama[way].model.kinds for way in (False, True))
    assert divided.kept.values[0] == pytest.approx(whole.kept.values[0] / DEGREE, rel=0.01)
    assert divided.saved is not None and whole.saved is not None
    assert divided.saved.values[0] < whole.saved.values[0]


class Mixing(nn.Module):
    """Positions depend on each other outside of the divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) + self.down(torch.relu(self.up(x)))


MIXING = replace(
    subject(lambda: Regression([Mixing(), Mixing()]), largest=1),
    tensor={"**.up": "colwise", "**.down": "rowwise"},
)


def test_a_tensor_plan_that_divides_half_of_a_block_is_the_users_own_error():
    half = replace(MIXING, tensor={"**.up": "colwise"})
    assert not measured(half)
    with raises(InputError, code="tensor-plan-fails", what=2):
        measured(replace(half, requires_tensor_parallel=True))


def test_a_model_whose_positions_cannot_be_divided_is_measured_without():
    assert list(measured(MIXING)) == [False]
    assert list(measured(replace(MIXING, requires_tensor_parallel=True))) == [False]


def test_nor_is_that_an_error_but_where_nothing_else_is_wanted():
    assert not measured(replace(MIXING, sequence=(True,)))
    with raises(ModelError, code="positions-not-divisible"):
        measured(replace(MIXING, sequence=(True,), requires_tensor_parallel=True))
