"""Jobs on text, on saved datasets and on tensors, in two precisions and with both optimizers."""

from __future__ import annotations

import math
import re

import pytest
import transformers

from gpumix.data.order.global_order import GlobalOrder
from gpumix.schema.errors import InputError, MachineError, TrainingError
from gpumix.schema.reading.read import read_job
from gpumix.train.checkpoint.export import export
from gpumix.train.controller import JobController
from gpumix.train.rank_setup.model import build_model, check_model_fits_data, make_config
from helpers.errors import raises
from helpers.extended import every_second
from helpers.runs.jobs import OWN_PROFILES, gpumix, metrics, plan_for, train, write_job

ALONE = [{"class": "device", "accelerator": "cpu", "memory": "64 MiB"}]
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "lay", "by", "the", "door"]

GPT = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 8,
    "vocab_size": 264,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        lines = (" ".join(WORDS[k % 5 :]) for k in range(number, number + 12))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def gpt_job(folder, data: dict, **changes):
    config = GPT | changes.pop("config", {})
    return write_job(
        folder,
        model={"config": config},
        data=data,
        cluster=ALONE,
        max_steps=3,
        global_batch_size=4,
        **changes,
    )


def assert_learns(summary) -> None:
    assert all(math.isfinite(loss) for loss in summary.losses)
    assert summary.losses[-1] < summary.losses[0]


# -- text ------------------------------------------------------------------------------------------


