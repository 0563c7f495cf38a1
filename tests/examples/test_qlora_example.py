"""The script with a pretrained model in four bits, where its packages are installed."""

from __future__ import annotations

import json
import re

import pytest

from helpers.scripts.example_runs import python

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("all_minilm_l6_v2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_pretrained_model_in_four_bits_learns_what_texts_are_about(cache, tmp_path):
    output = tmp_path / "run"
    settings = {
        "--output_dir": str(output),
        "--per_device_train_batch_size": "16",
        "--max_steps": "30",
        "--max_length": "24",
        "--save_strategy": "no",
        "--report_to": "none",
    }
    words = [word for pair in settings.items() for word in pair]
    out = python("examples/qlora_minilm.py", *words, "--use_cpu", cache=cache)
    assert re.search(r"16 samples a step, all of the state", out)
    assert json.loads((output / "eval_results.json").read_text())["eval_accuracy"] > 0.8
    assert (output / "adapter_model.safetensors").is_file()
