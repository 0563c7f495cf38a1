"""Train in a loop with `Accelerator`: an Accelerate script with one line changed, an import.

    gpumix launch examples/clm_no_trainer.py    # one process per GPU
    python examples/clm_no_trainer.py           # one device

A small Llama learns from the bytes of a text file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from gpumix import Accelerator


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--losses", type=Path, help="Where the losses are written.")
    return parser.parse_args()


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row for (row,) in rows])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = arguments()
    accelerator = Accelerator()
    set_seed(0)
    tokens = np.fromfile(args.file, dtype=np.uint8).astype(np.int64)
    blocks = torch.from_numpy(tokens[: len(tokens) // args.block_size * args.block_size])
    dataset = TensorDataset(blocks.view(-1, args.block_size))
    loader = DataLoader(
        dataset, batch_size=args.per_device_batch_size, shuffle=True, collate_fn=collate
    )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.3f}")
            if len(losses) == args.steps:
                break
    if args.losses is not None and accelerator.is_main_process:
        args.losses.write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
