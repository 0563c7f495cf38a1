"""Samples for any model, from the signature of its forward and its configuration.

Where a signature leaves open what a tensor looks like, several shapes are tried in turn, and so are
labels of several kinds; what the model takes and computes a loss from is used. A batch has samples
of unlike length, padded at the right by `collate`.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zoo_of.inputs import MAKERS, SIDES, SOUND_MASKS, frames_mask, optional
from zoo_of.small import IMAGE, LABELS, ORDINARY, TOKEN_ID, nested, of_any

IGNORED = -100
LONGEST, SHORTEST = 16, 6
MOST_TRIES = 60
IMAGE_TOKENS = "image_token_id", "image_token_index"
SOUND_TOKENS = "audio_token_id", "audio_token_index"
GRID = "image_grid_thw"  # with it, patches of all pictures of a batch are rows of one tensor
PATCHES = (1, 4, 4)
NOT_FINITE = "the loss is not finite"
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
        length: of a sound; 0: as the configuration or custom has it.
        bins: of a spectrogram; 0: the same.
        image_tokens: placeholders of an image in the text.
        sound_tokens: of a sound.
        more: whether optional inputs are given too.
    """

    labels: str
    image: tuple[int, ...] = (3, IMAGE, IMAGE)
    sound: str = "wave"
    length: int = 0
    bins: int = 0
    image_tokens: int = 1
    sound_tokens: int = 1
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
        ids = self._words(length, generator)
        end = of_any(self.config, "eos_token_id")
        if isinstance(end, int):
            ids[-1] = end
        image = of_any(self.config, *IMAGE_TOKENS)
        if "pixel_values" in self.names and isinstance(image, int) and self.shape.image:
            ids = torch.cat([torch.full((self.shape.image_tokens,), image), ids])
        sound = of_any(self.config, *SOUND_TOKENS)
        heard = "input_features" in self.names and self.shape.sound != "none"
        if heard and isinstance(sound, int):
            ids = torch.cat([torch.full((self.shape.sound_tokens,), sound), ids])
        made = {"input_ids": ids}
        if "attention_mask" in self.names:
            made["attention_mask"] = torch.ones_like(ids)
        if "bbox" in self.names:
            made["bbox"] = torch.tensor([1, 2, 3, 4]).expand(len(ids), 4).clone()
        if "mm_token_type_ids" in self.names and isinstance(image, int):
            made["mm_token_type_ids"] = (ids == image).long()
        return made

    def _words(self, number: int, generator: torch.Generator) -> Tensor:
        """Token ids without a meaning of their own."""
        size = of_any(self.config, "vocab_size")
        end = min(ORDINARY.stop, size) if isinstance(size, int) and size > 8 else ORDINARY.stop
        special = (
            {
                value
                for one in (self.config, *nested(self.config))
                for name, value in vars(one).items()
                if TOKEN_ID.search(name) and isinstance(value, int)
            }
            if self.config is not None
            else set()
        )
        words = torch.tensor([n for n in range(ORDINARY.start, end) if n not in special])
        return words[_draw(range(len(words)), (number,), generator)]

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
        bins = self.shape.bins or (bins if isinstance(bins, int) else 80)
        long = of_any(self.config, "max_source_positions")
        frames = 2 * long if isinstance(long, int) and "encoder_layers" in vars(self.config) else 64
        if "max_length" in vars(self.config):
            frames = self.config.max_length
        frames = self.shape.length or frames
        for name in ("input_values", "input_features"):
            if name not in self.names or self.shape.sound == "none":
                continue
            size = {
                "wave": (self.shape.length or 1600,),
                "bins": (bins, frames),
                "frames": (frames, bins),
            }
            made[name] = torch.randn(size[self.shape.sound], generator=generator)
        return made

    def _others(self, made: Sample, generator: torch.Generator) -> Sample:
        """What few models want."""
        more: Sample = {}
        for name in self.shape.more:
            if name in made or name not in self.names:
                continue
            if name in SOUND_MASKS and self.shape.sound == "none":
                continue
            if name in SOUND_MASKS:
                more |= frames_mask(name, made, self.shape.sound)
            else:
                more |= MAKERS[name](self.config, made, generator)
        return more

    def _labels(self, made: Sample, generator: torch.Generator) -> Sample:
        kind = self.shape.labels
        ids = made.get("input_ids")
        if kind == "none":
            return {}
        if kind == "tokens":
            assert ids is not None
            for name in (*IMAGE_TOKENS, *SOUND_TOKENS):
                place = of_any(self.config, name)
                ids = ids if place is None else ids.masked_fill(ids == place, IGNORED)
            return {"labels": ids}
        if kind == "masked":
            assert ids is not None
            hidden = torch.rand(ids.shape, generator=generator) < 0.4
            hidden[0] = True
            return {"labels": ids.masked_fill(~hidden, IGNORED)}
        if kind == "text":
            length = int(torch.randint(3, 8, (), generator=generator))
            return {"labels": self._words(length, generator)}
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
            return {"labels": _draw(range(LABELS), (4,), generator)}
        if kind == "scores":
            return {"labels": torch.rand(LABELS, generator=generator)}
        if kind == "frames of classes":
            classes = _draw(range(LABELS), (4,), generator)
            return {"labels": nn.functional.one_hot(classes, LABELS)}
        if kind == "masks":
            masks = torch.rand(2, *self.shape.image[-2:], generator=generator) < 0.5
            return {
                "mask_labels": masks.float(),
                "class_labels": _draw(range(LABELS), (2,), generator),
            }
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
    ("QUESTION_ANSWERING", ("span", "class", "text", "tags", "scores")),
    ("TOKEN_CLASSIFICATION", ("tags",)),
    ("SEQUENCE_CLASSIFICATION|IMAGE_CLASSIFICATION|VIDEO_CL|AUDIO_CL|XVECTOR", ("class",)),
    ("NEXT_SENTENCE", ("pair",)),
    ("MASKED_LM", ("masked", "tokens")),
    ("CAUSAL_LM", ("tokens", "text")),
    ("PRETRAINING", ("pretraining", "tokens", "text", "none", "class")),
    ("CTC|RNNT|TDT", ("text",)),
    ("SEMANTIC_SEG|IMAGE_SEGMENTATION|UNIVERSAL|INSTANCE", ("map", "boxes", "masks")),
    ("OBJECT_DETECTION|POSE", ("boxes",)),
    ("DEPTH|NORMAL|MATTING", ("depth",)),
    ("MASKED_IMAGE", ("none",)),
    ("FRAME_CL", ("frames", "frames of classes")),
    ("", ("tokens", "text", "class", "none")),
)


