"""Every model class: the registry of `transformers`, `timm`, `diffusers`, plain torch."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from zoo_of.plain import PLAIN
from zoo_of.samples import Feed, NotFed, Shape, feed_for
from zoo_of.small import SIZES, Size, small_config

MOST_PARAMETERS = 10_000_000
LOOK_S = 60.0  # for a class that no size fits
# Lists of bodies without a head, which compute no loss.
WITHOUT_HEAD = re.compile(r"BACKBONE|TEXT_ENCODING|FOR_IMAGE_MAPPING|AUDIO_TOKENIZATION")


class NotBuilt(Exception):
    """No small model of a class could be made or fed; its text says why."""


@dataclass(frozen=True)
class Entry:
    """A class.

    Attributes:
        name: with its library.
        task: the list of the registry that it is in.
        family: that it is one of.
        make: a model of a size.
    """

    name: str
    task: str
    family: str
    make: Callable[[Size], nn.Module]


@dataclass(frozen=True)
class Found:
    """The size and the shape of samples with which a class can be trained."""

    size: Size
    shape: Shape

    def model(self, entry: Entry) -> nn.Module:
        """A model with the same values each time, that draws no numbers in training."""
        torch.manual_seed(0)
        model = entry.make(self.size)
        silence(model)
        return model.train()

    def feed(self, model: nn.Module) -> Feed:
        return Feed.of(model, self.shape)


def entries() -> list[Entry]:
    """All, in an order in which the first of every family come before the second of any."""
    found = [*_of_transformers(), *PLAIN_ENTRIES, *_of_timm(), *_of_diffusers()]
    of_family: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in found:
        of_family[entry.family].append(entry)
    deepest = max(map(len, of_family.values()))
    return [own[n] for n in range(deepest) for own in of_family.values() if n < len(own)]


def look(entry: Entry) -> Found:
    """The first size that can be built and fed.

    Raises:
        NotBuilt: there is none.
    """
    said: list[str] = []
    end = time.monotonic() + LOOK_S
    for size in SIZES:
        if time.monotonic() > end:
            break
        try:
            with torch.device("meta"):
                number = sum(p.numel() for p in entry.make(size).parameters())
        except Exception:  # some look at values while they are made
            number = 0
        try:
            if number > MOST_PARAMETERS:
                raise NotFed(f"{number:,} parameters in a small configuration")
            torch.manual_seed(0)
            model = entry.make(size)
            if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
                raise NotFed("too many parameters in a small configuration")
            silence(model)
            return Found(size, feed_for(model.train(), entry.task, end).shape)
        except Exception as error:  # of any library's code
            text = str(error) if isinstance(error, NotFed) else f"{type(error).__name__}: {error}"
            said.append(" ".join(text.split())[:300])
        if not entry.name.startswith("transformers/"):
            break  # they have one size
    raise NotBuilt("; or: ".join(list(dict.fromkeys(said))[:2]))


def silence(model: nn.Module) -> None:
    """No dropout."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _of_transformers() -> Iterator[Entry]:
    seen: set[str] = set()
    for task in sorted(vars(modeling_auto)):
        if not re.fullmatch(r"MODEL_FOR_\w+_NAMES", task) or WITHOUT_HEAD.search(task):
            continue
        for family, names in getattr(modeling_auto, task).items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    make = partial(_transformer, name, family)
                    yield Entry(f"transformers/{name}", task, family, make)


def _transformer(name: str, family: str, size: Size) -> nn.Module:
    model_class = getattr(transformers, name)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        config_class = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[family])
    model: nn.Module = model_class(small_config(config_class, size))
    return model.float()


PLAIN_ENTRIES = [
    Entry(f"torch/{name}", "plain", f"torch/{name}", lambda size, make=make: make())  # type: ignore[misc]
    for name, make in PLAIN.items()
]


def _of_timm() -> Iterator[Entry]:
    """The smallest model of every module of timm."""
    if find_spec("timm") is None:
        return
    import timm

    from zoo_of.plain import Judged

    for module in sorted(timm.list_modules()):
        names = timm.list_models(module=module, pretrained=False)

        def make(size: Size, names: Sequence[str] = names) -> nn.Module:
            net = timm.create_model(_smallest(tuple(names)), num_classes=3)
            return Judged(net, net.default_cfg["input_size"])

        if names:
            yield Entry(f"timm/{module}", "plain", f"timm/{module}", make)


@cache
def _smallest(names: tuple[str, ...]) -> str:
    """The model of timm with the fewest parameters."""
    import timm

    with torch.device("meta"):
        numbers = {name: _parameters_of(timm.create_model, name) for name in names}
    return min(numbers, key=lambda name: numbers[name])


def _parameters_of(make: Callable[[str], nn.Module], name: str) -> float:
    """How many a model has; infinitely many if it cannot be built without values."""
    try:
        return sum(p.numel() for p in make(name).parameters())
    except Exception:
        return math.inf


def _of_diffusers() -> Iterator[Entry]:
    """Transformers and U-nets of diffusers that build from their defaults."""
    if find_spec("diffusers") is None:
        return
    import diffusers

    from zoo_of.plain import Denoiser

    kinds: dict[str, dict[str, Any]] = {
        "DiTTransformer2DModel": {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "in_channels": 4, "out_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 10,
        },
        "UNet2DModel": {
            "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
            "block_out_channels": (16, 32), "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8,
        },
    }  # fmt: skip
    for name, settings in kinds.items():
        if hasattr(diffusers, name):

            def make(size: Size, name: str = name, settings: Any = settings) -> nn.Module:
                return Denoiser(getattr(diffusers, name)(**settings))

            yield Entry(f"diffusers/{name}", "plain", f"diffusers/{name}", make)
