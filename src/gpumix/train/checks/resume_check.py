"""Check that a job may resume a saved run, before anything is measured; errors name the keys in
which the jobs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.train.checkpoint import checkpoint_folder
from gpumix.train.checkpoint.manifest import Manifest, read_manifest
from gpumix.train.checkpoint.model_files import dump_model_config
from gpumix.train.run_log import run_files

if TYPE_CHECKING:
    from torch import nn

    from gpumix.train.rank_setup.context import RankContext

# Keys deciding on the samples and their order; the batch only with streams and buckets.
_OF_DATA = ("data", "tokenizer", "sequence_length", "seed", "global_batch_size")
# Keys whose change alone makes a checkpoint unusable.
_DECISIVE_KEYS = {  # with the name and the code of their mistake
    "seed": ("other data", "checkpoint-of-other-data"),
    "optimizer.name": ("another optimizer", "checkpoint-of-another-optimizer"),
}
_READ_KEYS = ("num_workers", "prefetch", "bad_samples")  # no influence on the samples
# Keys of a transformers configuration without influence on the model.
_NON_MODEL_KEYS = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
LONGEST = 100  # length of a reported value


def check_keys(job: Job) -> None:
    """Check the keys known from the job alone, before ranks are started.

    Raises:
        InputError: the newest checkpoint in the job's output is of another seed or optimizer.
    """
    found = _newest(job.output_dir / run_files.CHECKPOINTS)
    before = found and found[1].extra.get("job")
    if found is not None and isinstance(before, dict):
        _check_keys(before, job.model_dump(mode="json"), found[0])


def _check_keys(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    for key, (what, code) in _DECISIVE_KEYS.items():
        if differing := list(_compare_key(key, before, now)):
            _refuse(what, differing, where, code=code)


def check_resume(context: RankContext, model: nn.Module, fingerprint: str) -> None:
    """Check the model, data and optimizer of the newest checkpoint in the job's output, if there is
    any. Collective: the first rank reads it.

    Args:
        fingerprint: the model's, as in plans.

    Raises:
        InputError: they differ from the job's.
    """
    from gpumix.data.order.sampler import (  # imports torch, unlike the launcher
        ByLength,
        make_start_cursor,
    )

    found = _newest(context.job.output_dir / run_files.CHECKPOINTS) if context.first else None
    told = found and json.dumps([found[0], found[1].model_dump_json()])
    text = context.ranks.share("newest checkpoint", told)
    if not text:
        return
    where, content = json.loads(text)
    saved, job = Manifest.model_validate_json(content), context.job
    before: Any = saved.extra.get("job")
    if not isinstance(before, dict):  # no job saved it
        return
    now = job.model_dump(mode="json")
    if saved.model not in (fingerprint, _fingerprint_as_planned(model, saved)):
        differing = list(_compare_models(saved, model, before, now))
        same = "its configuration or factory gives other units, shapes, dtypes or frozen parameters"
        _refuse("another model", differing or [same], where, code="checkpoint-of-another-model")
    source, by_length = context.train_data, ByLength(job.data.bucketing)
    try:
        make_start_cursor(source, job.seed, by_length, job.global_batch_size).load_state_dict(
            saved.cursor
        )
    except InputError:
        differing = list(_compare_data(before, now, job))
        same = "its samples are of other content, or there are more or fewer of them"
        _refuse("other data", differing or [same], where, code="checkpoint-of-other-data")
    _check_keys(before, now, where)


def _fingerprint_as_planned(model: nn.Module, saved: Manifest) -> str:
    """Return the model's fingerprint with the units of the saved plan, which may lack units never
    called by its samples; empty if the model lacks some of these units."""
    from gpumix.engine.sharding.unit_discovery import (
        split_into_units,  # imports torch, unlike the launcher
    )

    try:
        stages: Any = saved.extra["plan"]["stages"]  # type: ignore[index,call-overload]
        return split_into_units(
            model, [unit for stage in stages for unit in stage["units"]]
        ).fingerprint()
    except (InputError, LookupError, TypeError):
        return ""


def _newest(folder: Path) -> tuple[str, Manifest] | None:
    """Return path and manifest of the newest checkpoint with a readable manifest; loading checks
    the rest."""
    try:
        paths = checkpoint_folder.list_checkpoints(folder)
        (path, saved), _ = checkpoint_folder.take_first_intact(
            paths, lambda p: (p, read_manifest(p))
        )
    except InputError:
        return None
    return str(path), saved


def _compare_models(
    saved: Manifest, model: nn.Module, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    old = saved.extra.get("model_config")
    here = dump_model_config(model)
    if isinstance(old, dict) and here is not None:
        for key in sorted({*old, *here} - {*_NON_MODEL_KEYS}):
            yield from _compare_values(old.get(key), here.get(key), f"model.config.{key}")
    for key in ("task", "factory", "arguments", "units", "base", "lora"):
        yield from _compare_key(f"model.{key}", before, now)


def _compare_data(before: Mapping[str, Any], now: Mapping[str, Any], job: Job) -> Iterator[str]:
    for key in _OF_DATA:
        if key != "global_batch_size" or job.data.factory or job.data.bucketing:
            yield from _compare_key(key, before, now)


def _compare_key(key: str, before: Any, now: Any) -> Iterator[str]:
    """Yield the differences at or below a dotted key; none if either job lacks the key."""
    for part in key.split("."):
        if not all(isinstance(one, dict) and part in one for one in (before, now)):
            return
        before, now = before[part], now[part]
    yield from _compare_values(before, now, key)


def _compare_values(before: Any, now: Any, key: str) -> Iterator[str]:
    """Yield the differences at or below `key`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            if name not in _READ_KEYS:
                yield from _compare_values(before.get(name), now.get(name), f"{key}.{name}")
    elif before != now:
        yield f"`{key}` was {_shown(before)}, here it is {_shown(now)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _refuse(what: str, why: list[str], where: str, *, code: str) -> NoReturn:
    raise InputError(
        f"the checkpoint is of {what}",
        code=code,
        where=where,
        why="; ".join(why),
        fix="resume with what the job had, or begin anew: without --resume, with another "
        "`output_dir`",
    )
