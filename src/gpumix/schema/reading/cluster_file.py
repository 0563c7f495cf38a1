"""Cluster files: the format in which users write a cluster, in a file or inline in a job.

The long form lists classes and then devices. In the short form each row of a list also defines its
class. `build_cluster` turns either form into a `Cluster` or reports problems; `schema.reading.read`
calls it. `written` converts a `Cluster` back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gpumix.schema.cluster.cluster import (
    CLASS_NAME,
    Accelerator,
    Cluster,
    Device,
    DeviceClass,
    HostName,
    Seen,
)
from gpumix.schema.cluster.network import Network
from gpumix.schema.reading.error_text import Problem, find_nearest, suggest, validate_strictly
from gpumix.schema.reading.yaml_locations import Keys, show_value
from gpumix.schema.units import Bytes, FlopRate, LinkRate, show_bytes, show_flops
from gpumix.schema.value import Value

MOST_DEVICES = 65_536
LEAST_RATE = 1e6  # FLOP/s; a forgotten unit would give a device that never finishes
LEAST_MEMORY = 4096  # bytes

ClassName = Annotated[str, Field(pattern=CLASS_NAME)]
Memory = Annotated[Bytes, Field(gt=0)]


# Keys of a class, and its fields of other names.
_FIELDS = {
    "memory": "memory_bytes",
    "emulate": "emulate_flops_per_s",
    "emulate_link": "emulate_link_bytes_per_s",
    "peak_flops": "peak_flops_per_s",
}


class ClassForm(Value):
    """Definition of a device class without its name. The accelerator defaults to cuda, for an
    emulated class to cpu."""

    memory: Memory = Field(
        description="memory that a plan may use, less a reserve", examples=["24 GiB"]
    )
    emulate: FlopRate | None = Field(
        default=None, description="makes a CPU process an emulated device of this speed"
    )
    emulate_link: LinkRate | None = Field(
        default=None,
        description="rate of an emulated device's link to its host, each way; default: unlimited",
        examples=["2 GB/s"],
    )
    accelerator: Accelerator | None = Field(
        default=None,
        description="`cuda` for GPUs of NVIDIA and AMD, `xpu` for Intel, `hpu` for Gaudi "
        "(planning only); default: `cpu` for an emulated class, else `cuda`",
    )
    product: Seen = Field(
        default="",
        description="the driver's name of the product; checked with `compute_capability`",
    )
    driver: Seen = Field(
        default="", description="driver version; a change causes a new measurement"
    )
    compute_capability: Seen = Field(default="", description="of NVIDIA GPUs, as `8.6`")
    gfx_target: Seen = Field(default="", description="of AMD GPUs, as `gfx942`")
    xe_target: Seen = Field(default="", description="of Intel GPUs, as `bmg`")
    peak_flops: FlopRate | None = Field(
        default=None,
        description="datasheet value at the job's precision, for `strategy: proportional`",
    )

    @model_validator(mode="after")
    def _large_enough(self) -> Self:
        if self.memory < LEAST_MEMORY:
            raise ValueError(
                f"'memory' is {show_bytes(self.memory)}: give its unit, as in '24 GiB'"
            )
        return self

    @model_validator(mode="after")
    def _fast_enough(self) -> Self:
        if self.emulate is not None and self.emulate < LEAST_RATE:
            raise ValueError(
                f"'emulate' is {show_flops(self.emulate)}, {show_flops(LEAST_RATE)} is the least: "
                "give its unit, as in '8 GFLOP/s'"
            )
        return self

    @model_validator(mode="after")
    def _emulated_on_cpu(self) -> Self:
        if self.emulate is not None and self.accelerator not in (None, "cpu"):
            raise ValueError(
                f"'emulate' makes a device of a CPU process, not of a {self.accelerator} device"
            )
        if self.emulate is None and self.emulate_link is not None:
            raise ValueError("'emulate_link' is the link of an emulated device: give 'emulate' too")
        return self

    def named(self, name: str) -> DeviceClass:
        """Return the definition as a `DeviceClass` called `name`."""
        told = {_FIELDS.get(key, key): getattr(self, key) for key in ClassForm.model_fields}
        told["accelerator"] = self.accelerator or ("cuda" if self.emulate is None else "cpu")
        return DeviceClass(name=name, **told)


class DeviceRow(Value):
    """A device, or `count` devices of a class on a host, with consecutive ordinals."""

    device_class: ClassName = Field(alias="class", description="class of the device")
    id: Seen | None = Field(
        default=None,
        min_length=1,
        description="a UUID from `nvidia-smi -L` finds the GPU in any slot; default: class "
        "and number",
    )
    count: int = Field(default=1, ge=1, le=MOST_DEVICES, description="number of such devices")
    host: HostName = Field(default="localhost", description="the host's own `hostname`")
    ordinal: int | None = Field(
        default=None,
        ge=0,
        description="index among the GPUs of its host, the first of `count`; default 0",
    )
    island: Seen = Field(
        default="",
        description="equal for devices of a host with faster links to each other, such as "
        "NVLink pairs",
    )
    rack: Seen = Field(default="", description="equal for hosts with faster links to each other")

    @model_validator(mode="after")
    def _one_device_has_an_id(self) -> Self:
        if self.id is not None and self.count > 1:
            raise ValueError(f"{self.count} devices cannot share the id '{self.id}'")
        return self


class ClusterForm(Value):
    """The long form: classes, devices and network."""

    classes: dict[ClassName, ClassForm] = Field(
        min_length=1, description="[definition of each class](#classesname), by name"
    )
    devices: tuple[DeviceRow, ...] = Field(
        min_length=1, description="[the devices](#devices), one or several a row"
    )
    network: Network | None = Field(
        default=None,
        description="links `between` hosts and `inside` them, of an `island` and of a `rack`, "
        "as `25GbE`, `ib-hdr`, `nvlink3`, `pcie4` or `12 GB/s`; used for links that were "
        "not measured",
    )


class ShortRow(ClassForm, DeviceRow):
    """A row of the short form: devices and their class."""


@dataclass(frozen=True)
class _ParsedCluster:
    """Common result of both forms: classes and rows, each with its keys in the file."""

    classes: tuple[tuple[Keys, DeviceClass], ...]
    rows: tuple[tuple[Keys, DeviceRow], ...]
    network: Network | None = None


def build_cluster(written: object, keys: Keys = ()) -> tuple[Cluster | None, list[Problem]]:
    """Build the cluster `written` at `keys` of a file; return None and the problems on errors."""
    parts, problems = (
        _parse_long_form(written, keys)
        if isinstance(written, dict)
        else _parse_short_form(written, keys)
    )
    if parts is None:
        return None, problems
    problems = [*_class_problems(parts), *_row_problems(parts), *_network_problems(parts, keys)]
    if (total := sum(row.count for _, row in parts.rows)) > MOST_DEVICES:
        what = f"the rows have {total} devices in all, a cluster has {MOST_DEVICES} at most"
        problems.append(Problem(keys, what, "lower 'count'", "too-many-devices"))
    if problems:
        return None, problems
    devices, problems = _build_devices(parts)
    if problems:
        return None, problems
    classes = {c.name: c for _, c in parts.classes}
    cluster = Cluster(classes=tuple(classes.values()), devices=devices, network=parts.network)
    return cluster, []


def format_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster in the long form of a cluster file, without empty values."""
    form: dict[str, Any] = {
        "classes": {one.name: _class_form(one) for one in cluster.classes},
        "devices": [_row_form(one, cluster) for one in cluster.devices],
    }
    if cluster.network is not None:
        form["network"] = cluster.network.model_dump(mode="json")
    return form


