"""Inputs that few models want, each by its name in their forward: masks, grids, series, boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zoo_of.small import of_any

SIDES = (4, 4)  # patches of a picture that is given as rows of patches
SHORT = 6
Made = dict[str, Any]
Maker = Callable[[Any, Made, torch.Generator], Made]


def _frames_of(made: Made, sound: str) -> int:
    features = made.get("input_features", made.get("input_values"))
    assert isinstance(features, Tensor), "a mask of sound without sound"
    return features.shape[0 if sound == "frames" else -1]


def frames_mask(name: str, made: Made, sound: str) -> Made:
    """Which frames of a sound are there: all."""
    return {name: torch.ones(_frames_of(made, sound), dtype=torch.long)}


def _text(name: str) -> Maker:
    def make(config: Any, made: Made, generator: torch.Generator) -> Made:
        return {name: torch.randint(5, 30, (SHORT,), generator=generator)}

    return make


def _visual_embeds(config: Any, made: Made, generator: torch.Generator) -> Made:
    width = of_any(config, "visual_embedding_dim") or 32
    mask = torch.ones(4, dtype=torch.long)
    return {
        "visual_embeds": torch.randn(4, width, generator=generator),
        "visual_attention_mask": mask,
    }


def _visual_feats(config: Any, made: Made, generator: torch.Generator) -> Made:
    width = of_any(config, "visual_feat_dim") or 32
    feats = torch.randn(4, width, generator=generator)
    return {"visual_feats": feats, "visual_pos": torch.rand(4, 4, generator=generator)}


def _series(name: str) -> Maker:
    def make(config: Any, made: Made, generator: torch.Generator) -> Made:
        channels = of_any(config, "num_input_channels")
        past = of_any(config, "context_length") or 32
        lags = of_any(config, "lags_sequence")
        if isinstance(lags, list | tuple) and lags and name.startswith("past"):
            past += max(lags)
        long = past if name.startswith("past") else of_any(config, "prediction_length") or 8
        if name.endswith("time_features"):
            features = of_any(config, "num_time_features") or 0
            return {name: torch.randn(long, features, generator=generator)}
        size = (long, channels) if isinstance(channels, int) and channels > 1 else (long,)
        if "lags_sequence" not in vars(config) and isinstance(channels, int):
            size = (long, channels)
        if name.endswith("mask"):
            return {name: torch.ones(size)}
        return {name: torch.randn(size, generator=generator)}

    return make


def _pixels(name: str, value: float = 1) -> Maker:
    """Of each pixel of a picture, or of each picture of a sample."""

    def make(config: Any, made: Made, generator: torch.Generator) -> Made:
        size = made["pixel_values"].shape
        return {name: torch.full((*size[:-3], *size[-2:]), value).long()}

    return make


def _rows_mask(config: Any, made: Made, generator: torch.Generator) -> Made:
    pixels = made["pixel_values"]
    size = pixels.shape[:1] if pixels.dim() == 2 else (*pixels.shape[:-3], *pixels.shape[-2:])
    return {"pixel_attention_mask": torch.ones(size, dtype=torch.long)}


def _sides(config: Any, made: Made, generator: torch.Generator) -> Made:
    return {"spatial_shapes": torch.tensor(SIDES)}


def _video(config: Any, made: Made, generator: torch.Generator) -> Made:
    side = of_any(config, "image_size") or 32
    sides = (side, side) if isinstance(side, int) else tuple(side)
    frames = of_any(config, "num_frames") or 4
    return {"pixel_values_videos": torch.randn(frames, 3, *sides, generator=generator)}


def _seen_images(config: Any, made: Made, generator: torch.Generator) -> Made:
    pictures = made["pixel_values"].shape[0]
    return {"image_attention_mask": torch.ones(len(made["input_ids"]), pictures).long()}


def _hidden_frames(config: Any, made: Made, generator: torch.Generator) -> Made:
    negatives = of_any(config, "num_negatives") or 10
    hidden = torch.tensor([True, False, True, False])
    drawn = torch.randint(0, 4, (4, negatives), generator=generator)
    return {"mask_time_indices": hidden, "sampled_negative_indices": drawn}


def _return_loss(config: Any, made: Made, generator: torch.Generator) -> Made:
    return {"return_loss": True}


MAKERS: dict[str, Maker] = {
    "decoder_input_ids": _text("decoder_input_ids"),
    "qformer_input_ids": _text("qformer_input_ids"),
    "visual_embeds": _visual_embeds,
    "visual_feats": _visual_feats,
    "past_values": _series("past_values"),
    "future_values": _series("future_values"),
    "target_values": _series("target_values"),
    "past_time_features": _series("past_time_features"),
    "future_time_features": _series("future_time_features"),
    "past_observed_mask": _series("past_observed_mask"),
    "future_observed_mask": _series("future_observed_mask"),
    "pixel_mask": _pixels("pixel_mask"),
    "pixel_attention_mask": _rows_mask,
    "spatial_shapes": _sides,
    "pixel_values_videos": _video,
    "image_attention_mask": _seen_images,
    "mask_time_indices": _hidden_frames,
    "return_loss": _return_loss,
}
# Of these, one is asked for where a forward has a sound but no ids.
SOUND_MASKS = ("input_features_mask", "feature_attention_mask", "attention_mask")


def optional(names: Iterable[str]) -> tuple[str, ...]:
    """The names of a forward's inputs that can be made here."""
    names = tuple(names)
    sound = {"input_features", "input_values"}.intersection(names)
    masks = tuple(name for name in SOUND_MASKS if name in names) if sound else ()
    if "input_ids" in names:
        masks = tuple(name for name in masks if name != "attention_mask")
    return tuple(name for name in MAKERS if name in names) + masks
