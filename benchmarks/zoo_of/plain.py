"""Plain modules of torch, in the shape that a Trainer takes: forward returns a dict with a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_of.small import LABELS, ORDINARY

WIDTH, LENGTH = 32, 12


class Judged(nn.Module):
    """A module that gives scores of classes, with the loss of these.

    Args:
        net: of one input.
        size: of a sample of it; of token ids one number.
        labels: "class", "number" or "tags".
    """

    def __init__(self, net: nn.Module, size: tuple[int, ...], labels: str = "class") -> None:
        super().__init__()
        self.net = net
        self.size = size
        self.kind = labels

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        if self.kind == "number":
            return {"loss": F.mse_loss(scores, labels), "logits": scores}
        loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": scores}

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        if len(self.size) == 1:
            x = torch.randint(ORDINARY.start, ORDINARY.stop, self.size, generator=generator)
        else:
            x = torch.randn(self.size, generator=generator)
        if self.kind == "number":
            return {"x": x, "labels": torch.randn(4, generator=generator)}
        many = (self.size[0],) if self.kind == "tags" else ()
        return {"x": x, "labels": torch.randint(0, LABELS, many, generator=generator)}


class Denoiser(nn.Module):
    """A model of diffusers that tells noise."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, timestep: Tensor, labels: Tensor) -> dict[str, Tensor]:
        more = {}
        if getattr(self.net.config, "num_embeds_ada_norm", None):
            more["class_labels"] = timestep % 10
        noise = self.net(x, timestep, **more).sample
        return {"loss": F.mse_loss(noise, labels)}

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = self.net.config
        size = (config.in_channels, config.sample_size, config.sample_size)
        return {
            "x": torch.randn(size, generator=generator),
            "timestep": torch.randint(0, 900, (), generator=generator),
            "labels": torch.randn(size, generator=generator),
        }


class First(nn.Module):
    """The first of the outputs of a module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.net(x)[0]
        return first


class Both(nn.Module):
    """A module of two inputs, given one twice."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.net(x, x)
        return both


class Mean(nn.Module):
    """Of all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Residual(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def _encoder(layers: int = 2, **settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
    return Both(nn.TransformerDecoder(layer, 2))


def _of_vectors(body: nn.Module, width: int = WIDTH) -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), body, Mean(), nn.Linear(width, LABELS))
    return Judged(net, (LENGTH, WIDTH))


def _of_tokens(body: nn.Module, *, labels: str = "tags", **settings: Any) -> nn.Module:
    ends = [Mean()] if labels == "class" else []
    net = nn.Sequential(nn.Embedding(100, WIDTH, **settings), body, *ends, nn.Linear(WIDTH, LABELS))
    return Judged(net, (LENGTH,), labels)


def _recurrent(kind: type[nn.RNNBase], **settings: Any) -> nn.Module:
    body = First(kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **settings))
    return _of_vectors(body, 2 * WIDTH if settings.get("bidirectional") else WIDTH)


def _pictures(norm: Callable[[int], nn.Module], blocks: int = 3) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.ReLU())

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        *(block() for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, LABELS),
    )
    return Judged(net, (3, 16, 16))


def _flat_mlp() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    return Judged(net, (8, 8), "number")


def _residuals(norm: Callable[[int], nn.Module]) -> nn.Module:
    return _of_vectors(nn.Sequential(*(Residual(norm) for _ in range(3))))


def _spectral() -> nn.Module:
    body = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
                           for _ in range(2)))  # fmt: skip
    return _of_vectors(body)


def _weight_norm() -> nn.Module:
    body = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
                           for _ in range(3)))  # fmt: skip
    return _of_vectors(body)


def _frozen() -> nn.Module:
    model = _of_vectors(_encoder(3))
    for parameter in model.net[1].layers[0].parameters():  # type: ignore[index, union-attr]
        parameter.requires_grad_(False)
    return model


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "TransformerEncoder": lambda: _of_vectors(_encoder()),
    "TransformerEncoder-norm-first": lambda: _of_vectors(_encoder(3, norm_first=True)),
    "TransformerEncoder-tokens": lambda: _of_tokens(_encoder()),
    "TransformerEncoder-frozen-layer": _frozen,
    "TransformerDecoder": lambda: _of_vectors(_decoder()),
    "Transformer": lambda: _of_vectors(
        Both(nn.Transformer(WIDTH, 4, 2, 2, 48, dropout=0.0, batch_first=True))
    ),
    "RNN": lambda: _recurrent(nn.RNN),
    "LSTM": lambda: _recurrent(nn.LSTM),
    "LSTM-bidirectional": lambda: _recurrent(nn.LSTM, bidirectional=True),
    "GRU": lambda: _recurrent(nn.GRU),
    "CNN": lambda: _pictures(lambda n: nn.Identity()),
    "CNN-group-norm": lambda: _pictures(lambda n: nn.GroupNorm(4, n)),
    "CNN-instance-norm": lambda: _pictures(lambda n: nn.InstanceNorm2d(n, affine=True)),
    "CNN-batch-norm": lambda: _pictures(nn.BatchNorm2d),
    "CNN-one-block": lambda: _pictures(lambda n: nn.GroupNorm(2, n), blocks=1),
    "MLP": _flat_mlp,
    "MLP-residual": lambda: _residuals(nn.LayerNorm),
    "MLP-rms-norm": lambda: _residuals(nn.RMSNorm),
    "MLP-spectral-norm": _spectral,
    "MLP-weight-norm": _weight_norm,
    "Embedding-max-norm": lambda: _of_tokens(_encoder(), max_norm=1.0),
    "Embedding-padding": lambda: _of_tokens(_encoder(), labels="class", padding_idx=7),
    "Embedding-sparse-linear": lambda: _of_tokens(nn.Linear(WIDTH, WIDTH)),
    "Bilinear": lambda: _of_vectors(Both(nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    "MultiheadAttention": lambda: _of_vectors(Attention()),
}


class Attention(nn.Module):
    """Alone, to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return attended
