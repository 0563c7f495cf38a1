"""`gpumix export`: the weights of a run as transformers loads them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from helpers.runs.jobs import PAIR, gpumix, plan_for, train, write_job
from helpers.runs.verbs import here

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
OF_TOKENS = "no tokenizer is written: its data may be tokens already, not bytes of texts\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Beside a run of two devices that each hold a part of the weights."""
    folder = tmp_path_factory.mktemp("exported")
    job = write_job(folder, model={"config": LLAMA}, max_steps=2, cluster=PAIR)
    train(job, plan=plan_for(job, (4, 4), (0.5, 0.5)))
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The weights in the run's checkpoint, as torch itself reads them."""
    file = tmp_path_factory.mktemp("torch") / "model.pt"
    dcp_to_torch_save(folder / "run" / "checkpoints" / "step-00000002", file)
    return torch.load(file, weights_only=True)["model"]


def loaded(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.state_dict()


def test_transformers_loads_the_weights_of_the_checkpoint(folder, trained):
    done = gpumix("export", "run", "--to", "models/first", folder=folder)
    assert done.code == 0, done.err
    assert (done.out, done.err) == ("", f"{OF_TOKENS}wrote models/first\n")
    again = here("export", "run", "--to", "models/first", folder=folder)
    assert again.err.endswith("wrote models/first, in place of the former export\n")
    found = loaded(folder / "models" / "first")
    assert found.keys() == trained.keys()
    for name, weight in found.items():
        assert torch.equal(weight, trained[name]), name


def test_json_is_one_document_on_stdout(folder, trained):
    checkpoint = "run/checkpoints/step-00000002"
    done = here("export", checkpoint, "--to", "half", "--dtype", "bf16", "--json", folder=folder)
    assert done.code == 0, done.err
    assert done.json() == {"folder": "half"}
    assert done.err == OF_TOKENS
    for name, weight in loaded(folder / "half").items():
        assert torch.equal(weight, trained[name].bfloat16()), name