def _class_form(one: DeviceClass) -> dict[str, Any]:
    keys = {key: getattr(one, _FIELDS.get(key, key)) for key in ClassForm.model_fields}
    return {key: value for key, value in keys.items() if value not in (None, "")}


def _row_form(device: Device, cluster: Cluster) -> dict[str, Any]:
    gpu = cluster.class_named(device.device_class).is_gpu
    row: dict[str, Any] = {"class": device.device_class, "id": device.id, "host": device.host}
    places = {key: name for key in ("island", "rack") if (name := getattr(device, key))}
    return row | places | ({"ordinal": device.ordinal} if gpu else {})


def _parse_long_form(written: object, keys: Keys) -> tuple[_ParsedCluster | None, list[Problem]]:
    form, problems = validate_strictly(ClusterForm, written, keys)
    if form is None:
        return None, problems
    classes = (((*keys, "classes", n), c.named(n)) for n, c in form.classes.items())
    rows = (((*keys, "devices", i), row) for i, row in enumerate(form.devices))
    return _ParsedCluster(tuple(classes), tuple(rows), form.network), []


def _parse_short_form(written: object, keys: Keys) -> tuple[_ParsedCluster | None, list[Problem]]:
    if not isinstance(written, list) or not written:
        what = f"a cluster must be a mapping or a list of devices, it is {show_value(written)}"
        fix = "write [{class: rtx3090, memory: 24 GiB}]; a job may also say 'auto' or name a file"
        return None, [Problem(keys, what, fix, "cluster-invalid")]
    read = [
        ((*keys, i), *validate_strictly(ShortRow, row, (*keys, i))) for i, row in enumerate(written)
    ]
    problems = [problem for _, _, found in read for problem in found]
    if problems:
        return None, problems
    rows = tuple((at, row) for at, row, _ in read if row is not None)
    return _ParsedCluster(tuple((at, row.named(row.device_class)) for at, row in rows), rows), []


