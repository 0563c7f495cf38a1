"""Attacks by what a job names: weights, configurations, tokenizers, texts, datasets, folders."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from helpers.attacks.attacked import PWNED, Attack, Place, gpumix
from helpers.attacks.state_attacks import _Harm
from helpers.attacks.strangers import give_away

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
    "vocab_size": 264,
}  # fmt: skip
JOB: dict[str, Any] = {
    "model": {"config": CONFIG},
    "data": {"text": ["corpus.txt"], "num_workers": 0},
    "tokenizer": "bytes",
    "sequence_length": 32,
    "global_batch_size": 4,
    "max_steps": 2,
    "output_dir": "output",
    "cluster": [{"class": "fast", "emulate": "8 GFLOP/s", "memory": "64 MiB", "count": 2}],
}


def tried(place: Place, **changes: Any) -> str:
    """The user's job with something of the stranger: what a start checks, and what the first rank
    reads."""
    (place.root / "corpus.txt").write_text("one and two and three\n" * 50)
    (place.root / "job.yaml").write_text(yaml.safe_dump(JOB | changes))
    os.environ["XDG_CACHE_HOME"] = str(place.root / "cache")
    checked = gpumix(place, "train", "job.yaml", "--dry-run")
    return checked + (gpumix(place, "profile", "job.yaml") if checked.startswith("exit 0") else "")


# -- weights ---------------------------------------------------------------------------------------


def header(tensors: dict[str, Any] | bytes, length: int | None = None) -> bytes:
    """The head of a safetensors file."""
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\1\0\0",
    "length 2^63": header(b"{}", 2**63),
    "length 2^40": header(b"{}", 2**40),
    "length of 90 MB": header(b"{", 9 * 10**7),
    "not JSON": header(b"\xff" * 64),
    "nested": header(b"[" * 200_000),
    "a list": header(b"[]"),
    "no tensors": header({}),
    "elements 2^62": header({"model.norm.weight": tensor([0, 2**62], 0, 0)}),
    "elements 2^124": header({"model.norm.weight": tensor([2**62, 2**62], 0, 0)}),
    "negative": header({"model.norm.weight": tensor([-1], 0, 4)}) + b"\0" * 4,
    "beyond": header({"model.norm.weight": tensor([8], 0, 32)}),
    "overlapping": header({"a": tensor([1], 0, 4), "b": tensor([1], 2, 6)}) + b"\0" * 8,
    "dtype": header({"a": tensor([1], 0, 4, "F999")}) + b"\0" * 4,
    "an order": header({"\x1b]0;title\x07": tensor([1], 0, 4)}) + b"\0" * 4,
    "right to left": header({"\u202egpj": tensor([1], 0, 4)}) + b"\0" * 4,
    "metadata": header({"__metadata__": {"format": ["pt"]}, "a": tensor([1], 0, 4)}) + b"\0" * 4,
    "100,000 tensors": header({f"t{n}": tensor([0], 0, 0) for n in range(100_000)}),
}


def weights(content: bytes, place: Place) -> str:
    place.leave("model/config.json", json.dumps(CONFIG))
    place.leave("model/model.safetensors", content)
    return tried(place, model={"config": CONFIG, "weights": str(place.run / "model")})


def special_weights(name: str, make: str, place: Place) -> str:
    """A file of a model that is no file, is huge, or is the user's."""
    place.leave("model/config.json", json.dumps(CONFIG))
    place.leave("model/model.safetensors", WEIGHTS["no tensors"])
    path = place.run / "model" / name
    path.unlink(missing_ok=True)
    if make == "pipe":
        os.mkfifo(path)
    elif make == "sparse":
        path.touch()
        os.truncate(path, 30 * 10**9)
    else:
        target = {"device": "/dev/zero", "kernel": "/proc/kmsg", "secret": place.secret}[make]
        path.symlink_to(target)
        give_away(path)
    model = {"config": str(place.run / "model/config.json"), "weights": str(place.run / "model")}
    return tried(place, model=model)


