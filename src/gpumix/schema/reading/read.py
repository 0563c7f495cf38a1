"""Reading of user files: a job file with `--set` arguments, and a cluster file.

This is the only way from YAML to a `Job` or a `Cluster`. Every error is an `InputError` naming the
key, the file and the line, or the argument. All errors of a file are reported together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.files import read_text
from gpumix.schema.job.job import Job
from gpumix.schema.reading.cluster_file import build_cluster
from gpumix.schema.reading.error_text import (
    combine_problems,
    did_you_mean,
    find_nearest,
    validate_strictly,
)
from gpumix.schema.reading.overrides import apply_override
from gpumix.schema.reading.yaml_locations import Keys, Tree, YamlLocation, load_yaml, show_value
from gpumix.schema.value import Value

AUTO: Literal["auto"] = "auto"
CLUSTER: Keys = ("cluster",)
KEYS_FIX = "write a key and a value on each line, such as `max_steps: 100`"
MOST_BYTE_TOKENS = 1024  # of models made for bytes: 256, some special ones, and room
CONFIG_FIX = "give the config.json of a transformers model, or its content with a model_type"


def read_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read the job from the YAML file at `path`, applying `overrides` of the form key=value.

    Relative paths start at the file's folder, paths in overrides at the current directory; the
    returned job has absolute paths. A cluster file named in the job is read too.

    Raises:
        InputError: a file or an override is wrong.
    """
    return read_located_job(path, overrides)[0]


def read_located_job(path: Path, overrides: Sequence[str] = ()) -> tuple[Job, Tree]:
    """Read a job as `read_job`; return also the locations of its keys, for later errors."""
    if path.suffix == ".py" and path.is_file():
        raise InputError(
            "this is a program, not a job",
            code="program-not-job",
            where=str(path),
            fix=f"run it on all devices: gpumix launch {path}",
        )
    tree = load_yaml(path, "job")
    if not isinstance(tree.value, dict):
        what = f"a job must be a mapping of keys to values, it is {show_value(tree.value)}"
        rows = isinstance(tree.value, list) and all(isinstance(row, dict) for row in tree.value)
        fix = f"of a cluster file: `cluster: {path}` in a job, or gpumix devices --cluster {path}"
        raise InputError(
            what, code="job-not-mapping", where=str(tree.place(())), fix=fix if rows else KEYS_FIX
        )
    if "schema_version" in tree.value and isinstance(kind := tree.value.get("kind"), str):
        beside = f", and this with --{kind}" if kind in ("plan", "profile") else ""
        raise InputError(
            f"this is a {kind}, not a job",
            code="document-of-another-kind",
            where=str(path),
            fix=f"give the job{beside}",
        )
    for override in overrides:
        tree = apply_override(tree, override)
    checked, written = _validate_job(tree)
    job: Job = _make_paths_absolute(checked, tree, ())
    if job.model.config is not None:
        _check_model_config(job.model.config, tree.place(("model", "config")))
    cluster = _read_named_cluster(written, tree) if isinstance(written, str) else written
    update: dict[str, Any] = {"cluster": cluster}
    if (tokenizer := _choose_tokenizer(job, tree)) != job.tokenizer:  # else it stays not given
        update["tokenizer"] = tokenizer
    return job.model_copy(update=update), tree


def read_cluster(path: Path) -> Cluster:
    """Read the cluster from the YAML file at `path`, in the long or short form.

    Raises:
        InputError: the file is wrong.
    """
    tree = load_yaml(path, "cluster")
    if isinstance(tree.value, dict) and not {"classes", "devices"} & tree.value.keys():
        kind = tree.value.get("kind") if "schema_version" in tree.value else None
        kind = "job" if {"model", "data"} <= tree.value.keys() else kind
        if isinstance(kind, str):
            raise InputError(
                f"this is a {kind}, not a cluster file",
                code="document-of-another-kind",
                where=str(path),
                fix="give a file with classes and devices, or with a list of devices: "
                "[{class: rtx3090, memory: 24 GiB}]",
            )
    cluster, problems = build_cluster(tree.value)
    if cluster is None:
        raise combine_problems(problems, tree)
    return cluster


def _validate_job(tree: Tree) -> tuple[Job, Cluster | str]:
    """Validate the job without its cluster; return both. The cluster is a value, a path or
    'auto'."""
    assert isinstance(tree.value, dict)
    written = tree.value.get("cluster", AUTO)
    cluster: Cluster | str | None
    cluster, problems = (
        (written, []) if isinstance(written, str) else build_cluster(written, CLUSTER)
    )
    job, found = validate_strictly(Job, {**tree.value, "cluster": AUTO})
    if job is None or cluster is None:
        raise combine_problems([*found, *problems], tree)
    return job, cluster


