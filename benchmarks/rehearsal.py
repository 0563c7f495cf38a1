"""What does the rehearsal before the first step cost?

Seconds of CPU time of the rehearsal (`docs/design/losses.md`) and of a step after it, of models of
transformers on one rank that cuts a batch of 12 samples into micro-batches of 3; medians of fresh
engines.

    python benchmarks/rehearsal.py --json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

import common
import gpumix
from gpumix.testing import Share, plan_for

SAMPLES, MICRO_BATCH, LENGTH, WIDTH, LAYERS = 12, 3, 128, 256, 6
SIZES = {"num_attention_heads": 4, "intermediate_size": 4 * WIDTH, "vocab_size": 2000}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_key_value_heads=4, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, **SIZES)
    return transformers.BertForMaskedLM(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=WIDTH,
        encoder_layers=LAYERS // 2,
        decoder_layers=LAYERS // 2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        vocab_size=2000,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def tokens() -> dict[str, torch.Tensor]:
    """Samples of unlike length, with masks."""
    ids = torch.randint(3, 2000, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(LENGTH)[None] < torch.linspace(LENGTH // 2, LENGTH, SAMPLES)[:, None]
    labels = ids.masked_fill(~inside, -100)
    return {"input_ids": ids, "attention_mask": inside.long(), "labels": labels}


def sounds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, 80, 2 * LENGTH, generator=generator)
    labels = torch.randint(3, 2000, (SAMPLES, LENGTH // 4), generator=generator)
    return {"input_features": features, "labels": labels}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "whisper": (whisper, sounds),
}


def cpu_s(function: Callable[[], Any]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def measured(name: str) -> tuple[float, float]:
    """Seconds of the rehearsal and of the step after it, on a fresh engine."""
    make_model, make_batch = MODELS[name]
    model = gpumix.build(make_model, seed=0)
    engine = gpumix.prepare(model, plan_for(model, [Share(SAMPLES, MICRO_BATCH, state=1)]))
    batch = make_batch()
    rehearsal_s = cpu_s(lambda: engine.settle(batch, in_step=True))
    assert engine.reduction, "it was rehearsed"
    return rehearsal_s, cpu_s(lambda: engine.step(batch))


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="fresh engines of each model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    figures: common.Figures = {}
    for name in MODELS:
        measured(name)  # what is imported and compiled the first time
        rounds = [measured(name) for _ in range(args.rounds)]
        figures[f"{name}_rehearsal_s"] = round(median(one for one, _ in rounds), 4)
        figures[f"{name}_of_a_step"] = round(median(one / step for one, step in rounds), 3)
    common.print_figures(figures, as_json=args.json)


if __name__ == "__main__":
    main()
