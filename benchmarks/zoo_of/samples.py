"""Samples for any model, from the signature of its forward and its configuration.

Where a signature leaves open what a tensor looks like, several shapes are tried in turn, and so are
labels of several kinds; what the model takes and computes a loss from is used. A batch has samples
of unlike length, padded at the right by `collate`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zoo_of.small import IMAGE, LABELS, ORDINARY, nested

IGNORED = -100
LONGEST, SHORTEST = 16, 6
MOST_TRIES = 60
GRID = "image_grid_thw"  # with it, patches of all pictures of a batch are rows of one tensor
PATCHES = (1, 4, 4)
Sample = dict[str, Any]


class NotFed(Exception):
    """No input was found that a model computes a loss from; its text says why."""


@dataclass(frozen=True)
class Shape:
    """A choice for each thing that a signature leaves open.

    Attributes:
        labels: the kind of labels.
        image: of pixel values; none: no picture.
        sound: of a spectrogram or a wave.
        image_tokens: placeholders of an image in the text.
        more: whether optional inputs are given too.
    """

    labels: str
    image: tuple[int, ...] = (3, IMAGE, IMAGE)
    sound: str = "wave"
    image_tokens: int = 1
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feed:
    """Makes samples of one shape for one model."""

    names: tuple[str, ...]
    config: Any
    shape: Shape
    own: Callable[[torch.Generator], Sample] | None = None

    @classmethod
    def of(cls, model: nn.Module, shape: Shape) -> Feed:
        names = tuple(inspect.signature(model.forward).parameters)
        return cls(names, getattr(model, "config", None), shape, getattr(model, "sample", None))

    def collate(
        self, samples: Sequence[Sample], dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """A batch, whose real numbers have a dtype."""
        batch = collate(samples, {} if self.config is None else pads(self.config))
        return {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in batch.items()
        }

    def samples(self, number: int, seed: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        make = self.own or self._sample
        return [make(generator) for _ in range(number)]

    def _sample(self, generator: torch.Generator) -> Sample:
        made: Sample = {}
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        if self.shape.labels == "choice":
            rows = [self._tokens(length, generator) for _ in range(2)]
            made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        elif "input_ids" in self.names:
            made = self._tokens(length, generator)
        made |= self._pictures(generator)
        made |= self._sounds(generator)
        made |= self._others(made, generator)
        return made | self._labels(made, generator)

    def _tokens(self, length: int, generator: torch.Generator) -> Sample:
        """Words, the end of the text, and placeholders of an image before them."""
        ids = _draw(ORDINARY, (length,), generator)
        end = of_any(self.config, "eos_token_id")
        if isinstance(end, int):
            ids[-1] = end
        image = of_any(self.config, "image_token_id", "image_token_index")
        if "pixel_values" in self.names and isinstance(image, int) and self.shape.image:
            ids = torch.cat([torch.full((self.shape.image_tokens,), image), ids])
        made = {"input_ids": ids}
        if "attention_mask" in self.names:
            made["attention_mask"] = torch.ones_like(ids)
        if "bbox" in self.names:
            made["bbox"] = torch.tensor([1, 2, 3, 4]).expand(len(ids), 4).clone()
        if "mm_token_type_ids" in self.names and isinstance(image, int):
            made["mm_token_type_ids"] = (ids == image).long()
        return made

    def _pictures(self, generator: torch.Generator) -> Sample:
        made: Sample = {}
        if GRID in self.names and self.shape.image:
            return self._patches(generator)
        if "pixel_values" in self.names and self.shape.image:
            made["pixel_values"] = torch.randn(self.shape.image, generator=generator)
        if "image_sizes" in self.names and "pixel_values" in made:
            made["image_sizes"] = torch.tensor(self.shape.image[-2:])
        if "bool_masked_pos" in self.names and self.shape.labels in ("none", "class"):
            patch = of_any(self.config, "patch_size") or 8
            patch = patch if isinstance(patch, int) else patch[0]
            number = ((self.shape.image or (IMAGE,))[-1] // patch) ** 2
            hidden = torch.rand(number, generator=generator) < 0.5
            hidden[0], hidden[1] = True, False
            made["bool_masked_pos"] = hidden
        return made

    def _patches(self, generator: torch.Generator) -> Sample:
        """Of a picture, one a row."""
        sides = [of_any(self.config, "patch_size") or 8] * 2
        channels = of_any(self.config, "in_channels", "in_chans", "num_channels") or 3
        width = math.prod([channels, of_any(self.config, "temporal_patch_size") or 1, *sides])
        rows = torch.randn(math.prod(PATCHES), width, generator=generator)
        return {"pixel_values": rows, GRID: torch.tensor([PATCHES])}

    def _sounds(self, generator: torch.Generator) -> Sample:
        made: Sample = {}
        bins = of_any(self.config, "num_mel_bins", "n_mels", "input_feat_per_channel", "input_dim")
        bins = bins if isinstance(bins, int) else 80
        long = of_any(self.config, "max_source_positions")
        frames = 2 * long if isinstance(long, int) and "encoder_layers" in vars(self.config) else 64
        if "max_length" in vars(self.config):
            frames = self.config.max_length
        for name in ("input_values", "input_features"):
            if name not in self.names:
                continue
            size = {"wave": (1600,), "bins": (bins, frames), "frames": (frames, bins)}
            made[name] = torch.randn(size[self.shape.sound], generator=generator)
        return made

    def _others(self, made: Sample, generator: torch.Generator) -> Sample:
        """What few models want."""
        more: Sample = {}
        for name in self.shape.more:
            if name in made or name not in self.names:
                continue
            if name.endswith("_input_ids"):
                more[name] = _draw(ORDINARY, (SHORTEST,), generator)
            elif name == "visual_embeds":
                width = of_any(self.config, "visual_embedding_dim") or 32
                more[name] = torch.randn(4, width, generator=generator)
                more["visual_attention_mask"] = torch.ones(4, dtype=torch.long)
            elif name == "visual_feats":
                width = of_any(self.config, "visual_feat_dim") or 32
                more[name] = torch.randn(4, width, generator=generator)
                more["visual_pos"] = torch.rand(4, 4, generator=generator)
            elif name in ("past_values", "future_values", "target_values"):
                channels = of_any(self.config, "num_input_channels")
                past = of_any(self.config, "context_length") or 32
                ahead = of_any(self.config, "prediction_length") or 8
                long = past if name == "past_values" else ahead
                size = (long, channels) if isinstance(channels, int) else (long,)
                more[name] = torch.randn(size, generator=generator)
        return more

    def _labels(self, made: Sample, generator: torch.Generator) -> Sample:
        kind = self.shape.labels
        ids = made.get("input_ids")
        if kind == "none":
            return {}
        if kind == "tokens":
            image = of_any(self.config, "image_token_id", "image_token_index")
            assert ids is not None
            return {"labels": ids.masked_fill(ids == image, IGNORED) if image is not None else ids}
        if kind == "masked":
            assert ids is not None
            hidden = torch.rand(ids.shape, generator=generator) < 0.4
            hidden[0] = True
            return {"labels": ids.masked_fill(~hidden, IGNORED)}
        if kind == "text":
            length = int(torch.randint(3, 8, (), generator=generator))
            return {"labels": _draw(ORDINARY, (length,), generator)}
        if kind == "tags":
            assert ids is not None
            return {"labels": _draw(range(LABELS), tuple(ids.shape), generator)}
        if kind == "span":
            assert ids is not None
            begin, end = sorted(_draw(range(ids.shape[-1]), (2,), generator).tolist())
            return {"start_positions": torch.tensor(begin), "end_positions": torch.tensor(end)}
        if kind == "map":
            return {"labels": _draw(range(LABELS), self.shape.image[-2:], generator)}
        if kind == "frames":
            frames = of_any(self.config, "frames_of_labels") or 4
            return {"labels": _draw(range(LABELS), (frames,), generator)}
        if kind == "pretraining":
            assert ids is not None
            made = {"labels": ids}
            for name in ("next_sentence_label", "sentence_order_label"):
                if name in self.names:
                    made[name] = _draw(range(2), (), generator)
            return made
        if kind == "boxes":
            box = torch.rand(2, 4, generator=generator) * 0.4 + 0.2
            return {"labels": {"class_labels": _draw(range(LABELS), (2,), generator), "boxes": box}}
        if kind == "depth":
            return {"labels": torch.rand(self.shape.image[-2:], generator=generator) + 0.5}
        most = {"class": LABELS, "choice": 2, "pair": 2}[kind]
        return {"labels": _draw(range(most), (), generator)}


# The kinds of labels of each list in the registry, the likeliest first.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("MULTIPLE_CHOICE", ("choice",)),
    ("QUESTION_ANSWERING", ("span", "class", "text", "tags")),
    ("TOKEN_CLASSIFICATION", ("tags",)),
    ("SEQUENCE_CLASSIFICATION|IMAGE_CLASSIFICATION|VIDEO_CL|AUDIO_CL|XVECTOR", ("class",)),
    ("NEXT_SENTENCE", ("pair",)),
    ("MASKED_LM", ("masked", "tokens")),
    ("CAUSAL_LM", ("tokens", "text")),
    ("PRETRAINING", ("pretraining", "tokens", "text", "none", "class")),
    ("CTC|RNNT|TDT", ("text",)),
    ("SEMANTIC_SEG|IMAGE_SEGMENTATION|UNIVERSAL|INSTANCE", ("map", "boxes")),
    ("OBJECT_DETECTION|POSE", ("boxes",)),
    ("DEPTH|NORMAL|MATTING", ("depth",)),
    ("MASKED_IMAGE", ("none",)),
    ("FRAME_CL", ("frames",)),
    ("", ("tokens", "text", "class", "none")),
)


def feed_for(model: nn.Module, task: str) -> Feed:
    """The first shape of samples from which `model` computes a loss.

    Raises:
        NotFed: there is none.
    """
    said: dict[str, str] = {}
    tries = 0
    names = tuple(inspect.signature(model.forward).parameters)
    queue = [Shape("own")] if hasattr(model, "sample") else list(_shapes(names, task))
    while queue and tries < MOST_TRIES:
        shape = queue.pop(0)
        tries += 1
        feed = Feed.of(model, shape)
        try:
            problem = _problem(model, feed.collate(feed.samples(2, seed=0)))
        except Exception as error:  # of any model's code
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            queue[:0] = _asked_for(str(error), shape)
        if not problem:
            return feed
        said.setdefault(problem, shape.labels)
    raise NotFed("; ".join(said) if len(said) < 3 else "; ".join([*said][:2]))


def _problem(model: nn.Module, batch: Mapping[str, Any]) -> str:
    result = model(**batch)
    loss = result.get("loss") if isinstance(result, Mapping) else None
    if not isinstance(loss, Tensor):
        return "forward returns no loss"
    if not loss.requires_grad:
        return "the loss does not depend on parameters"
    if loss.dim():
        return f"the loss has shape {tuple(loss.shape)}"
    return "" if bool(loss.isfinite()) else "the loss is not finite"


def _shapes(names: Sequence[str], task: str) -> Iterator[Shape]:
    kinds = next(kinds for pattern, kinds in KINDS if re.search(pattern, task))
    if "start_positions" not in names:
        kinds = tuple(k for k in kinds if k != "span")
    if "labels" not in names:
        kinds = tuple(k for k in kinds if k in ("span", "none")) or ("none",)
    if "input_ids" not in names:
        kinds = tuple(k for k in kinds if k not in ("tokens", "masked", "tags", "choice", "span"))
    images: tuple[tuple[int, ...], ...] = ((3, IMAGE, IMAGE),)
    if "pixel_values" in names:
        images += ((1, 3, IMAGE, IMAGE), (4, 3, IMAGE, IMAGE), (3, 64, 64), (1, IMAGE, IMAGE))
        images = images[:1] if GRID in names else images
        images += ((),) if "input_ids" in names else ()
    sounds: tuple[str, ...] = ("wave",)
    if {"input_values", "input_features"}.intersection(names):
        sounds = (
            ("wave", "bins", "frames") if "input_values" in names else ("bins", "frames", "wave")
        )
    optional = (
        "decoder_input_ids", "qformer_input_ids", "visual_embeds", "visual_feats", "past_values",
        "future_values", "target_values",
    )  # fmt: skip
    here = tuple(name for name in optional if name in names)
    mores: tuple[tuple[str, ...], ...] = ((), here) if here else ((),)
    for more, image, sound, kind in product(mores, images, sounds, kinds):
        yield Shape(labels=kind, image=image, sound=sound, more=more)


def _asked_for(said: str, shape: Shape) -> list[Shape]:
    """The shape that an error of the model's asks for in numbers: placeholders of an image."""
    found = re.search(
        r"[Ii]mage features and image tokens do not match.*?(\d+).*?(\d+)", said, re.S
    )
    if found is None:
        found = re.search(r"tokens:? (\d+),? features:? (\d+)", said)
    if found is None or shape.image_tokens != 1:
        return []
    given, wanted = int(found[1]), int(found[2])
    return [replace(shape, image_tokens=max(1, wanted // max(1, given)))]


# -- batches ---------------------------------------------------------------------------------------


def collate(samples: Sequence[Sample], pads: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A batch: tensors padded at the right to the longest; what is no tensor stays a list."""
    pads = pads or {}
    batch: dict[str, Any] = {}
    first_sample = samples[0]
    for name, first in first_sample.items():
        values = [sample[name] for sample in samples]
        if GRID in first_sample and name in (GRID, "pixel_values"):
            batch[name] = torch.cat(values)
            continue
        batch[name] = _padded(values, pads.get(name, 0)) if isinstance(first, Tensor) else values
    return batch


def _padded(values: Sequence[Tensor], pad: int) -> Tensor:
    size = [max(sizes) for sizes in zip(*(value.shape for value in values))]
    whole = torch.full((len(values), *size), pad, dtype=values[0].dtype)
    for row, value in zip(whole, values):
        row[tuple(slice(n) for n in value.shape)] = value
    return whole


def pads(config: Any) -> dict[str, int]:
    """What tensors are padded with that are not padded with zeros."""
    pad = of_any(config, "pad_token_id")
    return {
        "labels": IGNORED,
        "input_ids": pad if isinstance(pad, int) else 0,
        "decoder_input_ids": pad if isinstance(pad, int) else 0,
    }


def of_any(config: Any, *names: str) -> Any:
    """The first of these that the configuration, or one inside of it, has."""
    return next(
        (
            getattr(one, name)
            for one in (config, *nested(config))
            for name in names
            if hasattr(one, name)
        ),
        None,
    )


def _draw(of: range, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(of.start, of.stop, size, generator=generator)