def test_text_with_a_tokenizer_trained_on_it(tmp_path, text):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train([str(file) for file in text.iterdir()], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    job = gpt_job(
        tmp_path,
        {"text": ["text"]},
        tokenizer="tokenizer.json",
        config={"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0},
    )
    assert_learns(train(job, plan=plan_for(job, [4], [1.0])))
    # It goes with the exported model.
    told: list[str] = []
    model = export(tmp_path / "run", tmp_path / "model", tell=told.append)
    assert told == [f"its tokenizer is copied from {tmp_path / 'tokenizer.json'}"]
    words = " ".join(WORDS)
    found = transformers.AutoTokenizer.from_pretrained(model)
    assert found(words)["input_ids"] == tokenizer.encode(words).ids
    assert len({file.stat().st_mode for file in model.iterdir()}) == 1
    (tmp_path / "tokenizer.json").unlink()
    told.clear()
    assert not (export(tmp_path / "run", model, tell=told.append) / "tokenizer.json").exists()
    assert told == [
        f"its tokenizer is not at {tmp_path / 'tokenizer.json'} any more: copy it into the folder "
        "by hand"
    ]


@pytest.mark.slow
def test_a_folder_of_datasets(tmp_path):
    import datasets

    rows = [" ".join(WORDS[k % 7 :]) for k in range(40)]
    datasets.Dataset.from_dict({"story": rows}).save_to_disk(tmp_path / "saved")
    job = gpt_job(tmp_path, {"dataset": "saved", "column": "story"}, eval_steps=3)
    assert_learns(train(job, plan=plan_for(job, [4], [1.0])))
    assert metrics(tmp_path / "run", "evaluation")[0]["loss"] > 0


@pytest.mark.extended
def test_what_the_data_holds_is_no_memory_of_a_device_that_is_a_cpu(tmp_path):
    data = {"factory": "toys:large_tokens", "arguments": {"mib": 100}, "validation_split": 0.1}
    job = write_job(tmp_path, data=data, max_steps=2)  # on devices of 64 and 32 MiB
    assert len(train(job, plan=plan_for(job)).losses) == 2


@pytest.mark.parametrize("content", [None, ""])
def test_data_that_is_not_there_or_empty_is_refused(tmp_path, text, content):
    job = gpt_job(tmp_path, {"text": ["text", "more.txt"]})
    for file in text.iterdir():
        file.unlink()
    if content is not None:
        (tmp_path / "more.txt").write_text(content)
    with pytest.raises(InputError) as caught:
        train(job)
    assert re.search("more.txt|text", str(caught.value))


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path, text):
    job = gpt_job(tmp_path, {"text": ["text"]}, tokenizer="tokenizer.json")
    with raises(InputError, code="tokenizer-unreadable") as caught:
        check_model_fits_data(read_job(job), tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


# -- tensors ---------------------------------------------------------------------------------------


def in_bf16(plan):
    (stage,) = plan.stages
    workers = tuple(w.model_copy(update={"compute_dtype": "bf16"}) for w in stage.workers)
    stages = (stage.model_copy(update={"workers": workers}),)
    return plan.model_copy(update={"stages": stages, "communication_dtype": "bf16"})


def test_bf16_stays_close_to_fp32(tmp_path):
    job = write_job(tmp_path)
    plan = plan_for(job)
    exact = train(job, f"output_dir={tmp_path / 'exact'}", plan=plan)
    coarse = train(job, "precision=bf16", plan=in_bf16(plan))
    assert coarse.losses == pytest.approx(exact.losses, rel=0.02)
    assert coarse.losses != exact.losses


@pytest.mark.extended
def test_sgd_with_momentum_is_resumed_to_the_bit(tmp_path):
    job = write_job(
        tmp_path,
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        lr_scheduler={"type": "constant"},
    )
    plan = plan_for(job)
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=plan)
    assert_learns(whole)
    train(job, "max_steps=3", plan=plan)
    assert train(job, plan=plan, resume=True).losses == whole.losses[3:]


@pytest.mark.extended
def test_another_optimizer_cannot_go_on(tmp_path):
    job = write_job(tmp_path)
    plan = plan_for(job)
    train(job, "max_steps=1", plan=plan)
    with raises(InputError, code="checkpoint-of-another-optimizer"):
        train(job, "optimizer.name=sgd", plan=plan, resume=True)


@pytest.mark.extended
def test_other_data_cannot_go_on(tmp_path):
    job = write_job(tmp_path)
    plan = plan_for(job)
    train(job, "max_steps=1", plan=plan)
    with raises(InputError, code="checkpoint-of-other-data"):
        train(job, "data.arguments={samples: 80}", plan=plan, resume=True)


def test_samples_that_cannot_be_read_stop_the_run_or_are_counted(tmp_path):
    data = {"factory": "toys:damaged_tokens", "validation_split": 0, "bad_samples": "skip"}
    job = write_job(tmp_path, data=data)
    plan = plan_for(job)
    plan.save(tmp_path / "plan.json")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", "--json", folder=tmp_path)
    assert done.code == 0, done.err
    read = GlobalOrder(64, 0).span(0, 6 * 8).reshape(6, 8)
    bad = [int((read[:, own] % 10 == 9).sum()) for own in (range(4), range(4, 6), range(6, 8))]
    assert [device["skipped"] for device in done.json()["devices"]] == bad and sum(bad)
    told = " ".join(done.err.split())
    assert (
        told.count(f"could not be read, and were skipped: {bad[0]} of rank 0 (device 'big-0'") == 1
    )
    with raises(TrainingError, code="sample-unreadable", what="OSError: a bad sector") as caught:
        train(job, "data.bad_samples=stop", f"output_dir={tmp_path / 'other'}", plan=plan)
    assert re.search(r"\d*9\b", caught.value.what)


@pytest.mark.extended
def test_bad_samples_are_skipped_in_all_that_a_run_does(tmp_path):
    """While it is measured what samples take, and in evaluations; the first one is bad, too."""
    data = {"factory": "toys:damaged_tokens", "arguments": {"first": 0}, "validation_split": 0.2}
    job = write_job(
        tmp_path,
        data={**data, "bad_samples": "skip"},
        cluster=ALONE,
        **OWN_PROFILES | {"profile_budget": 1},
        eval_steps=1,
        max_steps=2,
    )
    summary = train(job)
    assert len(summary.losses) == 2
    assert len(metrics(tmp_path / "run", "evaluation")) == 2
    trained = GlobalOrder(52, 0).span(0, 2 * 8)
    bad = int((trained % 10 == 9).sum() + (trained == 0).sum())
    # The first batch of the held-out samples, 52 to 59, has one in each evaluation.
    assert [device["skipped"] for device in summary.devices] == [bad + 1]
    with raises(TrainingError, code="sample-unreadable", what=(0, "toys:damaged_tokens")):
        JobController.of_file(job, ["data.bad_samples=stop"], debug=False).profile(fresh=True)


@pytest.mark.extended
def test_a_sample_that_never_comes_while_devices_are_measured_is_named(tmp_path):
    data = {"factory": "toys:absent_tokens", "arguments": {"first": 8}, "validation_split": 0}
    own = OWN_PROFILES | {"profile_budget": 1}
    job = write_job(tmp_path, data=data, **own, timeout=5)
    with raises(TrainingError, code="sample-timeout", what="toys:absent_tokens"):
        JobController.of_file(job, [], debug=False).profile()


@pytest.mark.parametrize("held_out", every_second([0.02, 0.06]))
def test_an_evaluation_may_have_fewer_samples_than_a_batch(tmp_path, held_out):
    """One or three of 64 samples: some ranks get no row."""
    job = write_job(
        tmp_path,
        data={"factory": "toys:tokens", "validation_split": held_out},
        eval_steps=1,
        eval_batches=3,
    )
    train(job, "max_steps=2", plan=plan_for(job))
    losses = [record["loss"] for record in metrics(tmp_path / "run", "evaluation")]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_an_evaluation_needs_samples(tmp_path):
    job = write_job(
        tmp_path,
        data={"factory": "toys:tokens", "validation_split": 0},
        eval_steps=1,
    )
    with raises(InputError, code="no-held-out-samples"):
        train(job, "max_steps=2", plan=plan_for(job))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# -- models of transformers ------------------------------------------------------------------------


def check(tmp_path, **config):
    job = read_job(gpt_job(tmp_path, {"text": ["text"]}, config=config))
    check_model_fits_data(job, tmp_path)
    return build_model(job.model, folder=tmp_path, seed=0)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"n_positions": 4}, "the model has 4 positions, sequence_length is 8"),
        ({"vocab_size": 200}, "the tokenizer has 257 tokens, the model 200"),
        ({"model_type": "gpt99"}, "knows no model of type 'gpt99'"),
        ({"n_layer": "two"}, "no valid transformers configuration"),
        ({"n_embdd": 32}, "unknown key 'model.config.n_embdd'"),
        ({"n_head": 3}, "transformers cannot build a causal-lm model"),
    ],
)
def test_a_model_that_cannot_learn_the_data_is_refused(tmp_path, config, told):
    with pytest.raises(InputError) as caught:
        check(tmp_path, **config)
    assert told in caught.value.what
    assert caught.value.exit_code == 2