def feed_for(model: nn.Module, task: str, end: float = math.inf) -> Feed:
    """The first shape of samples from which `model` computes a loss.

    Args:
        end: until when shapes are tried.

    Raises:
        NotFed: there is none.
    """
    said: dict[str, str] = {}
    tries = 0
    tried: list[Shape] = []
    names = tuple(inspect.signature(model.forward).parameters)
    queue = [Shape("own")] if hasattr(model, "sample") else [*_shapes(model, names, task)]
    while queue and tries < MOST_TRIES and time.monotonic() < end:
        shape = queue.pop(0)
        tries += 1
        tried.append(shape)
        feed = Feed.of(model, shape)
        try:
            problem = _problem(model, feed.collate(feed.samples(2, seed=0)))
            if not problem:  # lengths that fit by chance do not fit once more
                problem = _problem(model, feed.collate(feed.samples(3, seed=1)), backward=True)
        except Exception as error:  # of any model's code
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if not problem:
            return feed
        queue[:0] = [one for one in _asked_for(problem, shape) if one not in tried]
        said.setdefault(problem, shape.labels)
    raise NotFed("; ".join(said) if len(said) < 3 else "; ".join([*said][:2]))


def _problem(model: nn.Module, batch: Mapping[str, Any], *, backward: bool = False) -> str:
    result = model(**batch)
    loss = result.get("loss") if isinstance(result, Mapping) else None
    if not isinstance(loss, Tensor):
        return "forward returns no loss"
    if not loss.requires_grad:
        return "the loss does not depend on parameters"
    if loss.dim():
        return f"the loss has shape {tuple(loss.shape)}"
    if not loss.isfinite():
        return NOT_FINITE
    if backward:
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return "a gradient is not finite"
    return ""


