"""`gpumix init` writes a job, or a script, that runs; `gpumix schema` what jobs are."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from gpumix.cli import app
from gpumix.cli.verbs import init
from gpumix.schema.reading.read import read_job
from helpers.runs.verbs import gpumix, refused


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with some texts and two emulated devices, in which commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("To be, or not to be.\n\n" * 400)
    (tmp_path / "cluster.yaml").write_text(
        "- {class: big, emulate: 40 GFLOP/s, memory: 1 GiB}\n"
        "- {class: small, emulate: 20 GFLOP/s, memory: 512 MiB}\n"
    )
    return tmp_path


def test_a_size_is_that_of_the_model_that_trains(desk):
    assert gpumix("init", "--data", "texts", "--model", "20M").exit_code == 0
    from gpumix.hardware.estimates.decoder_shapes import make_decoder

    config = read_job(desk / "job.yaml").model.config
    assert make_decoder(config).parameters == pytest.approx(20e6, rel=0.3)


def test_a_folder_without_weights_or_texts_is_refused(desk):
    weights = pretrained(desk / "llama")
    (weights / "model.safetensors").unlink()
    assert "and no *.safetensors" in refused("init", "--data", "texts", "--model", "llama")
    (desk / "empty").mkdir()
    assert "no files to train on" in refused("init", "--data", "empty")


def test_the_job_is_one_and_its_schema_says_so(desk):
    done = gpumix("init", "--data", "texts")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("Wrote job.yaml.")
    job = read_job(desk / "job.yaml")
    assert job.model.config["vocab_size"] == 264 and job.cluster == "auto"
    schema = json.loads(gpumix("schema").stdout)
    written = yaml.safe_load((desk / "job.yaml").read_text())
    Draft202012Validator(schema).validate(written)
    assert list(Draft202012Validator(schema).iter_errors(written | {"stepz": 1}))


@pytest.mark.slow
def test_the_job_trains(desk):
    done = gpumix(
        "init", "--data", "texts", "--model", "20M", "--cluster", "cluster.yaml", "--json"
    )
    told = json.loads(done.stdout)
    smaller = (
        "model.config.num_hidden_layers=2",
        "sequence_length=16",
        "global_batch_size=4",
        "max_steps=2",
    )
    sets = [word for one in smaller for word in ("--set", one)]
    narrow = ("hidden_size=64", "num_attention_heads=2", "num_key_value_heads=2", "head_dim=32")
    sets += [word for one in narrow for word in ("--set", f"model.config.{one}")]
    sets += ["--set", "lr_scheduler.warmup_steps=0", "--set", "advanced.profile_cache=cache"]
    for command in told["next"]:
        verb, target = command.split()[1:3]
        done = gpumix(verb, target, *(sets if verb != "report" else []))
        assert done.exit_code == 0, f"{command}: {done.stderr}"
    assert (desk / "runs" / "first" / "report.html").is_file()


def pretrained(folder, tokenizer="tokenizer.json"):
    """A tiny pretrained model with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "To", "be", "or", "not", "to", ",", "."]
    known = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=known, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_weights_bring_their_own_tokenizer(desk):
    weights = pretrained(desk / "llama")
    assert gpumix("init", "--data", "texts", "--model", "llama").exit_code == 0
    job = read_job(desk / "job.yaml")
    assert job.tokenizer == weights / "tokenizer.json"
    assert job.model.weights == weights


@pytest.mark.extended
@pytest.mark.slow
def test_the_script_trains_adapters(desk):
    pretrained(desk / "llama")
    done = gpumix("init", "--data", "texts", "--model", "llama", "--lora")
    assert done.exit_code == 0, done.stderr
    text = (desk / "train.py").read_text()
    smaller = text.replace("max_steps=200", "max_steps=2")
    (desk / "train.py").write_text(smaller.replace("batch_size=16", "batch_size=2"))
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (desk / "runs" / "first" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --data FOLDER"),
        (("--data", "none"), "there is no such file or folder"),
        (("--data", "texts", "--lora"), "adapters need pretrained weights"),
        (("--data", "texts", "--cluster", "none.yaml"), "there is no such cluster file"),
        (("--data", "texts", "--cluster", "rtx4090 + p40"), "needs devices that are here"),
        (("--data", "texts", "--model", "7Q"), "there is no model '7Q'"),
        (("--data", "texts", "--model", "1M"), "fix: give a size from 2M to "),
        (("cluster.yaml", "--data", "texts"), "this file is there already"),
    ],
)
def test_wrong_answers(desk, arguments, said):
    before = sorted(desk.rglob("*"))
    assert said in refused("init", *arguments)
    assert sorted(desk.rglob("*")) == before


def test_a_wrong_answer_is_asked_for_again(desk, monkeypatch):
    monkeypatch.setattr(init, "sys", SimpleNamespace(stdin=Terminal(), stderr=Terminal()))
    answers = "1M\n20M\ntextz\ntexts\nnone.yaml\nauto\nruns/mine\n"
    done = CliRunner().invoke(app, ["init"], input=answers)
    assert done.exit_code == 0, done.output
    told = done.stderr
    for problem in ("no model of 1 M parameters", "no such file or folder", "no such cluster file"):
        assert problem in told
    job = read_job(desk / "job.yaml")
    assert job.data.text == (desk / "texts",)
    assert job.output_dir == desk / "runs" / "mine"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- the tokenizer of a job ------------------------------------------------------------------------


def write(desk, **changes):
    job = {
        "model": {"config": {"model_type": "llama", "vocab_size": 32_000}},
        "data": {"text": ["texts"]},
        "sequence_length": 16,
        "global_batch_size": 4,
        "max_steps": 2,
    }
    (desk / "job.yaml").write_text(yaml.safe_dump(job | changes))
    return desk / "job.yaml"


def test_bytes_are_not_taken_by_default_for_a_model_of_many_tokens(desk):
    said = refused("plan", write(desk), "--cluster", "rtx3090")
    assert "names no tokenizer" in said and "32,000 tokens" in said
    assert "job.yaml:" in said
    assert read_job(write(desk, tokenizer="bytes")).tokenizer == "bytes"
    fits = {"config": {"model_type": "llama", "vocab_size": 264}}
    assert read_job(write(desk, model=fits)).tokenizer == "bytes"


def test_samples_that_are_tokens_need_no_tokenizer(desk):
    job = write(desk, data={"factory": "mine:samples"})
    assert read_job(job).tokenizer == "bytes"


def test_bytes_are_refused_for_weights_of_another_tokenizer(desk):
    weights = pretrained(desk / "llama")
    model = {"config": str(weights / "config.json"), "weights": str(weights)}
    said = refused("plan", write(desk, model=model, tokenizer="bytes"), "--cluster", "rtx3090")
    assert "the weights were trained with another one" in said