INDICES: dict[str, Any] = {
    "above": {"weight_map": {"model.norm.weight": "../../home/thesis"}},
    "of root": {"weight_map": {"model.norm.weight": "/etc/passwd"}},
    "itself": {"weight_map": {"model.norm.weight": "model.safetensors.index.json"}},
    "a number": {"weight_map": {"model.norm.weight": 5}},
    "a list": {"weight_map": ["model.norm.weight"]},
    "none": {},
    "no mapping": [],
    "an order": {"weight_map": {"\x1b[2J": "a\x1b[2J.safetensors"}},
    "null": {"weight_map": {"model.norm.weight": "a\0b.safetensors"}},
    "long": {"weight_map": {"model.norm.weight": "x" * 5000}},
    "folder": {"weight_map": {"model.norm.weight": "."}},
    "200,000": {"weight_map": {f"t{n}": "model-1.safetensors" for n in range(200_000)}},
    "200,000 files": {"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(200_000)}},
}


def index(content: Any, place: Place) -> str:
    place.leave("model/config.json", json.dumps(CONFIG))
    place.leave("model/model.safetensors.index.json", json.dumps(content))
    return tried(place, model={"config": CONFIG, "weights": str(place.run / "model")})


def pickled(name: str, place: Place) -> str:
    import pickle

    place.leave("model/config.json", json.dumps(CONFIG))
    place.leave(f"model/{name}", pickle.dumps(_Harm(str(place.root / PWNED))))
    return tried(place, model={"config": CONFIG, "weights": str(place.run / "model")})


# -- configurations --------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "code": {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
    "kernels of a hub": {"_attn_implementation": "kernels-community/flash-attn"},
    "attention": {"attn_implementation": "os.system"},
    "dtype": {"dtype": "load"},
    "torch_dtype": {"torch_dtype": "../x"},
    "layers 10^9": {"num_hidden_layers": 10**9},
    "layers -1": {"num_hidden_layers": -1},
    "layers a text": {"num_hidden_layers": "2"},
    "vocabulary 2^62": {"vocab_size": 2**62},
    "vocabulary 10^400": {"vocab_size": 10**400},
    "vocabulary -5": {"vocab_size": -5},
    "width 0": {"hidden_size": 0},
    "width 1e308": {"hidden_size": 1e308},
    "heads 0": {"num_attention_heads": 0},
    "model type": {"model_type": "../../home"},
    "type with an order": {"model_type": "\x1b]0;title\x07"},
    "quantised": {"quantization_config": {"quant_method": "\u202eevil", "x": 1}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": "x"}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 10**9}},
    "rope": {"rope_scaling": {"type": "evil", "factor": -1}},
    "rope a list": {"rope_parameters": [[[1]]]},
    "tied": {"tie_word_embeddings": "maybe"},
    "layer types": {"layer_types": ["x"] * 100_000},
    "labels": {"id2label": {"x": 1}, "num_labels": 10**7},
    "eps": {"rms_norm_eps": "1e-6; import os"},
    "token": {"pad_token_id": 2**63},
    "activation": {"hidden_act": "__import__('os').system('touch PWNED')"},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**8},
    "sub": {"text_config": {"model_type": "llama"}, "vision_config": 5},
}  # fmt: skip


def configured(change: dict[str, Any], place: Place) -> str:
    place.leave("model/config.json", json.dumps(CONFIG | change))
    place.leave("model/evil.py", f"open({str(place.root / PWNED)!r}, 'w')\n")
    return tried(place, model={"config": str(place.run / "model/config.json")})


# -- tokenizers ------------------------------------------------------------------------------------


def words(**changes: Any) -> dict[str, Any]:
    vocabulary = {"[UNK]": 0, "one": 1, "</s>": 2}
    nothing = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    found: dict[str, Any] = dict.fromkeys(nothing)
    found |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    found["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return found | changes


TOKENIZERS: dict[str, bytes] = {
    name: content if isinstance(content, bytes) else json.dumps(content).encode()
    for name, content in {
        "empty": b"",
        "nested": b'{"a": ' + b"[" * 200_000,
        "no UTF-8": b"\xff\xfe",
        "ids 2^63": words(model={"type": "WordLevel", "vocab": {"a": 2**63}, "unk_token": "a"}),
        "ids of 2^31": words(
            model={"type": "WordLevel", "vocab": {"a": 2**31 + 5, "</s>": 1}, "unk_token": "a"}
        ),
        "no model": words(model={"type": "\x1b[2J"}),
        "a pattern that has no end": words(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(([a-z ])+.)+[A-Z]([a-z ])+$"},
                           "behavior": "Isolated", "invert": False}
        ),
        "a pattern that is none": words(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated",
                           "invert": False}
        ),
        "an order": words(added_tokens=[{"id": 2, "content": "\x1b]0;t\x07", "single_word": False,
                                         "lstrip": False, "rstrip": False, "normalized": False,
                                         "special": True}]),
    }.items()
}  # fmt: skip


