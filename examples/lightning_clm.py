"""Train with Lightning: an ordinary script with two lines changed, the strategy and its import.

    gpumix launch examples/lightning_clm.py     # one process per GPU
    python examples/lightning_clm.py            # one device

A small GPT, written here, learns from the bytes of a text file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gpumix.integrations.lightning import GpumixStrategy


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.into, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(samples, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.back(F.gelu(self.into(self.norms[1](x))))


class Bytes(LightningModule):
    def __init__(self, length: int, width: int = 64, blocks: int = 3, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss_of(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch[0]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *others: object) -> None:
        self.found.append(trainer.callback_metrics["loss"].item())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--losses", type=Path, help="Where the losses are written.")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    seed_everything(0)
    tokens = torch.from_numpy(np.fromfile(args.file, dtype=np.uint8).astype(np.int64))
    whole = tokens[: len(tokens) // args.block_size * args.block_size]
    blocks = TensorDataset(whole.view(-1, args.block_size))
    training, held_out = torch.utils.data.random_split(blocks, [0.9, 0.1])
    losses = Losses()
    trainer = Trainer(
        strategy=GpumixStrategy(),
        max_steps=args.steps,
        callbacks=[losses],
        enable_progress_bar=False,
        default_root_dir=args.output_dir,
    )
    batch = args.per_device_batch_size
    trainer.fit(
        Bytes(args.block_size),
        DataLoader(training, batch, shuffle=True),
        DataLoader(held_out, batch),
    )
    if trainer.is_global_zero and args.losses is not None:
        args.losses.write_text(json.dumps(losses.found))


if __name__ == "__main__":
    main()
