"""Jobs whose samples are documents: packed, padded, or tokenised as they are read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from gpumix.doctor.rank_watch import RankWatch
from gpumix.schema.errors import InputError
from gpumix.train.controller import JobController
from helpers.errors import raises
from helpers.extended import left_out
from helpers.runs.jobs import CLUSTER, metrics, plan_for, progress, train, write_job

LENGTH = 24
UNLIKE = [one | {"count": 1} for one in CLUSTER]
GPT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
GPT |= {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256}
LINES = ["the cat sat on the mat"[: 2 + 7 * k % 21] for k in range(60)]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES))
    return path


def write(folder: Path, data: dict[str, object], **changes: object) -> Path:
    job = {
        "model": {"config": GPT},
        "data": {"validation_split": 0.1, **data},
        "sequence_length": LENGTH,
        "max_steps": 4,
        "eval_steps": 2,
        "lr_scheduler": {"type": "constant"},
    }
    return write_job(folder, **(job | changes))


STREAM = {
    "factory": "toys:text_stream",
    "arguments": {"lines": LINES},
    "tokenize": "on-the-fly",
}
LINE_BY_LINE = {"text": ["lines.txt"], "document": "line"}
DATA = [
    {**LINE_BY_LINE, "packing": "none", "bucketing": True},
    {**LINE_BY_LINE, "packing": "documents"},
    {"dataset": "saved", "packing": "none", "tokenize": "on-the-fly"},
    {**STREAM, "packing": "none"},
    {**STREAM, "packing": "documents"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    left_out(DATA, DATA[1:]),
    ids=["bucketed", "packed", "on the fly", "a stream padded", "a stream packed"],
)
def test_a_run_learns_and_goes_on_where_it_was(tmp_path, text, data):
    if "dataset" in data:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": LINES}).save_to_disk(str(tmp_path / "saved"))
    job = write(tmp_path, data, cluster=UNLIKE, eval_steps=2, eval_batches=1)
    plan = plan_for(job, (5, 3), (0.7, 0.3))
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=plan)
    assert all(math.isfinite(loss) for loss in whole.losses) and len(whole.losses) == 4
    assert whole.losses[-1] < whole.losses[0]
    assert len(metrics(tmp_path / "whole", "evaluation")) == 2
    train(job, "max_steps=2", plan=plan)
    assert train(job, plan=plan, resume=True).losses == pytest.approx(whole.losses[2:], rel=1e-5)
    steps = metrics(tmp_path / "whole")
    tokens = [step["tokens"] for step in steps]
    if "bucketing" in data:
        lengths = {len(line) + 1 for line in LINES}
        assert 8 * min(lengths) <= tokens[0] <= 8 * max(lengths)
        assert metrics(tmp_path / "run")[-1]["tokens"] == tokens[-1]
    else:
        assert tokens == [8 * LENGTH * step for step in (1, 2, 3, 4)]


def test_tokens_a_second_leave_out_padding_wherever_they_are_told(tmp_path, text):
    alone = [{"class": "device", "accelerator": "cpu", "memory": "64 MiB"}]
    data = {**LINE_BY_LINE, "packing": "none", "bucketing": True}
    job = write(tmp_path, data, cluster=alone)
    plan = plan_for(job, [8], [1.0])
    summary = train(job, plan=plan)
    steps = metrics(tmp_path / "run")
    totals = [0, *(step["tokens"] for step in steps)]
    tokens = [after - before for before, after in pairwise(totals)]
    assert len(set(tokens)) > 1 and max(tokens) < 8 * LENGTH
    assert [s["tokens_per_s"] * s["step_s"] for s in steps] == pytest.approx(tokens)
    shown = progress(tmp_path / "run")
    assert shown["tokens_per_s"] * shown["step_s"] == pytest.approx(sum(tokens[2:]) / 2)
    assert (summary.tokens_per_s, summary.step_s) == (shown["tokens_per_s"], shown["step_s"])
    assert summary.classes[0]["tokens_per_s"] == pytest.approx(summary.tokens_per_s)
    recent = metrics(tmp_path / "run", "ranks")[-1]["ranks"][0]["tokens_per_s"]
    median_s = max(step["step_s"] for step in steps[2:])  # of two, the upper one
    assert recent * median_s == pytest.approx(sum(tokens[2:]) / 2)
    looks = RankWatch({}, tmp_path / "printed", gpu=False, looks=True)  # at a step more
    trial = JobController.of_file(job, [], debug=True).try_out(plan, 2, watcher=looks)
    assert trial.tokens_per_s * trial.step_s == pytest.approx(sum(tokens[2:]) / 2)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("line", "told"), [("a" * LENGTH, True), ("short", False)], ids=["as long as any", "short"]
)
def test_utilisation_is_told_of_samples_as_long_as_planned(tmp_path, line, told):
    """What is planned for whole samples would be many times what short ones take."""
    (tmp_path / "lines.txt").write_text("\n".join([line] * 40))
    emulated = [{"class": "device", "emulate": "50 MFLOP/s", "memory": "64 MiB"}]
    data = {**LINE_BY_LINE, "packing": "none"}
    job = write(tmp_path, data, cluster=emulated, profile_cache="profiles", profile_budget=1)
    pipeline = JobController.of_file(job, [], debug=True)
    train(job, plan=pipeline.plan(pipeline.profile()))
    for record in metrics(tmp_path / "run", "ranks"):
        (rank,) = record["ranks"]
        assert rank["tokens_per_s"] > 0
        if told:
            assert 0.0 < rank["mfu"] <= rank["hfu"] < 1.2
        else:
            assert rank["mfu"] is None and rank["hfu"] is None


def test_documents_may_be_as_short_as_any_model_has_positions_for(tmp_path):
    short = {"config": GPT | {"n_positions": 4}}
    (tmp_path / "lines.txt").write_text("a\nbc\nd\n" * 20)
    job = write(
        tmp_path,
        {**LINE_BY_LINE, "packing": "documents"},
        model=short,
        sequence_length=4,
        max_steps=1,
    )
    assert math.isfinite(train(job, plan=plan_for(job)).losses[0])


def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path, text):
    bloom = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2}
    bloom |= {"vocab_size": 264}
    job = write(tmp_path, {**LINE_BY_LINE, "packing": "documents"}, model={"config": bloom})
    with raises(InputError, code="packed-documents-mixed"):
        train(job, plan=plan_for(job))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"text": ["a"], "bucketing": True}, {"code": "values-conflict", "what": "bucketing"}),
        (
            {"text": ["a"], "tokenize": "on-the-fly", "packing": "none"},
            {"code": "values-conflict", "what": ("text", "tokenize")},
        ),
        (
            {"dataset": "a", "tokenize": "on-the-fly"},
            {"code": "values-conflict", "what": "packing: documents"},
        ),
        (
            {"dataset": "a", "document": "line"},
            {"code": "values-conflict", "what": ("document", "text")},
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, data, says):
    with raises(InputError, **says):
        train(write(tmp_path, data))
