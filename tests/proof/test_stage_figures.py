"""What stages of the proof compute from what they measure."""

from __future__ import annotations

import pytest
import torch

from compared.setting import Setting
from proof import systems, waits
from proof.bench import Bench
from proof.lines import RESULTS, STAGE, Bar, Lines, Stamp
from proof.models import REHEARSED, SMALL, TINY_LLAMA
from proof.rank import Run
from proof.unequal import FOUR, TWO, by_speed


@pytest.fixture
def bench(tmp_path):
    lines = Lines(tmp_path / RESULTS, Stamp("cpu", "2.11.0", "abc"))
    return Bench("stage", "cpu", tmp_path, 1e9, lines)


def test_parameters_are_counted_as_the_model_has_them():
    model = REHEARSED.build_on(torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == REHEARSED.parameters
    assert 1.33e8 < SMALL.parameters < 1.35e8


def test_the_large_model_costs_what_is_known_of_it():
    """1.1 billion parameters; 7.31 GFLOP a token, attention not halved."""
    assert TINY_LLAMA.parameters == 1_100_048_384
    assert TINY_LLAMA.flops_per_token == pytest.approx(7.31e9, rel=1e-3)


def test_the_same_model_is_built_each_time():
    one, two = (REHEARSED.build_on(torch.device("cpu")).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_plan_is_changed_in_all_that_is_asked_for():
    model = REHEARSED.build_on(torch.device("cpu"))
    plan = Setting(REHEARSED, 1, 4, 2).plan(model, 0, "sequential")
    changed = systems.changed(plan, {"head": "chunked"}, {"state_on": "host"})
    (worker,) = changed.workers
    assert (worker.mode.head, worker.state_on, worker.mode.order) == (
        *("chunked", "host", "sequential"),
    )
    assert plan.workers[0].mode.head == "whole"


@pytest.mark.parametrize(
    "samples, micro_batch, speeds, expected",
    [
        (1024, 64, [3.0, 1.0], [768, 256]),
        (16, 1, [40, 25, 15, 10], [8, 5, 2, 1]),
        (16, 1, [1.0, 1000.0], [1, 15]),  # nobody is without samples
        (8, 2, [1.0, 1.0], [4, 4]),
    ],
)
def test_samples_are_split_by_speed(samples, micro_batch, speeds, expected):
    found = by_speed(samples, micro_batch, speeds)
    assert sum(found) == samples
    assert found == expected


@pytest.mark.parametrize("crew", [TWO, FOUR])
def test_crews_train_the_same_batches(crew):
    run = Run(vars(REHEARSED), crew.shares(), 0, "fp32")
    alone = Run(vars(REHEARSED), ((run.global_batch, 1, 1.0),), 0, "fp32")
    device = torch.device("cpu")
    parts = [run.batch(1, rank, device)["input_ids"] for rank in range(len(crew.percents))]
    assert run.global_batch == 16
    assert torch.equal(torch.cat(parts), alone.batch(1, 0, device)["input_ids"])
    assert sum(share for _, _, share in crew.shares()) == pytest.approx(1.0)


def test_values_that_are_read_are_noted_by_who_reads_them(bench):
    from gpumix.engine.batch.batch_split import find_padding_starts

    mask = torch.ones(2, 4, dtype=torch.long)
    with waits.watched(bench) as seen:
        torch.ones(3).sum().item()
        find_padding_starts({"attention_mask": mask}, [range(2)])
    assert seen.others == {"elsewhere": 1}
    assert [line.split(":")[0] for line in seen.ours] == ["engine/batch/batch_split.py"]
    assert torch.Tensor.item is not None and torch.ones(1).item() == 1.0


def test_a_measurement_that_fails_has_a_line_and_harms_no_other(bench):
    def fails():
        raise ValueError("no such kernel")

    assert bench.measured("bad", fails) == {}
    assert bench.measured("good", lambda: ({"x": 1.0}, ())) == {"x": 1.0}
    assert bench.failed == ["bad: ValueError"]
    text = bench.lines.file.read_text()
    assert "no such kernel" in text and '"x": 1.0' in text


def test_a_stage_is_not_well_if_one_of_its_measurements_missed_a_bar(bench):
    bench.measured("fast", lambda: ({"speed": 2.0}, [Bar("speed", least=1.0)]))
    assert bench.tell(STAGE, {})["ok"]
    bench.measured("slow", lambda: ({"speed": 0.5}, [Bar("speed", least=1.0)]))
    line = bench.tell(STAGE, {"split": 1})
    assert not line["ok"]
    assert line["figures"] == {"split": 1, "lines_missed": 1}


def test_figures_of_earlier_stages_are_those_of_the_same_device(bench):
    bench.lines.write("speed", "stage", {"tokens_per_s": 5.0})
    other = Lines(bench.lines.file, Stamp("NVIDIA T4", "2.11.0", "abc"))
    other.write("speed", "stage", {"tokens_per_s": 9.0})
    assert bench.earlier("speed") == {"tokens_per_s": 5.0}
    assert bench.earlier("smoke") == {}
