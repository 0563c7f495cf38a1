"""Small configurations of `transformers`, made from the defaults of any configuration class.

The values are changed by the names that configurations share (`hidden_size`, `num_hidden_layers`,
...), in nested configurations too; nothing here knows a model. Some models need other ratios than
most, so there are several `SIZES` to try.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 128
LABELS = 2
IMAGE, LARGE_IMAGE = 32, 224
MOST_STAGES = 8
ORDINARY = range(5, 90)  # token ids of words; special ones are elsewhere
OFF = re.compile(
    r"drop|pdrop|^mask_(time|feature)_prob$|^layerdrop$|jitter|stochastic|noise|label_smoothing"
)
TOKEN_ID = re.compile(r"(_token_id|_token_index|_id|_token_ids|_ids|_idx)$")
CHOICES = re.compile(
    r"^(num_experts_per_tok|moe_k|moe_top_?k|experts_per_token|top_?k(?!_group)|num_selects)"
)
# Settings that some classes leave to their checkpoints.
MISSING = (
    (re.compile(r"^vocab_size$"), lambda size: VOCABULARY),
    (re.compile(r"^(num_key_value_heads|num_kv_heads)$"), lambda size: size.heads),
    (re.compile(r"^(n_routed_experts|num_experts|num_local_experts)$"), lambda size: 4),
    (re.compile(r"^n_shared_experts$"), lambda size: 1),
    (re.compile(r"^sliding_window$"), lambda size: 8),
    (re.compile(r"^(image|audio)_token_(id|index)$"), lambda size: VOCABULARY // 2 + 30),
    (re.compile(r"^out_indices$"), lambda size: [0, 1, 2, 3]),
    (re.compile(r"^default_language$"), lambda size: "en_XX"),
    (re.compile(r"^layer_types$"), lambda size: ["full_attention"] * size.layers),
    (re.compile(r"^mlp_layer_types$"), lambda size: ["sparse"] * size.layers),
)
# What stands for models of timm that configurations name.
OF_TIMM = {"resnet50": "test_resnet", "mobilenetv5": "test_efficientnet"}
# Widths, which keep their ratios where all are divided by one number.
WIDTH = re.compile(
    r"hidden|d_model|n_embd|embed|(^|_)dims?$|(^|_)width$|projection|channels?$|_sizes?$|^d_|rank$"
    r"|intermediate|ffn|inner|mlp|feedforward|head_dim|d_kv|filters?$"
)
NO_WIDTH = re.compile(
    r"vocab|position|image|patch|kernel|window|chunk|group|stride|^num_|max_|_num_|length|mel"
)
SECTIONS = "mrope_section"
BASE = frozenset(inspect.signature(PretrainedConfig.__init__).parameters) | {
    "transformers_version", "architectures", "id2label", "label2id", "model_type", "dtype",
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How small.

    Attributes:
        width: of hidden states.
        layers: of a stack.
        heads, groups: of attention, and of its keys and values.
        head: the width of heads, in parts of `width` among them.
        patch: pixels of a patch's side.
        image: of an image's side; 0: as by default.
        lists: whether lists of numbers are changed as well.
        sections: whether rotations of heads are divided by axis.
        scale: by which all widths are divided, instead of being `width` at most.
        filled: whether settings that are None by default, as experts of some classes, get a value.
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    groups: int = 2
    head: int = 1
    patch: int = 8
    image: int = IMAGE
    lists: bool = True
    sections: bool = False
    scale: int = 0
    filled: bool = False


SIZES = (
    Size(),
    Size(groups=4),
    Size(sections=True),
    Size(lists=False, width=64),
    Size(groups=4, head=2),
    Size(layers=4),
    Size(width=64, heads=2, groups=2, image=64, patch=16),
    Size(width=64, layers=2, image=0, patch=0, lists=False),
    Size(filled=True),
    Size(groups=4, filled=True, sections=True),
    Size(scale=8, image=0, patch=0),
    Size(scale=16, image=0, patch=0, filled=True),
    Size(scale=4, layers=3, image=0, patch=0, filled=True),
    Size(width=64, layers=12),
)


def small_config(config_class: type[PretrainedConfig], size: Size) -> PretrainedConfig:
    """Its class's defaults, except settings that make models large or random."""
    ids = iter(range(VOCABULARY - 1, max(ORDINARY), -1))
    config = _smaller(config_class(), size, ids)
    texts = [config, *nested(config)]
    for one in texts:
        one.use_cache = False
    if not any(hasattr(one, "vocab_size") for one in texts):
        return config
    for one in texts:
        if getattr(one, "pad_token_id", 0) is None:
            one.pad_token_id = 0
    decodes = getattr(config, "is_encoder_decoder", False)
    if decodes and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def nested(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The configurations inside of one."""
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield value
            yield from nested(value)


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


def _smaller(default: PretrainedConfig, size: Size, ids: Iterator[int]) -> PretrainedConfig:
    """
    Args:
        ids: of special tokens, which have to be within the vocabulary.
    """
    changed: dict[str, Any] = {}
    by_layer = _by_layer(default) if size.lists else {}
    depth = _depth(by_layer, size)
    stages = [len(value) for value in vars(default).values() if isinstance(value, list | tuple)]
    for name, value in vars(default).items():
        if name.startswith("_") or (name in BASE and not TOKEN_ID.search(name)):
            continue
        if isinstance(value, PretrainedConfig):
            changed[name] = _smaller(value, size, ids)
        elif value is None and size.filled and _missing(name, size) is not None:
            changed[name] = _missing(name, size)
        elif TOKEN_ID.search(name):
            if isinstance(value, int) and not isinstance(value, bool) and value >= max(ORDINARY):
                changed[name] = next(ids)
        elif value is None and CHOICES.search(name):
            changed[name] = 2
        elif name == "head_dim" and value is None and hasattr(default, "num_attention_heads"):
            changed[name] = size.width // size.heads
        elif name in by_layer:
            changed[name] = _changed(name, value[:depth], size)
        elif by_layer and name == "num_hidden_layers":
            changed[name] = depth
        elif "layers" not in name or value not in stages:
            new = _changed(name, value, size)
            if new != value:
                changed[name] = new
    made = type(default)
    try:
        return made(num_labels=LABELS, **{**_own_choices(default), **changed})
    except Exception:  # what was chosen does not fit a smaller one
        return made(num_labels=LABELS, **changed)


def _own_choices(config: PretrainedConfig) -> dict[str, Any]:
    """Settings of a configuration that are not its class's defaults, as those of a backbone that
    another class has chosen."""
    plain = type(config)()
    names = [name for name in vars(config) if not name.startswith("_") and name not in BASE]
    names += [name for name in ("out_features",) if hasattr(config, name)]
    return {
        name: getattr(config, name)
        for name in names
        if not isinstance(getattr(config, name), PretrainedConfig)
        and (not hasattr(plain, name) or getattr(config, name) != getattr(plain, name))
    }


def _by_layer(default: PretrainedConfig) -> dict[str, Sequence[Any]]:
    """The settings that have a value for each layer of a stack that is too deep here."""
    layers = getattr(default, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= MOST_STAGES:
        return {}
    return {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and len(value) == layers
    }


def _depth(by_layer: Mapping[str, Sequence[Any]], size: Size) -> int:
    """So many layers that all types of them are there, if they are not too many."""
    firsts = [
        values.index(kind)
        for values in by_layer.values()
        if all(isinstance(one, str) for one in values)
        for kind in set(values)
    ]
    return max(size.layers, *(1 + n for n in firsts if n < MOST_STAGES), 0)


def _missing(name: str, size: Size) -> Any:
    return next((value(size) for pattern, value in MISSING if pattern.search(name)), None)


def _changed(name: str, value: Any, size: Size) -> Any:
    if isinstance(value, bool):
        return False if name == "apply_spec_augment" else value
    if isinstance(value, str):
        return next((small for kind, small in OF_TIMM.items() if value.startswith(kind)), value)
    if isinstance(value, float):
        return 0.0 if OFF.search(name) else value
    if isinstance(value, int):
        return _number(name, value, size)
    if isinstance(value, dict) and (SECTIONS in value or (size.sections and "rope_theta" in value)):
        if size.scale:
            return {**value, SECTIONS: [n // size.scale or 1 for n in value.get(SECTIONS, [])]}
        rotary = value.get("partial_rotary_factor") or 1.0
        pairs = int(rotary * size.head * size.width) // size.heads // 2
        part = max(1, pairs // 4)
        parts = [pairs - 2 * part, part, part]
        return {**value, SECTIONS: parts[::-1] if size.filled else parts}
    if isinstance(value, list | tuple) and value and size.lists:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return type(value)(_numbers(name, value, size))
        if all(isinstance(one, float) for one in value) and OFF.search(name):
            return type(value)(0.0 for _ in value)
    return value


def _number(name: str, value: int, size: Size) -> int:
    """The rule of the first pattern that a name fits."""
    if size.scale and _is_width(name):
        return _scaled(value, size)
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value, size)
    if value >= 1024 and not size.scale:  # of a kind that has no name here: large all the same
        return 4 * size.width
    return value


def _is_width(name: str) -> bool:
    return bool(WIDTH.search(name)) and not NO_WIDTH.search(name)


def _scaled(value: int, size: Size) -> int:
    return value // size.scale if value >= 32 and value % size.scale == 0 else value


def _least(limit: int) -> Any:
    return lambda value, size: min(value, limit)


RULES: tuple[tuple[str, Any], ...] = (
    (r"vocab.*size|^vocab|n_vocab|num_embeddings", _least(VOCABULARY)),
    (CHOICES.pattern, _least(2)),
    (r"kernel|xpath", lambda v, s: v),
    (r"num_groups$", _least(4)),
    (r"topk_group", _least(1)),
    (r"n_group", _least(2)),
    (r"experts?(_|$)|n_routed", _least(4)),
    (r"max.*position|n_positions|max_seq|max_length|seq_len|max_.*_positions", _least(512)),
    (r"image_size|img_size|input_size|crop_size", lambda v, s: min(v, s.image or LARGE_IMAGE)),
    (r"patch_size|patch_stride", lambda v, s: min(v, s.patch) if s.patch else v),
    (r"^(mamba|ssm).*(d_head|head_dim)", lambda v, s: min(v, 2 * s.width // s.heads)),
    (
        r"head_dim|d_kv|head_size|qk_.*dim|v_head_dim|d_head|attention_head_size|rotary_dim$",
        lambda v, s: min(v, s.head * s.width // s.heads),
    ),
    (
        r"kv_heads|key_value_heads|num_kv|n_kv|head_kv|kv_groups",
        lambda v, s: v if s.scale else min(v, s.groups),
    ),
    (r"heads?$|n_head|num_heads|attention_heads", lambda v, s: v if s.scale else min(v, s.heads)),
    (r"^mm_tokens_per_image", _least(4)),
    (r"^window_size", lambda v, s: 2 if v <= 16 else v),
    (r"lora_rank|_rank$", _least(16)),
    (r"shared_layers$", _least(1)),
    (r"layers$|n_layers?$|num_.*layers|num_blocks|depth$|n_blocks", lambda v, s: min(v, s.layers)),
    (
        r"(intermediate|ffn|inner|mlp|d_ff|feedforward|feed_forward)",
        lambda v, s: min(v, 2 * s.width),
    ),
    (
        r"hidden|d_model|n_embd|embed|(^|_)dim$|(^|_)width$|projection|channels?$|_size$|^d_",
        lambda v, s: min(v, s.width) if v >= 32 else v,
    ),
)


def _numbers(name: str, values: list[int] | tuple[int, ...], size: Size) -> Iterator[int]:
    """Of stages, mostly: widths keep their ratios as long as they are not too small."""
    if re.search(r"depth|layers|blocks", name):
        return (min(value, 2) for value in values)
    if re.search(r"intermediate|ffn", name) and len({*values}) == 1 and not size.scale:
        return (min(value, 2 * size.width) for value in values)
    if re.search(r"image_size|img_size", name):
        return (min(value, size.image or LARGE_IMAGE) for value in values)
    if size.scale:
        return (_scaled(value, size) if _is_width(name) else value for value in values)
    if re.search(r"heads", name):
        return (min(value, 2) for value in values)
    if re.search(r"hidden|dims?$|channels|embed|sizes|width", name) and max(values) >= 64:
        least = min(values)
        return (max(1, round(value / least)) * 16 for value in values)
    return iter(values)
