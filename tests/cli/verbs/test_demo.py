"""`gpumix demo` goes its whole way, on its own text and devices; only the model is smaller."""

from __future__ import annotations

import pytest

from gpumix.schema.plan.plan import Plan
from helpers.processes.commands import Done
from helpers.runs.jobs import checkpoints, gpumix, metrics, progress

pytestmark = pytest.mark.slow

SMALLER = [
    "model.config.n_layer=2",
    "model.config.n_embd=48",
    "sequence_length=32",
    "global_batch_size=8",
    # Few plans; of the even ones that are tried one.
    "techniques.max_pipeline_stages=1",
    "techniques.tensor_parallel_size=1",
    "techniques.zero_stages=3",
    "techniques.gradient_checkpointing=true",
    "techniques.state_on=device",
    "advanced.profile_budget=2",
]


def demo(folder, *arguments) -> Done:
    sets = [word for change in SMALLER for word in ("--set", change)]
    command = ("demo", "--output-dir", "mine", *sets, *arguments)
    done = gpumix(*command, folder=folder, timeout_s=200)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def first(folder):
    return demo(folder, "--max-steps", "3", "--json")


def test_a_demo_trains_and_compares_itself_with_an_even_split(first, folder):
    summary = first.json()
    assert summary["losses"] == [r["loss"] for r in metrics(folder / "mine")]
    assert len(summary["losses"]) == 3
    assert summary["losses"][-1] < summary["losses"][0]
    assert {c["device_class"] for c in summary["classes"]} == {"fast", "medium", "slow"}
    assert Plan.load(folder / "mine" / "plan.json").emulated
    told = " ".join(first.err.split())
    assert "four unequal devices are emulated on its CPU" in told and "the training, and" in told
    assert summary["speedup_vs_even"] > 0
    (even,) = metrics(folder / "mine", "compared")
    assert 1 <= even["tried"] <= 3
    assert f"{even['setting']})" in first.err.splitlines()[-1]
    speed = summary["speedup_vs_even"] * even["tokens_per_s"]
    assert (even["strategy"], speed) == ("even", pytest.approx(summary["tokens_per_s"]))
    last = first.err.splitlines()[-1]
    assert last.startswith(f"measured: {summary['speedup_vs_even']:.2f}x as fast as an even split")
    assert f"{summary['tokens_per_s']:,.0f} tokens/s" in first.err
    assert ("too busy to emulate the devices" in first.err) == (summary["all_overruns"] > 0)


@pytest.mark.extended
def test_a_demo_replaces_a_former_one(first, folder):
    done = demo(folder, "--max-steps", "4")
    assert done.out == ""
    assert "step 4/4" in done.err
    losses = [record["loss"] for record in metrics(folder / "mine")]
    assert len(losses) == 4 and max(losses) < 1.1 * losses[0]  # no rate that lets them jump
    assert checkpoints(folder / "mine") == ["step-00000004"]
    assert progress(folder / "mine")["state"] == "finished"
