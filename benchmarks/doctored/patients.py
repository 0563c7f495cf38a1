"""Functions that train, each with one fault unless its arguments mend it, or without any; and the
data of jobs. The doctor calls a function without arguments, and ends it.

With `steps` a function trains so many and returns the seconds of one, by its own clock.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
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
    stream = _endless(batches)

    def step() -> None:
        loss = loss_of(*next(stream))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _repeat(step, steps)


def _repeat(step: Callable[[], None], steps: int | None) -> float:
    """The seconds of a step, once `steps` are done."""
    begun_s = 0.0
    for number in itertools.count():
        if number == WARM_UP_STEPS:
            begun_s = time.perf_counter()
        if steps is not None and number == WARM_UP_STEPS + steps:
            return (time.perf_counter() - begun_s) / steps
        step()
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


class Written(Dataset[tuple[Tensor, int]]):
    """Samples that are text, whose numbers Python reads."""

    def __init__(self, samples: int, repeats: int) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(samples, FEATURES, generator=generator).tolist()
        self.rows = [" ".join(map(str, row)) for row in rows]
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for _ in range(self.repeats):
            values = [float(one) for one in self.rows[index].split()]
        return torch.tensor(values), index % CLASSES


def own_decoding(
    steps: int | None = None, *, workers: int = 0, threads: int | None = None
) -> float:
    """The loop reads its samples itself, which takes a core."""
    return _classify_written(Written(3200, 60), 1024, steps, workers=workers, threads=threads)


def too_many_workers(
    steps: int | None = None, *, workers: int = 24, threads: int | None = None
) -> float:
    """A worker for almost every sample, on whatever host."""
    return _classify_written(Written(3200, 60), 1024, steps, workers=workers, threads=threads)


def restarted_workers(
    steps: int | None = None,
    *,
    workers: int = 2,
    persistent: bool = False,
    threads: int | None = None,
) -> float:
    """Workers that start anew in each epoch, and epochs of ten steps."""
    return _classify_written(
        Written(320, 2), 512, steps, workers=workers, persistent=persistent, threads=threads
    )


def _classify_written(
    samples: Written,
    width: int,
    steps: int | None,
    *,
    workers: int,
    persistent: bool = True,
    threads: int | None = None,
) -> float:
    if threads:
        torch.set_num_threads(threads)
    loader = DataLoader(
        samples,
        batch_size=32,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    return _classify(loader, width, steps)


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


def optimizer_anew(steps: int | None = None, *, mended: bool = False) -> float:
    """An optimizer is made in every step: its state is made, and lost."""
    model, batches = _classifier(1024), itertools.cycle(_in_memory(32))
    optimizer = None

    def step() -> None:
        nonlocal optimizer
        if optimizer is None or not mended:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _repeat(step, steps)


def double_precision(steps: int | None = None, *, mended: bool = False) -> float:
    """A model in fp64, as NumPy has its numbers."""
    dtype = torch.float32 if mended else torch.float64
    model = _classifier(1024).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [(x.to(dtype), y) for x, y in _in_memory(256)]
    return _train(batches, lambda x, y: F.cross_entropy(model(x), y), optimizer, steps)


def loop_over_positions(steps: int | None = None, *, mended: bool = False) -> float:
    """A cell is called for each position; torch has one operation for all."""
    return _remember(steps, cells=not mended)


def _remember(steps: int | None, *, cells: bool) -> float:
    torch.manual_seed(0)
    hidden = 64
    body: nn.Module = nn.LSTMCell(FEATURES, hidden) if cells else nn.LSTM(FEATURES, hidden)
    head = nn.Linear(hidden, CLASSES)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    x = torch.randn(96, 16, FEATURES, generator=torch.Generator().manual_seed(1))
    batches = [(x, torch.arange(16) % CLASSES)]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if not cells:
            return F.cross_entropy(head(body(x)[0][-1]), y)
        state = None
        for position in x:
            state = body(position, state)
        return F.cross_entropy(head(state[0]), y)

    return _train(batches, loss_of, optimizer, steps)


def log_lines(steps: int | None = None, *, mended: bool = False) -> float:
    """Every step appends a line for each parameter to a log, and writes a JSON file again."""
    model, batches, numbers = _classifier(256), itertools.cycle(_in_memory(64)), itertools.count()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = [0.0] * 2000

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        number = next(numbers)
        losses[number % len(losses)] = loss.item()
        if mended and number % 100:
            return
        with (folder / "train.log").open("a") as log:
            for name, one in model.named_parameters():
                log.write(f"step {number} {name} {one.detach().norm():.6f}\n")
        (folder / "losses.json").write_text(json.dumps(losses))

    with TemporaryDirectory() as name:
        folder = Path(name)
        return _repeat(step, steps)


def checkpoint_every_step(steps: int | None = None, *, mended: bool = False) -> float:
    """Model and optimizer are saved in every step."""
    model, batches, numbers = _classifier(512), itertools.cycle(_in_memory(128)), itertools.count()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not mended or next(numbers) % 100 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{folder}/checkpoint.pt")

    with TemporaryDirectory() as folder:
        return _repeat(step, steps)


def batches_by_hand(steps: int | None = None, *, mended: bool = False) -> float:
    """Each batch is read from text in the loop; mended, they are read once."""
    samples, draw = Written(640, 1), random.Random(0)
    model = _classifier(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ready = list(samples) if mended else samples

    def step() -> None:
        rows, classes = [], []
        for _ in range(64):
            x, y = ready[draw.randrange(len(ready))]
            rows.append(x)
            classes.append(y)
        loss = F.cross_entropy(model(torch.stack(rows)), torch.tensor(classes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _repeat(step, steps)


class Attention(nn.Module):
    """Heads that look back, written out or by torch's kernel."""

    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], 3, self.heads, -1
        queries, keys, values = self.inner(x).view(shape).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = queries @ keys.transpose(-1, -2) / keys.size(-1) ** 0.5
            hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.outer(mixed.transpose(1, 2).flatten(2))


