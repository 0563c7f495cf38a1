"""Tables of all keys of a job and of a cluster file, from the pydantic models that read them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gpumix.schema.cluster.cluster import CLASS_NAME, Cluster
from gpumix.schema.job.job import FACTORY, Job, ParameterGroup
from gpumix.schema.job.trackers import Trackers
from gpumix.schema.reading import cluster_file
from gpumix.schema.units import Bytes, FlopRate, Seconds

UNITS = {
    Bytes: "memory, as `24 GiB`",
    FlopRate: "speed, as `8 GFLOP/s`",
    Seconds: "time, as `90 s`",
}
PLAIN = {str: "text", bool: "`true` or `false`", Any: "any", Path: "path"}
PATTERNS = {FACTORY: "`module:function`", CLASS_NAME: "name"}
LONG = "A mapping: first the classes by name, then the devices. For product, driver and the like."
SHORT = "A list: each row is a device, or several, and says what their class is."
HEAD = "| key | takes | default | meaning |\n|---|---|---|---|"


def tables() -> str:
    """All sections of the page."""
    sections = [_section("The job", Job)]
    sections += [_section(f"`{name}`", model, above=f"{name}.") for name, model in _nested(Job)]
    sections += [_section("`optimizer.groups[]`", ParameterGroup)]
    sections += [_section(f"`report_to.{name}`", model) for name, model in _trackers()]
    sections += [
        _section("A cluster: the long form", cluster_file.ClusterForm, LONG),
        _section("`classes.NAME`", cluster_file.ClassForm),
        _section("`devices[]`", cluster_file.DeviceRow),
        _section("A cluster: the short form", cluster_file.ShortRow, SHORT),
    ]
    return "\n\n".join(sections)


def _nested(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The models below a model, by dotted key."""
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            yield f"{above}{name}", field.annotation
            yield from _nested(field.annotation, f"{above}{name}.")


def _trackers() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Trackers.model_fields.items():
        yield name, next(part for part in get_args(field.annotation) if _is_model(part))


def _section(title: str, model: type[BaseModel], about: str = "", *, above: str = "") -> str:
    rows = "\n".join(_row(model, name, field, above) for name, field in model.model_fields.items())
    return f"## {title}\n\n{about or inspect.getdoc(model)}\n\n{HEAD}\n{rows}"


def _row(model: type[BaseModel], name: str, field: FieldInfo, above: str) -> str:
    key = field.alias or name
    if _is_model(field.annotation):
        anchor = f"{above}{key}".replace(".", "")
        takes, default = f"[keys below](#{anchor})", "" if field.is_required() else "its defaults"
    else:
        takes = _takes(field.annotation, field.metadata)
        default = _default(field, unit=" s" if takes == UNITS[Seconds] else "")
    if field.is_required():
        default = "**required**"
    assert field.description, f"{model.__name__}.{name} needs a description"
    return f"| `{key}` | {takes} | {default} | {field.description} |"


def _default(field: FieldInfo, *, unit: str) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if value in (None, (), {}, ""):
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}{unit}`" if isinstance(value, float) else f"`{value}`"


def _takes(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value may be, in words."""
    metadata = list(metadata)
    for unit, words in UNITS.items():
        if get_args(unit)[1] in metadata:
            return words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _takes(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin in (Union, UnionType):
        parts = (_takes(part, metadata) for part in arguments if part is not NoneType)
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list: {_takes(arguments[0])}"
        return f"list of {len(arguments)}: {_takes(arguments[0])}"
    if origin is dict:
        return "mapping"
    if annotation is Cluster:
        return "path of a cluster file, or [a cluster](#a-cluster-the-long-form)"
    if _is_model(annotation):
        return "mapping"
    return _bounded(annotation, metadata)


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _bounded(annotation: Any, metadata: list[Any]) -> str:
    patterns = [getattr(item, "pattern", None) for item in metadata]
    for pattern, words in PATTERNS.items():
        if pattern in patterns:
            return words
    word = {int: "whole number", float: "number"}.get(annotation)
    if word is None:
        return PLAIN[annotation]
    low = [f"above {_whole(m.gt)}" for m in metadata if isinstance(m, Gt)]
    low += [f"{_whole(m.ge)} or more" for m in metadata if isinstance(m, Ge)]
    high = [f"below {_whole(m.lt)}" for m in metadata if isinstance(m, Lt)]
    high += [f"at most {_whole(m.le)}" for m in metadata if isinstance(m, Le)]
    return ", ".join([word, *low, *high])


def _whole(value: float) -> str:
    """Return a number, of a whole one all digits."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _is_model(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and annotation is not Cluster
    )