def _read_named_cluster(name: str, tree: Tree) -> Cluster | Literal["auto"]:
    """Return the cluster named by `name`, a path or 'auto'."""
    if name == AUTO:
        return AUTO
    place = tree.place(CLUSTER)
    path = _make_absolute(Path(name), place)
    what = f"'cluster': there is no cluster file {path}" if name else "'cluster' is empty"
    with suppress(OSError):  # a name may be too long for a file
        if name and path.is_dir():
            what = f"'cluster': {path} is a folder, not a cluster file"
        elif name and path.exists():
            return read_cluster(path)
    meant = did_you_mean(find_nearest(name, [AUTO]))
    raise InputError(
        what,
        code="cluster-file-missing",
        where=str(place),
        fix=f"{meant} give '{AUTO}', the path of a cluster file, or the cluster itself".lstrip(),
    )


def _make_paths_absolute(value: Any, tree: Tree, keys: Keys) -> Any:
    """Return `value`, found at `keys`, with absolute paths."""
    if isinstance(value, Path):
        return _make_absolute(value, tree.place(keys))
    if isinstance(value, tuple):
        return tuple(_make_paths_absolute(item, tree, (*keys, i)) for i, item in enumerate(value))
    if isinstance(value, Value):
        names = type(value).model_fields
        found = {n: _make_paths_absolute(getattr(value, n), tree, (*keys, n)) for n in names}
        changed = {n: item for n, item in found.items() if item != getattr(value, n)}
        return value.model_copy(update=changed)  # unset fields stay unset
    return value


def _make_absolute(path: Path, place: YamlLocation) -> Path:
    try:
        found = place.source.folder / path.expanduser()
        str(found).encode()
    except RuntimeError as error:
        raise InputError(
            f"'{path}' names no user's home", code="home-unknown", where=str(place)
        ) from error
    except UnicodeEncodeError as error:
        raise InputError(
            f"the name of '{found}' is no UTF-8",
            code="path-not-utf8",
            where=str(place),
            why="plans and records of runs name it, and are UTF-8",
            fix="rename it, or the folder that it is in",
        ) from error
    return found


def _check_model_config(config: Path | dict[str, Any], place: YamlLocation) -> None:
    """Check that a model configuration, in a file or inline, has a `model_type` for
    `transformers`."""
    found = _read_json(config, place) if isinstance(config, Path) else config
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        holder = f" in {config}" if isinstance(config, Path) else ""
        what = f"'model.config': there is no 'model_type'{holder}"
        raise InputError(what, code="model-type-missing", where=str(place), fix=CONFIG_FIX)


def _choose_tokenizer(job: Job, tree: Tree) -> Path | Literal["bytes"]:
    """Return the job's tokenizer; by default that of the initial weights, and bytes without any.
    Raise InputError if bytes would train a model made for the tokens of another tokenizer."""
    written = isinstance(tree.value, dict) and "tokenizer" in tree.value
    own = _tokenizer_of_weights(job.model.weights)
    if isinstance(job.tokenizer, Path) or not (job.data.text or job.data.tokenize == "on-the-fly"):
        return job.tokenizer
    place = str(tree.place(("tokenizer",) if written else ("model",)))
    if own is not None:
        if not written:
            return own
        raise InputError(
            "'tokenizer' is 'bytes', and the weights were trained with another one",
            code="tokenizer-of-other-weights",
            where=place,
            fix=f"leave it out, which takes {own}",
        )
    vocabulary = _configured_vocabulary(job.model.config, tree.place(("model", "config")))
    if not written and vocabulary is not None and vocabulary > MOST_BYTE_TOKENS:
        raise InputError(
            f"the job names no tokenizer, and the model has {vocabulary:,} tokens",
            code="tokenizer-missing",
            where=place,
            why="by default text is read as bytes, of which there are 256: the model would learn "
            "nothing that a tokenizer of its size can use",
            fix="give `tokenizer: PATH` of a tokenizer.json, or `tokenizer: bytes` if bytes are "
            "meant, with `vocab_size: 264` in model.config",
        )
    return job.tokenizer


def _tokenizer_of_weights(weights: Path | None) -> Path | None:
    """Return the tokenizer.json in the folder of the weights, if there is one."""
    if weights is None:
        return None
    folder = weights if weights.is_dir() else weights.parent
    found = folder / "tokenizer.json"
    return found if found.is_file() else None


def _configured_vocabulary(config: Path | dict[str, Any] | None, place: YamlLocation) -> int | None:
    """Return `vocab_size` of a model's configuration, if it says so."""
    found = _read_json(config, place) if isinstance(config, Path) else config
    size = found.get("vocab_size") if isinstance(found, dict) else None
    return size if isinstance(size, int) else None


def _read_json(path: Path, place: YamlLocation) -> object:
    try:
        return json.loads(read_text(path))
    except OSError as error:
        what, why = f"'model.config': cannot read {path}", error.strerror or str(error)
        raise InputError(
            what, code="model-config-unreadable", where=str(place), why=why, fix=CONFIG_FIX
        ) from error
    except (ValueError, RecursionError) as error:
        what = f"'model.config': {path} is not JSON"
        raise InputError(
            what, code="model-config-not-json", where=str(place), why=str(error), fix=CONFIG_FIX
        ) from error
