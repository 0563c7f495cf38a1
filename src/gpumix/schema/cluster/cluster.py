"""Devices available to a job, and their device classes.

A cluster is discovered (`cluster: auto`), or written in a file or inline in the job. Devices are
named by UUID, never by rank number, so that a plan survives a changed device order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gpumix.schema.cluster.network import Network
from gpumix.schema.errors import InputError
from gpumix.schema.units import Bytes, FlopRate, LinkRate, show_flops
from gpumix.schema.untrusted_text import check_displayed_name, check_host_name
from gpumix.schema.value import Value, refuse_duplicates

HostName = Annotated[str, AfterValidator(check_host_name)]
Seen = Annotated[str, AfterValidator(check_displayed_name)]
Accelerator = Literal["cuda", "xpu", "hpu", "cpu"]
CLASS_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class DeviceClass(Value):
    """A class of interchangeable devices: same model, memory and host link.

    `emulate_flops_per_s` makes a CPU process an emulated device: its compute takes FLOPs / rate,
    and with `emulate_link_bytes_per_s` its copies from and to the host take bytes / rate.
    `accelerator` is the torch device type: "cuda" for NVIDIA and AMD GPUs, "xpu" for Intel GPUs,
    "hpu" for Gaudi, which is planned for and not trained on.
    `driver` and `compute_capability` are empty for CPUs, `gfx_target` for all but AMD GPUs,
    `xe_target` for all but Intel GPUs.
    `peak_flops_per_s` is the datasheet value for the compute dtype; only policies based on peaks
    need it.
    """

    name: str = Field(pattern=CLASS_NAME)
    accelerator: Accelerator
    memory_bytes: Bytes = Field(gt=0)
    emulate_flops_per_s: FlopRate | None = None
    emulate_link_bytes_per_s: LinkRate | None = None
    product: Seen = ""
    driver: Seen = ""
    compute_capability: Seen = ""
    gfx_target: Seen = ""
    xe_target: Seen = ""
    peak_flops_per_s: FlopRate | None = None

    @property
    def emulated(self) -> bool:
        return self.emulate_flops_per_s is not None

    @property
    def is_gpu(self) -> bool:
        return self.accelerator != "cpu"

    @property
    def maker(self) -> str:
        """Manufacturer of a GPU; only GPUs of one manufacturer can form a process group."""
        makers = {"cuda": "NVIDIA", "xpu": "Intel", "hpu": "Habana"}
        return "AMD" if self.gfx_target else makers[self.accelerator]

    def describe(self) -> str:
        """Return a short description for tables: the product, or the rate of an emulated device."""
        if self.emulate_flops_per_s is not None:
            return f"emulated, {show_flops(self.emulate_flops_per_s)}"
        return self.product or self.accelerator


class Device(Value):
    """A GPU, or a CPU process acting as a device."""

    id: Seen = Field(min_length=1)
    device_class: str
    host: HostName = "localhost"
    ordinal: int = Field(default=0, ge=0, description="index among the CUDA devices of its host")
    island: Seen = Field(
        default="", description="devices of its host with faster links to each other have one name"
    )
    rack: Seen = Field(
        default="", description="so do hosts with faster links to each other; of all its devices"
    )


def sort_in_rank_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices sorted by host, ordinal and id."""
    return tuple(sorted(devices, key=lambda d: (d.host, d.ordinal, d.id)))


class Cluster(Value):
    """All devices available to a job. Order carries no meaning."""

    classes: tuple[DeviceClass, ...] = Field(min_length=1)
    devices: tuple[Device, ...] = Field(min_length=1)
    network: Network | None = Field(default=None, description="links as stated, not measured")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_duplicates("device class", (c.name for c in self.classes))
        refuse_duplicates("device", (d.id for d in self.devices))
        known = {c.name for c in self.classes}
        for device in self.devices:
            if device.device_class not in known:
                raise ValueError(
                    f"device '{device.id}' is of class '{device.device_class}', which is not "
                    f"defined (classes: {', '.join(sorted(known))})"
                )
        for name in () if self.network is None else self.network.classes:
            if name not in known:
                raise ValueError(f"the network names class '{name}', which is not defined")
        used = {d.device_class for d in self.devices}
        makers = {
            (f"GPUs of {c.maker}" if c.is_gpu else "CPUs"): c.name
            for c in self.classes
            if c.name in used
        }
        if len(makers) > 1:
            (kind, name), (other_kind, other) = sorted(makers.items(), reverse=True)[:2]
            raise ValueError(
                f"class '{name}' is of {kind} and class '{other}' of {other_kind}, which do not "
                "train together"
            )
        return self

    def class_named(self, name: str) -> DeviceClass:
        """Return the class called `name`; raise a KeyError if there is none."""
        return self._class_by_name[name]

    @cached_property
    def _class_by_name(self) -> dict[str, DeviceClass]:
        return {device_class.name: device_class for device_class in self.classes}

    def refuse_unknown(self, key: str, names: Iterable[str]) -> None:
        """Raise an InputError if `names`, given in a job's `key`, contains an unknown class."""
        known = {c.name for c in self.classes}
        for name in names:
            if name not in known:
                raise InputError(
                    f"'{key}' names the device class '{name}', which is not there",
                    code="device-class-unknown",
                    why=f"the classes are {', '.join(sorted(known))}",
                    fix="gpumix devices shows what they are called",
                )

    def device(self, device_id: str) -> Device:
        """Return the device with the given id; raise a KeyError if there is none."""
        return {d.id: d for d in self.devices}[device_id]

    def in_rank_order(self) -> tuple[Device, ...]:
        """Return the devices by host, ordinal and id. Rank r started by gpumix gets device r."""
        return sort_in_rank_order(self.devices)

    def only(self, devices: Iterable[str]) -> Cluster:
        """Return the cluster reduced to the given device ids and the classes of these devices."""
        wanted = set(devices)
        left = tuple(device for device in self.devices if device.id in wanted)
        names = {device.device_class for device in left}
        return self.model_copy(
            update={
                "devices": left,
                "classes": tuple(one for one in self.classes if one.name in names),
                "network": self.network and self.network.among(names),
            }
        )

    def members(self, class_name: str) -> tuple[Device, ...]:
        """Return the devices of a class sorted by id, regardless of the order in the file."""
        chosen = (d for d in self.devices if d.device_class == class_name)
        return tuple(sorted(chosen, key=lambda d: d.id))

    @property
    def emulated(self) -> bool:
        return any(c.emulated for c in self.classes)
