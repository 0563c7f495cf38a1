"""Nothing of gpumix makes the host wait inside a step while the state is on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import cuda_device
import gpumix
from gpumix.schema.plan.stage import Mode
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_for, optimizer_for, own_rows

pytestmark = pytest.mark.gpu
OURS = str(Path(gpumix.__file__).parent)
STEPS, SAMPLES = 2, 4
# What `transformers` waits for by itself in each step: whether a mask hides anything, whether
# sequences are packed, and how many tokens each expert got.
MASKS, EXPERTS = "masking_utils.py", "moe.py"
OF_TRANSFORMERS: dict[str, set[str]] = {
    **{name: {MASKS} for name in ("gpt2", "llama", "qwen2", "qwen3", "phi3", "opt", "mistral")},
    **{name: {MASKS} for name in ("gpt-neox", "t5", "bart", "whisper")},
    "mixtral": {MASKS, EXPERTS},
}
# Experts are counted in backward too, by a kernel without a line of Python; so it has that which
# began backward.
IN_BACKWARD = {"mixtral": {"backward_hooks.py"}}


def waits_in_steps(
    names: Sequence[str], mode: Mode, settings: Mapping[str, Any]
) -> dict[str, Counter[str]]:
    """By architecture, the waits of all steps but the first."""
    shares = [Share(SAMPLES, 2, 1, mode)]
    found = {}
    for name in names:
        engine = engine_for(ARCHITECTURES[name].factory, shares, **settings)
        optimizer = optimizer_for(engine.parameters())
        for batch in batches(ARCHITECTURES[name], SAMPLES, STEPS):
            there = {key: value.cuda() for key, value in own_rows(batch, shares, 0).items()}
            optimizer.zero_grad()
            cuda_device.reset_host_waits()
            engine.step(there)
            found[name] = cuda_device.host_waits()
            optimizer.step()
    return found


def files_of(waits: Counter[str], *, ours: bool) -> set[str]:
    return {
        Path(place.rpartition(":")[0]).name for place in waits if place.startswith(OURS) is ours
    }


# Those in which `transformers` waits for something of its own, and one in which it does not.
FEW = ("gpt2", "mixtral", "t5", "bert")
OTHERS = tuple(name for name in ARCHITECTURES if name not in FEW)


@pytest.mark.parametrize("names", left_out([(FEW,), (OTHERS,)], [(OTHERS,)]), ids=["few", "others"])
def test_no_step_of_any_architecture_waits_for_the_device(names):
    found = run_ranks(waits_in_steps, 1, names, Mode(), {})[0]
    for name, waits in found.items():
        assert files_of(waits, ours=True) == IN_BACKWARD.get(name, set()), (name, waits)
        assert files_of(waits, ours=False) == OF_TRANSFORMERS.get(name, set()), (name, waits)


SETTINGS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "kept graphs": (Mode(recompute=False), {}),
    "chunked cross-entropy": (Mode(), {"head": "chunked"}),
    "one after the other": (Mode(order="sequential"), {"zero_stage": 0}),
    "bf16": (Mode(), {"compute_dtype": "bf16"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_waits_for_the_device(setting):
    mode, settings = SETTINGS[setting]
    found = run_ranks(waits_in_steps, 1, ["gpt2"], mode, settings)[0]
    assert files_of(found["gpt2"], ours=True) == set()