def test_a_model_may_have_more_of_everything(tmp_path):
    check(tmp_path, n_positions=16, vocab_size=300)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "rope_theta", 1e6),
        ("gpt_neox", "rotary_pct", 0.5),
        ("t5", "decoder_start_token_id", 0),
    ],
)
def test_keys_that_a_configuration_shows_under_another_name_are_taken(
    tmp_path, model_type, key, value
):
    job = read_job(gpt_job(tmp_path, {"text": ["text"]}))
    found = make_config(
        job.model.model_copy(update={"config": {"model_type": model_type, key: value}})
    )
    assert str(value) in str(found.to_dict())


def test_text_is_for_models_that_foretell_the_next_token(tmp_path, text):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    bert = {"config": {"model_type": "bert", **small, "intermediate_size": 16}}
    job = write_job(tmp_path, model=bert, data={"text": ["text"]}, cluster=ALONE)
    with raises(InputError, code="labels-copy-input"):
        train(job, "model.task=masked-lm", "max_steps=1")


def test_a_token_that_the_model_does_not_know_is_named_with_its_sample(tmp_path):
    data = {"factory": "toys:tokens", "validation_split": 0}
    job = gpt_job(tmp_path, data, config={"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0})
    with raises(InputError, code="token-outside-vocabulary", what=(0, 19)):
        train(job, "max_steps=2")


def test_a_step_without_a_label_that_counts_is_told_as_that(tmp_path):
    data = {"factory": "toys:masked_tokens", "validation_split": 0}
    job = gpt_job(tmp_path, data)
    with raises(TrainingError, code="step-without-labels", what=1):
        train(job, "max_steps=2", plan=plan_for(job, [4], [1.0]))


def test_a_task_that_the_model_does_not_do_is_refused(tmp_path):
    job = read_job(gpt_job(tmp_path, {"text": ["text"]}))
    wrong = job.model.model_copy(update={"task": "seq2seq-lm"})
    with raises(InputError, code="model-task-unsupported", what="seq2seq-lm"):
        build_model(wrong, folder=tmp_path, seed=0)


def test_a_configuration_may_lie_in_a_file(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(GPT))
    job = read_job(write_job(tmp_path, model={"config": "config.json"}, data={"text": ["text"]}))
    assert make_config(job.model).n_embd == 16


def test_transformers_may_be_missing(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    job = read_job(gpt_job(tmp_path, {"text": ["text"]}))
    with raises(MachineError, code="package-missing") as caught:
        check_model_fits_data(job, tmp_path)
    assert 'pip install ".[transformers]"' in caught.value.fix
    assert caught.value.exit_code == 3