def tokenized(content: bytes, place: Place) -> str:
    place.leave("tokenizer.json", content)
    return tried(place, tokenizer=str(place.run / "tokenizer.json"))


def special_tokenizer(make: str, place: Place) -> str:
    path = place.run / "tokenizer.json"
    if make == "pipe":
        os.mkfifo(path)
    elif make == "sparse":
        path.touch()
        os.truncate(path, 30 * 10**9)
    elif make == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "secret": place.secret}[make])
        give_away(path)
    return tried(place, tokenizer=str(path))


# -- texts -----------------------------------------------------------------------------------------


def texts(how: str, place: Place) -> str:
    """A folder of texts of a stranger."""
    folder = place.run / "texts"
    place.leave("texts/a.txt", "one and two and three\n" * 50)
    if how == "pipe":
        os.mkfifo(folder / "b.txt")
    elif how == "device":
        (folder / "b.txt").symlink_to("/dev/zero")
    elif how == "kernel":
        (folder / "b.txt").symlink_to("/proc/kmsg")
    elif how == "circle":
        (folder / "b").symlink_to(folder)
        (folder / "b.txt").symlink_to("b.txt")
    elif how == "secret":
        (folder / "b.txt").symlink_to(place.secret)
        give_away(folder / "b.txt")
    elif how == "name that is no UTF-8":
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("one\n" * 50)
    elif how == "name with an order":
        (folder / "\x1b]0;t\x07.txt").write_bytes(b"\xff\n" * 50)
    elif how == "no UTF-8":
        place.leave("texts/b.txt", b"one \xff\xfe two\n" * 50)
    elif how == "nulls":
        place.leave("texts/b.txt", b"\0" * 10_000)
    elif how == "folder named as a text":
        (folder / "b.txt").mkdir()
    elif how == "20,000 files":
        for number in range(20_000):
            (folder / f"{number}.txt").touch()
    elif how == "surrogates":
        place.leave("texts/b.txt", b"\\ud800" + b"\xed\xa0\x80" * 100)
    return tried(place, data={"text": [str(folder)], "num_workers": 0})


TEXTS = (
    "pipe", "device", "kernel", "circle", "secret", "name that is no UTF-8", "name with an order",
    "no UTF-8", "nulls", "folder named as a text", "20,000 files", "surrogates",
)  # fmt: skip
PATTERNS = ("../**/*", "/etc/*", "**", "[", "\0", "*" * 3000, "a/../../home/*", "\x1b[2J*")


def matched(pattern: str, place: Place) -> str:
    place.leave("texts/a.txt", "one and two and three\n" * 50)
    data = {"text": [str(place.run / "texts")], "pattern": pattern, "num_workers": 0}
    return tried(place, data=data)


# -- saved datasets --------------------------------------------------------------------------------


def saved(name: str, change: Callable[[Any], Any] | bytes | str, place: Place) -> str:
    """A dataset as `save_to_disk` writes it, with one of its files changed."""
    import datasets

    folder = place.run / "rows"
    rows = {"input_ids": [[1, 2, 3, 4] * 8 for _ in range(40)]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
    path = next(folder.glob(name))
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, str):
        path.unlink()
        if change == "pipe":
            os.mkfifo(path)
        elif change == "sparse":
            path.touch()
            os.truncate(path, 30 * 10**9)
        elif change == "device":
            path.symlink_to("/dev/zero")
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return tried(place, data={"dataset": str(folder), "num_workers": 0})


def _with(**changes: Any) -> Callable[[Any], Any]:
    return lambda told: told | changes


def _features(**kind: Any) -> Callable[[Any], Any]:
    return lambda told: told | {"features": {"input_ids": kind}}


