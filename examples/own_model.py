"""Train a model of your own: any module whose forward returns (summed loss, count).

    python examples/own_model.py

gpumix finds the blocks because they are a list of one class; `gpumix.prepare(..., units=["Block"])`
would name them. Loss and count are sums, not means, so that parts of a batch, of any size, add up
to the loss of the whole batch. The script trains on the GPU of this machine, else on its CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpumix

WIDTH = 48
LENGTH = 64
GLOBAL_BATCH = 32
STEPS = 60


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.squeeze(1))
        return x + self.mlp(x)


class Forecaster(nn.Module):
    """Foretells the next value of a series at each of its points."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH - 1, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(series[:, :-1, None]) + self.position
        for block in self.blocks:
            x = block(x)
        error = self.leave(self.norm(x)).squeeze(-1) - series[:, 1:]
        return (error**2).sum(), torch.tensor(error.numel())


class Waves(torch.utils.data.Dataset):
    """Sine waves of random frequency and phase; the keys are the names that forward takes."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rate, phase = torch.rand(2, generator=torch.Generator().manual_seed(index))
        return {"series": torch.sin((0.1 + 0.2 * rate) * torch.arange(LENGTH) + 6.28 * phase)}


def groups(engine: gpumix.Engine) -> list[dict[str, object]]:
    """Parameter groups by name. This rank's pieces are flat: `shapes` has the whole shapes."""
    shapes = engine.shapes()
    decayed, others = [], []
    for name, piece in engine.named_parameters():
        matrix = len(shapes[name]) >= 2 and name != "position"
        (decayed if matrix else others).append(piece)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def main() -> None:
    torch.set_num_threads(1)  # so small a model is no faster on more
    profile = gpumix.profile(
        Forecaster,
        lambda samples: {"series": torch.randn(samples, LENGTH)},
        sequence_length=LENGTH,
        global_batch_size=GLOBAL_BATCH,
    )
    plan = gpumix.plan(profile, global_batch_size=GLOBAL_BATCH)
    engine = gpumix.prepare(gpumix.build(Forecaster, seed=0), plan)
    optimizer = torch.optim.AdamW(groups(engine), lr=3e-3)
    with gpumix.Loader(Waves(), [GLOBAL_BATCH], rank=0, device=engine.device) as loader:
        for step, batch in zip(range(STEPS), loader):
            loss = engine.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 19:
                print(f"step {step + 1}: mean squared error {loss.item():.4f}")


if __name__ == "__main__":
    main()
