"""Configurations of models by the names that people use: a size, a hub id, a short name, a file.

Hub ids are looked up in the local cache of the hub first, then in `known_models.toml`. Nothing is
downloaded.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpumix.hardware.estimates.decoder_shapes import Decoder, make_decoder, make_llama_like
from gpumix.schema.errors import InputError
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import read_text
from gpumix.schema.reading.error_location import locate_errors
from gpumix.schema.reading.error_text import did_you_mean, find_nearest
from gpumix.schema.value import Value

_DATA = Path(__file__).with_name("known_models.toml")
_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([MBT])$", re.IGNORECASE)
_SCALE = {"M": 1e6, "B": 1e9, "T": 1e12}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


class KnownModel(Value):
    """A well-known model: hub id, short names, published number of parameters, configuration."""

    id: str
    aliases: tuple[str, ...]
    parameters: int
    config: dict[str, Any]


@dataclass(frozen=True)
class NamedDecoder:
    """A decoder with the name to show for it."""

    name: str
    shape: Decoder


@cache
def load_known_models() -> tuple[KnownModel, ...]:
    data = tomllib.loads(read_text(_DATA))
    return tuple(KnownModel.model_validate(one) for one in data["model"])


def find_decoder(text: str) -> NamedDecoder:
    """Find the decoder that `text` names.

    Args:
        text: a size such as "7B" (Llama-shaped), a path of a config.json or of a folder with one,
            a hub id, or a short name such as "llama-3-8b".

    Raises:
        InputError: nothing has this name, or the estimate does not know such models.
    """
    name = text.strip()
    if (size := parse_size(name)) is not None:
        return NamedDecoder(f"Llama-shaped {name.upper()}", make_llama_like(size))
    for path in _iterate_paths(name):
        if path.is_file():
            with locate_errors(path):
                return NamedDecoder(name, make_decoder(read_config(path)))
    if known := _index_names().get(_normalize(name)):
        return NamedDecoder(known.id, make_decoder(known.config))
    raise _unknown(name)


def parse_size(text: str) -> float | None:
    """Return the number of parameters of a size such as "7B"; None for other names."""
    size = _SIZE.match(text.strip())
    return None if size is None else float(size[1]) * _SCALE[size[2].upper()]


def read_config(path: Path) -> dict[str, Any]:
    """Read a model's config.json.

    Raises:
        InputError: the file is unreadable, or no configuration.
    """
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise InputError(
            "cannot read the model's configuration",
            code="model-config-unreadable",
            where=str(path),
            why=explain_unreadable(error),
            fix="give a config.json; without a job a size does too, such as 7B",
        ) from error
    if not isinstance(config, dict):
        raise InputError(
            "this is no configuration of a model",
            code="model-config-invalid",
            where=str(path),
            fix="give the config.json of a transformers model, or a size such as 7B",
        )
    return config


def _iterate_paths(name: str) -> Iterator[Path]:
    """Yield the files that may hold the configuration: given itself, in a folder, in the cache."""
    if len(name) > 4096 or "\0" in name:
        return
    yield Path(name)
    yield Path(name) / "config.json"
    if _HUB_ID.match(name):
        snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
        yield from sorted(snapshots.glob("*/config.json"), reverse=True)


def _hub_cache() -> Path:
    """Return the folder in which `huggingface_hub` keeps what it has downloaded."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"


@cache
def _index_names() -> dict[str, KnownModel]:
    return {
        _normalize(name): model
        for model in load_known_models()
        for name in (model.id, model.id.rpartition("/")[2], *model.aliases)
    }


def _normalize(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _unknown(name: str) -> InputError:
    known = sorted({alias for model in load_known_models() for alias in model.aliases})
    near = did_you_mean(find_nearest(_normalize(name), known))
    download = ""
    if _HUB_ID.match(name):
        download = f"; nothing is downloaded here: hf download {name} config.json"
    why = "there is no such file, it is not in the cache of the hub, and not among known models"
    return InputError(
        f"there is no model '{name}' to plan for",
        code="model-unknown",
        where="--model",
        why=why,
        fix=f"{near} give a size such as 7B, or the path of a config.json{download}".lstrip(),
    )
