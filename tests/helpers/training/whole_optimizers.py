"""What tests of Adafactor and Muon share: pieces and whole parameters with the same gradients."""

from __future__ import annotations

import numpy as np
import torch

import gpumix
from helpers.training.checkpoints import odd
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, engine_for, initialised, pieces_of, tensor_errors

STEPS = 4
FACTORIES = {"odd": odd, "gpt2": ARCHITECTURES["gpt2"].factory}
PLANS = {
    "one rank": [Share(2, 1, 1)],
    "two ranks": [Share(2, 1, 2), Share(1, 1, 1)],
    "three, one without state": [Share(1, 1, 3), Share(1, 1, 0), Share(0, 0, 4)],
    "three, all on one": [Share(1, 1, 0), Share(0, 0, 1), Share(1, 1, 0)],
}
ADAFACTOR = {"lr": 0.05, "beta2_decay": -0.7, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1}
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
ADAMW = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-7}


def gradient(name, shape, step):
    """Of any step and parameter; rows and columns differ in size, some gradients are large."""
    generator = torch.Generator().manual_seed(hash((len(name), sum(map(ord, name)), step)))
    found = torch.randn(shape, generator=generator)
    for dim, size in enumerate(shape):
        scale = torch.rand(size, generator=generator).exp() ** 2
        found = found * scale.view([-1 if d == dim else 1 for d in range(len(shape))])
    return found * 10.0 ** (sum(map(ord, name)) % 5 - 3)


def is_hidden(name, shape):
    in_unit = name.startswith(("blocks.", "transformer.h."))
    return len(shape) == 2 and in_unit and "nothing" not in name


def make(kind, engine):
    layout = engine.layout()
    if kind == "adafactor":
        return gpumix.Adafactor(engine.parameters(), layout, **ADAFACTOR)
    return gpumix.Muon(engine.parameters(), layout, betas=ADAMW["betas"], eps=ADAMW["eps"], **MUON)


def references(kind, model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    if kind == "adafactor":
        return [torch.optim.Adafactor([p for _, p in named], **ADAFACTOR)]
    hidden = [p for n, p in named if is_hidden(n, p.shape)]
    others = [p for n, p in named if not is_hidden(n, p.shape)]
    return [torch.optim.Muon(hidden, **MUON), torch.optim.AdamW(others, **ADAMW)]


def update_pieces(engine, optimizer, steps):
    for step in steps:
        for piece in engine.pieces():
            if piece.local.requires_grad:
                shown = piece.window.of(gradient(piece.name, piece.shape, step)).reshape(-1)
                own = shown[piece.start : piece.end]
                piece.local.grad = own.to(piece.local.device, copy=True)
        optimizer.step()
        optimizer.zero_grad()


def trained_by_torch(kind, factory, steps=STEPS):
    """The unsharded model and its optimizers after the same steps."""
    model = initialised(factory)
    optimizers = references(kind, model)
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = gradient(name, p.shape, step) if p.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def expected_after(kind, factory):
    model, _ = trained_by_torch(kind, factory)
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def assert_close(found, expected, tolerance=1e-5):
    """Frozen parameters are compared too."""
    floating = {n: v for n, v in expected.items() if v.dtype == np.float32 and v.size}
    errors = tensor_errors({n: found[n] for n in floating}, floating)
    assert max(errors.values()) < tolerance, errors


def train_rank(kind, model, shares):
    engine = engine_for(FACTORIES[model], shares)
    optimizer = make(kind, engine)
    before = engine.comm.counts.copy()
    update_pieces(engine, optimizer, range(STEPS))
    return pieces_of(engine), dict(engine.comm.counts - before), engine.comm.bytes["exchange_parts"]
