"""Functions that train, each with one fault unless its arguments mend it, or without any; and the
data of jobs. The doctor calls a function without arguments, and ends it.

With `steps` a function trains so many and returns the seconds of one, by its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpumix.hardware.host.cpu import has_bf16

WARM_UP_STEPS = 6
ANSWER_S = 0.015
FEATURES, CLASSES = 64, 10
# Of 128 numbers each, 10 MB together. Near 32 MB glibc maps memory anew each time in some processes
# and not in others, which takes as long as the updates.
WORDS = 20_000


class Remote(Dataset[tuple[Tensor, int]]):
    """Samples that come over a network: many can be under way at once."""

    def __len__(self) -> int:
        return 6400

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(ANSWER_S)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(FEATURES, generator=generator), index % CLASSES


def _train(
    batches: Any, loss_of: Callable[..., Tensor], optimizer: Any, steps: int | None
) -> float:
    """Epoch after epoch; the seconds of a step, once `steps` are done."""
    begun_s = 0.0
    for number, batch in enumerate(_endless(batches)):
        if number == WARM_UP_STEPS:
            begun_s = time.perf_counter()
        if steps is not None and number == WARM_UP_STEPS + steps:
            return (time.perf_counter() - begun_s) / steps
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("it is endless")


def _endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _classifier(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def _classify(data: Any, width: int, steps: int | None) -> float:
    model = _classifier(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return _train(data, lambda x, y: F.cross_entropy(model(x), y), optimizer, steps)


def _in_memory(batch: int) -> list[tuple[Tensor, Tensor]]:
    """Batches that are there."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (batch,), generator=generator),
        )
        for _ in range(8)
    ]


def _gpt(
    *,
    length: int,
    batch: int,
    steps: int | None,
    attention: str = "sdpa",
    recompute: bool = False,
    layers: int = 2,
) -> float:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_layer=layers, n_embd=128, n_head=4, vocab_size=256, n_positions=length, **dropouts
    )
    config._attn_implementation = attention
    model = GPT2LMHeadModel(config)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 256, (256, length), generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(ids), batch_size=batch, shuffle=True)
    return _train(batches, lambda x: model(input_ids=x, labels=x).loss, optimizer, steps)


# -- with a fault ----------------------------------------------------------------------------------


def own_fetching(steps: int | None = None, *, workers: int = 0) -> float:
    """The loop fetches its samples itself."""
    loader = DataLoader(
        Remote(),
        batch_size=16,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return _classify(loader, 1024, steps)


def anomaly(steps: int | None = None, *, mended: bool = False) -> float:
    """Anomaly detection was left on."""
    torch.autograd.set_detect_anomaly(not mended)
    model = nn.LSTMCell(FEATURES, 128)
    head = nn.Linear(128, CLASSES)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 128), x.new_zeros(len(x), 128)
        for _ in range(12):
            state = model(x, state)
        return F.cross_entropy(head(state[0]), y)

    return _train(_in_memory(32), loss_of, optimizer, steps)


def one_thread(steps: int | None = None, *, threads: int = 1) -> float:
    """torch may use one core."""
    torch.set_num_threads(threads)
    return _classify(_in_memory(512), 1024, steps)


def eager_attention(steps: int | None = None, *, attention: str = "eager") -> float:
    """All pairs of positions are written down."""
    return _gpt(length=1024, batch=1, attention=attention, steps=steps)


def recompute(steps: int | None = None, *, mended: bool = False) -> float:
    """Activations are computed twice, in ample memory."""
    return _gpt(length=128, batch=8, recompute=not mended, layers=4, steps=steps)


def single_updates(steps: int | None = None, *, fused: bool = False) -> float:
    """Each parameter is updated by a dozen operations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 128), nn.Linear(128, CLASSES))
    ways: dict[str, bool] = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **ways)
    ids = torch.randint(0, WORDS, (8, 512, 8), generator=torch.Generator().manual_seed(1))
    batches = [(batch, torch.arange(512) % CLASSES) for batch in ids]
    return _train(batches, lambda x, y: F.cross_entropy(model(x), y), optimizer, steps)


def prints(steps: int | None = None, *, mended: bool = False) -> float:
    """Every step shows what it computes with."""
    model = _classifier(512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        if not mended:
            print(logits[:8], y[:8])
        return F.cross_entropy(logits, y)

    return _train(_in_memory(128), loss_of, optimizer, steps)


# -- without ---------------------------------------------------------------------------------------


def _in_fast_numbers() -> torch.autocast:
    """In bf16, where the CPU has instructions for it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bf16())


def healthy_classifier(steps: int | None = None) -> float:
    with _in_fast_numbers():
        return _classify(_in_memory(512), 1024, steps)


def healthy_gpt(steps: int | None = None) -> float:
    with _in_fast_numbers():
        return _gpt(length=128, batch=16, steps=steps)


# -- of jobs ---------------------------------------------------------------------------------------


class _RemoteTokens(list[dict[str, Tensor]]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(ANSWER_S)
        return super().__getitem__(index)


def remote_tokens(length: int = 64) -> list[dict[str, Tensor]]:
    """Samples that come over a network."""
    ids = torch.randint(0, 256, (512, length), generator=torch.Generator().manual_seed(1))
    return _RemoteTokens({"input_ids": row, "labels": row} for row in ids)