def written_attention(steps: int | None = None, *, mended: bool = False) -> float:
    """A model's own code writes down all pairs of positions."""
    torch.manual_seed(0)
    layers = [Attention(64, 4, by_hand=not mended) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 256, (1, 1024), generator=torch.Generator().manual_seed(1))
    batches = [(ids[:, :-1], ids[:, 1:].flatten())]
    return _train(
        batches, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y), optimizer, steps
    )


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


def healthy_lstm(steps: int | None = None) -> float:
    """One operation for all positions."""
    return _remember(steps, cells=False)


def healthy_workers(steps: int | None = None) -> float:
    """A worker that keeps up, and epochs that it lives through."""
    with _in_fast_numbers():
        return _classify_written(Written(3200, 1), 2048, steps, workers=1)


def healthy_pair(steps: int | None = None) -> float:
    """Two optimizers in turns: one model makes samples, the other one tells them apart."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, FEATURES))
    judge = nn.Sequential(nn.Linear(FEATURES, 1024), nn.GELU(), nn.Linear(1024, 1))
    makes, judges = [
        torch.optim.AdamW(one.parameters(), lr=1e-4, fused=True) for one in (maker, judge)
    ]
    batches, one, zero = itertools.cycle(_in_memory(512)), torch.ones(512, 1), torch.zeros(512, 1)

    def step() -> None:
        real, _ = next(batches)
        with _in_fast_numbers():
            made = maker(torch.randn(512, 32))
            told = F.binary_cross_entropy_with_logits(judge(real), one)
            loss = told + F.binary_cross_entropy_with_logits(judge(made.detach()), zero)
        judges.zero_grad()
        loss.backward()
        judges.step()
        with _in_fast_numbers():
            loss = F.binary_cross_entropy_with_logits(judge(made), one)
        makes.zero_grad()
        loss.backward()
        makes.step()

    return _repeat(step, steps)


def healthy_accumulation(steps: int | None = None) -> float:
    """Gradients of 32 micro-batches for each update."""
    model, batches = _classifier(512), itertools.cycle(_in_memory(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for _ in range(32):
            x, y = next(batches)
            with _in_fast_numbers():
                loss = F.cross_entropy(model(x), y) / 32
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _repeat(step, steps)


# -- of jobs ---------------------------------------------------------------------------------------


class _RemoteTokens(list[dict[str, Tensor]]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(ANSWER_S)
        return super().__getitem__(index)


def remote_tokens(length: int = 64) -> list[dict[str, Tensor]]:
    """Samples that come over a network."""
    ids = torch.randint(0, 256, (512, length), generator=torch.Generator().manual_seed(1))
    return _RemoteTokens({"input_ids": row, "labels": row} for row in ids)