def _class_problems(parts: _ParsedCluster) -> Iterator[Problem]:
    """Yield classes with conflicting definitions, and emulated classes mixed with real ones."""
    first_keys, first = parts.classes[0]
    known: dict[str, tuple[Keys, DeviceClass]] = {}
    for keys, device_class in parts.classes:
        other_keys, other = known.setdefault(device_class.name, (keys, device_class))
        if other != device_class:
            what = f"class '{device_class.name}' is defined twice, and differently"
            fix = "make the rows agree, or give the class another name"
            yield Problem(keys, what, fix, "class-defined-twice", other_keys)
        elif device_class.emulated != first.emulated:
            what = (
                f"class '{device_class.name}' is {_describe_kind(device_class)}, '{first.name}' is"
            )
            what += f" {_describe_kind(first)}; a cluster is all one or all the other"
            fix = "give 'emulate' to every class or to none"
            yield Problem(keys, what, fix, "classes-emulated-and-real", first_keys)


def _describe_kind(device_class: DeviceClass) -> str:
    return "emulated" if device_class.emulated else "real"


def _row_problems(parts: _ParsedCluster) -> Iterator[Problem]:
    """Yield rows of undefined classes, and ordinals without effect."""
    known = {c.name: c for _, c in parts.classes}
    for keys, row in parts.rows:
        device_class = known.get(row.device_class)
        if device_class is None:
            what = f"class '{row.device_class}' is not defined"
            fix = suggest(find_nearest(row.device_class, known), known, "classes")
            yield Problem((*keys, "class"), what, fix, "device-class-unknown")
        elif row.ordinal is not None and not device_class.is_gpu:
            what = f"'ordinal' has no effect: class '{row.device_class}' is not of GPUs"
            yield Problem((*keys, "ordinal"), what, "leave it out", "ordinal-without-effect")


def _network_problems(parts: _ParsedCluster, keys: Keys) -> Iterator[Problem]:
    """Yield network exceptions of undefined classes, and the problems of places."""
    known = {c.name for _, c in parts.classes}
    exceptions = () if parts.network is None else parts.network.exceptions
    for number, exception in enumerate(exceptions):
        for place, name in enumerate(exception.classes):
            if name not in known:
                at = (*keys, "network", "exceptions", number, "classes", place)
                fix = suggest(find_nearest(name, known), sorted(known), "classes")
                what = f"class '{name}' is not defined"
                yield Problem(at, what, fix, "device-class-unknown")
    yield from _place_problems(parts, keys)


def _place_problems(parts: _ParsedCluster, keys: Keys) -> Iterator[Problem]:
    """Yield links of islands or racks without any devices, and hosts in two racks."""
    for what in ("island", "rack"):
        stated = parts.network is not None and getattr(parts.network, what) is not None
        if stated and not any(getattr(row, what) for _, row in parts.rows):
            problem = f"'{what}' has no effect: no device is in one"
            at, fix = (*keys, "network", what), f"give devices their `{what}`"
            yield Problem(at, problem, fix, "place-without-devices")
    racks: dict[str, tuple[str, Keys]] = {}
    for at, row in parts.rows:
        rack, first = racks.setdefault(row.host, (row.rack, at))
        if rack != row.rack:
            problem = f"host '{row.host}' is in rack '{row.rack}' here, and in '{rack}' before"
            fix = "give all devices of a host one rack"
            yield Problem((*at, "rack"), problem, fix, "host-in-two-racks", first)


def _build_devices(parts: _ParsedCluster) -> tuple[tuple[Device, ...], list[Problem]]:
    """Return all devices, and the rows that clash with an earlier row by id or by ordinal on a
    host."""
    gpus = {c.name for _, c in parts.classes if c.is_gpu}
    devices: list[Device] = []
    problems: dict[Keys, Problem] = {}
    ids: dict[str, Keys] = {}
    slots: dict[tuple[str, int], Keys] = {}
    for keys, device in _expand_rows(parts):
        devices.append(device)
        by_id = ids.setdefault(device.id, keys)
        slot = (device.host, device.ordinal)
        by_slot = slots.setdefault(slot, keys) if device.device_class in gpus else keys
        if by_id != keys:
            what, fix = f"device id '{device.id}' is given twice", "give each an id of its own"
            problems.setdefault(keys, Problem(keys, what, fix, "device-named-twice", by_id))
        elif by_slot != keys:
            what = f"two devices are GPU {device.ordinal} of host '{device.host}'"
            fix = "give each its 'ordinal'"
            problems.setdefault(keys, Problem(keys, what, fix, "gpu-used-twice", by_slot))
    return tuple(devices), list(problems.values())


def _expand_rows(parts: _ParsedCluster) -> Iterator[tuple[Keys, Device]]:
    """Yield each device with the keys of its row. Devices without an id are numbered per class."""
    gpus = {c.name for _, c in parts.classes if c.is_gpu}
    numbers: dict[str, int] = {}
    for keys, row in parts.rows:
        for offset in range(row.count):
            name = row.id
            if name is None:
                number = numbers.get(row.device_class, 0)
                numbers[row.device_class] = number + 1
                name = f"{row.device_class}-{number}"
            ordinal = (row.ordinal or 0) + (offset if row.device_class in gpus else 0)
            places = {"host": row.host, "island": row.island, "rack": row.rack}
            yield keys, Device(id=name, device_class=row.device_class, ordinal=ordinal, **places)