STATE, INFO, ROWS = "state.json", "dataset_info.json", "*.arrow"
DATASETS: dict[str, tuple[str, Callable[[Any], Any] | bytes | str]] = {
    "state above": (STATE, _with(_data_files=[{"filename": "../../home/thesis"}])),
    "state of root": (STATE, _with(_data_files=[{"filename": "/etc/passwd"}])),
    "state a number": (STATE, _with(_data_files=5)),
    "state no files": (STATE, _with(_data_files=[])),
    "state null": (STATE, _with(_data_files=[{"filename": "a\0b"}])),
    "state an order": (STATE, _with(_data_files=[{"filename": "\x1b[2J"}])),
    "state a list": (STATE, b"[]"),
    "state empty": (STATE, b""),
    "state nested": (STATE, b"[" * 200_000),
    "state fingerprint": (STATE, _with(_fingerprint="\x1b]0;t\x07/../..")),
    "state format": (STATE, _with(_format_type="evil", _format_kwargs={"x": 1})),
    "state indices": (STATE, _with(_indices_data_files=[{"filename": "x"}])),
    "state split": (STATE, _with(_split="\x1b[2J[0:")),
    "state pipe": (STATE, "pipe"),
    "state sparse": (STATE, "sparse"),
    "info a list": (INFO, b"[]"),
    "info features": (INFO, _with(features={"input_ids": {"_type": "Popen", "args": "id"}})),
    "info type": (INFO, _features(_type="\x1b[2J")),
    "info dtype": (INFO, _features(_type="Value", dtype="evil(1)")),
    "info list of lists": (INFO, _features(_type="List", feature={"_type": "List", "feature": 5})),
    "info other": (INFO, _features(_type="Value", dtype="string")),
    "info pipe": (INFO, "pipe"),
    "info huge": (INFO, _with(description="\x1b[2J" * 10**6)),
    "rows noise": (ROWS, bytes(range(256)) * 64),
    "rows empty": (ROWS, b""),
    "rows length": (ROWS, b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"\0" * 64),
    "rows pipe": (ROWS, "pipe"),
    "rows device": (ROWS, "device"),
    "rows sparse": (ROWS, "sparse"),
}

# -- folders of runs -------------------------------------------------------------------------------

OUTPUTS = (
    "/", "/dev/null", "/dev/null/x", "/proc/self/x", "/dev/full", "a\0b", "x" * 300, "x/" * 2100,
    "~nobody-there/x", "~", ".", "..", "job.yaml", "job.yaml/x", "\x1b[2J", "\u202ex", "-rf", " ",
    "$(touch PWNED)", "pipe", "circle", "dangling", "link/run", "theirs/run",
)  # fmt: skip


def put_out(name: str, place: Place) -> str:
    os.mkfifo(place.root / "pipe")
    (place.root / "circle").symlink_to("circle")
    (place.root / "dangling").symlink_to("nowhere/there")
    (place.root / "link").symlink_to(place.home)
    give_away(place.root / "link")
    (place.root / "theirs").symlink_to(place.run)
    return tried(place, output_dir=name)


def every() -> Iterator[Attack]:
    for name, content in WEIGHTS.items():
        yield Attack("weights", name, partial(weights, content))
    for name in ("config.json", "model.safetensors"):
        for make in ("pipe", "sparse", "device", "kernel", "secret"):
            yield Attack("weights", f"{name}, {make}", partial(special_weights, name, make))
    for name, told in INDICES.items():
        yield Attack("weights", f"index, {name}", partial(index, told))
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt"):
        yield Attack("weights", f"pickle, {name}", partial(pickled, name))
    for name, change in CONFIGS.items():
        yield Attack("configurations", name, partial(configured, change))
    for name, content in TOKENIZERS.items():
        yield Attack("tokenizers", name, partial(tokenized, content))
    for make in ("pipe", "sparse", "folder", "device", "secret"):
        yield Attack("tokenizers", make, partial(special_tokenizer, make))
    for how in TEXTS:
        yield Attack("texts", how, partial(texts, how))
    for pattern in PATTERNS:
        yield Attack("texts", f"pattern {pattern[:16]!r}", partial(matched, pattern))
    for name, (file, to) in DATASETS.items():
        yield Attack("saved datasets", name, partial(saved, file, to))
    for name in OUTPUTS:
        yield Attack("outputs", f"{name[:24]!r}", partial(put_out, name))