def _shapes(model: nn.Module, names: Sequence[str], task: str) -> Iterator[Shape]:
    kinds = next(kinds for pattern, kinds in KINDS if re.search(pattern, task))
    if "start_positions" not in names:
        kinds = tuple(k for k in kinds if k != "span")
    if "mask_labels" in names:
        kinds = ("masks",)
    elif "labels" not in names:
        kinds = tuple(k for k in kinds if k in ("span", "none")) or ("none",)
    if "input_ids" not in names:
        kinds = tuple(k for k in kinds if k not in ("tokens", "masked", "tags", "choice", "span"))
    sounds: tuple[str, ...] = ("wave",)
    if {"input_values", "input_features"}.intersection(names):
        sounds = (
            ("wave", "bins", "frames") if "input_values" in names else ("bins", "frames", "wave")
        )
        sounds += ("none",) if "input_ids" in names else ()
    here = optional(names)
    mores: tuple[tuple[str, ...], ...] = ((), here) if here else ((),)
    images = _images(getattr(model, "config", None), names)
    for image, sound, more, kind in product(images, sounds, mores, kinds):
        yield Shape(labels=kind, image=image, sound=sound, more=more)


def _images(config: Any, names: Sequence[str]) -> list[tuple[int, ...]]:
    if "pixel_values" not in names:
        return [(3, IMAGE, IMAGE)]
    side = of_any(config, "image_size", "img_size") or IMAGE
    sides = (side, side) if isinstance(side, int) else tuple(side)
    plain = (3, *sides)
    images: list[tuple[int, ...]] = [plain]
    if "spatial_shapes" in names:
        patch = of_any(config, "patch_size") or 8
        images.append((math.prod(SIDES), 3 * patch * patch))
    if GRID not in names:
        frames = of_any(config, "num_frames") or 4
        images += [(1, *plain), (frames, *plain), (3, IMAGE, IMAGE), (3, 64, 64), (1, *sides)]
    if "input_ids" in names:
        images.append(())
    return list(dict.fromkeys(images))


# What errors of models ask for in numbers, given and wanted: placeholders of an image.
PLACEHOLDERS = (
    r"[Ii]mage features and image tokens do not match.*?(\d+).*?(\d+)",
    r"tokens:? (\d+),? features:? (\d+)",
)
# The same of lengths of sounds.
LENGTHS = (r"length (\d+), but found", r"multiple of .*?\((\d+)\)", r"not a multiple of (\d+)")
TOO_SHORT, LONGER = "Kernel size can't be greater than actual input size", 6400
PRODUCT = r"cannot be multiplied \(\d+x\d+ and (\d+)x|normalized_shape=\[(\d+)\]"
ABSENT = r"missing \d+ required positional arguments?: (.*)"


def _asked_for(said: str, shape: Shape) -> list[Shape]:
    """The shapes that an error of a model's asks for."""
    found = next(filter(None, (re.search(one, said, re.S) for one in PLACEHOLDERS)), None)
    if found is not None:
        number = max(1, int(found[2]) // max(1, int(found[1])))
        if "udio" in said:
            return [replace(shape, sound_tokens=number)] if shape.sound_tokens == 1 else []
        return [replace(shape, image_tokens=number)] if shape.image_tokens == 1 else []
    long = next(filter(None, (re.search(one, said) for one in LENGTHS)), None)
    if long is not None:
        return [replace(shape, length=int(long[1]))]
    ctc = said == NOT_FINITE and shape.labels == "text"  # has more labels than frames
    if (ctc or TOO_SHORT in said) and shape.length == 0:
        return [replace(shape, length=LONGER)]
    product = re.search(PRODUCT, said)
    if product is not None and shape.sound == "frames" and shape.bins == 0:
        return [replace(shape, bins=int(product[1] or product[2]))]
    absent = re.search(ABSENT, said)
    if absent is not None:
        names = tuple(re.findall(r"'(\w+)'", absent[1]))
        if all(name in MAKERS or name in SOUND_MASKS for name in names):
            return [replace(shape, more=(*shape.more, *names))]
    return []


# -- batches ---------------------------------------------------------------------------------------


def collate(samples: Sequence[Sample], pads: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A batch: tensors padded at the right to the longest; a switch is one for all samples, what
    else is no tensor stays a list."""
    pads = pads or {}
    batch: dict[str, Any] = {}
    first_sample = samples[0]
    for name, first in first_sample.items():
        values = [sample[name] for sample in samples]
        if GRID in first_sample and name in (GRID, "pixel_values"):
            batch[name] = torch.cat(values)
            continue
        if isinstance(first, bool):
            batch[name] = first
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


def _draw(of: range, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(of.start, of.stop, size, generator=generator)
