"""Links of a cluster as stated by the owner, for planning before measurements exist.

A link is a curve: seconds of a message in one direction, by bytes. A name such as "25GbE" or
"nvlink3" means the standard's rate, minus the protocol overhead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpumix.schema.curve import Curve
from gpumix.schema.units import parse_rate
from gpumix.schema.value import Value

LARGEST_MESSAGE = float(2**34)  # end of the straight line; time beyond grows in proportion

# Part of the stated line rate reaching a collective, after packet and protocol overhead. Round
# figures below the results of NCCL's own tests on healthy links; measured links do not use these.
ETHERNET, INFINIBAND, PCIE, NVLINK = 0.85, 0.9, 0.75, 0.8
ETHERNET_LATENCY_S, LINK_LATENCY_S = 30e-6, 8e-6

# Bytes/s of one direction: InfiniBand 4x (IBTA), PCIe x16 (PCI-SIG), all NVLinks of a GPU (NVIDIA).
_NAMED: dict[str, tuple[float, float]] = {
    "ib-fdr": (56e9 / 8, INFINIBAND),
    "ib-edr": (100e9 / 8, INFINIBAND),
    "ib-hdr": (200e9 / 8, INFINIBAND),
    "ib-ndr": (400e9 / 8, INFINIBAND),
    "ib-xdr": (800e9 / 8, INFINIBAND),
    "pcie3": (15.75e9, PCIE),
    "pcie4": (31.5e9, PCIE),
    "pcie5": (63e9, PCIE),
    "nvlink1": (80e9, NVLINK),
    "nvlink2": (150e9, NVLINK),
    "nvlink3": (300e9, NVLINK),
    "nvlink4": (450e9, NVLINK),
    "nvlink5": (900e9, NVLINK),
}
_ETHERNET = re.compile(
    r"^([0-9]+(?:\.[0-9]+)?)\s*(?:GbE|gbe|GBE|Gb/s|Gbps|Gbit/s)$"
)  # b is bits, B bytes


class Link(Value):
    """A link: seconds of a message in one direction, by message bytes."""

    times: Curve
    name: str = ""

    @classmethod
    def stated(cls, bytes_per_s: float, latency_s: float, name: str = "") -> Self:
        """Build a link with a fixed latency and rate: time = `latency_s` + bytes / `bytes_per_s`.

        Raises:
            ValueError: the rate is not positive and finite.
        """
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"a link must move more than 0 bytes a second, not {bytes_per_s:g}")
        ends = (1.0, LARGEST_MESSAGE)
        times = tuple(latency_s + size / bytes_per_s for size in ends)
        return cls(times=Curve(sizes=ends, values=times), name=name)

    @property
    def largest_bytes_per_s(self) -> float:
        """Rate of the largest known message."""
        seconds = self.times.values[-1]
        return self.times.sizes[-1] / seconds if seconds > 0 else float("inf")


def parse_link(text: str) -> Link:
    """Return the link named by `text`: "25GbE", "ib-hdr", "nvlink3", "pcie4", or a rate "12 GB/s".

    Raises:
        ValueError: the name is unknown, or the bandwidth is zero.
    """
    word = text.strip()
    if found := _ETHERNET.match(word):
        return Link.stated(float(found[1]) * 1e9 / 8 * ETHERNET, ETHERNET_LATENCY_S, word)
    if known := _NAMED.get(word.lower()):
        rate, part = known
        return Link.stated(rate * part, LINK_LATENCY_S, word)
    try:
        rate = parse_rate(word)
    except ValueError:
        raise ValueError(
            f"'{text}' is not a link such as '25GbE', '12 GB/s' or one of {', '.join(_NAMED)}"
        ) from None
    return Link.stated(rate, LINK_LATENCY_S, word)


def _convert_lists_to_tuples(value: object) -> object:
    """Turn lists from a file into tuples, which strict validation requires after a custom
    validator."""
    if isinstance(value, dict):
        return {key: _convert_lists_to_tuples(item) for key, item in value.items()}
    return tuple(map(_convert_lists_to_tuples, value)) if isinstance(value, list) else value


AnyLink = Annotated[
    Link,
    BeforeValidator(lambda v: parse_link(v) if isinstance(v, str) else _convert_lists_to_tuples(v)),
]
"""Field type of a link, or text accepted by `link`."""


Where = Literal["island", "inside", "rack", "between"]


class ClassPairLink(Value):
    """Exceptional link between devices, or hosts, of two classes."""

    where: Literal["inside", "between"]
    classes: tuple[str, str]
    link: AnyLink


class Network(Value):
    """Links of a cluster: inside every host, between any two hosts, and exceptions."""

    inside: AnyLink | None = Field(default=None, description="between devices of one host")
    between: AnyLink | None = Field(default=None, description="between hosts, of all its devices")
    island: AnyLink | None = Field(
        default=None, description="between devices of one `island`; default: as `inside`"
    )
    rack: AnyLink | None = Field(
        default=None, description="between hosts of one `rack`; default: as `between`"
    )
    exceptions: tuple[ClassPairLink, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not any((self.inside, self.between, self.island, self.rack, self.exceptions)):
            raise ValueError("a network names at least one link")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes with exceptional links."""
        return tuple(sorted({name for e in self.exceptions for name in e.classes}))

    def among(self, classes: Collection[str]) -> Self:
        """Return the network with only the exceptions between the given classes."""
        kept = tuple(e for e in self.exceptions if set(e.classes) <= set(classes))
        return self.model_copy(update={"exceptions": kept})

    def as_of(self, twins: Mapping[str, str]) -> Self:
        """Return the network extended to new classes, each linked like an existing class."""
        of = {name: [name] for name in self.classes}
        for twin, name in twins.items():
            of.setdefault(name, [name]).append(twin)
        more = tuple(
            e.model_copy(update={"classes": (one, other)})
            for e in self.exceptions
            for one in of[e.classes[0]]
            for other in of[e.classes[1]]
        )
        return self.model_copy(update={"exceptions": more})

    def between_slower(self, times: int) -> Self:
        """Return the network with `times` concurrent messages sharing each link between hosts."""

        def shared(link: Link) -> Link:
            return link.model_copy(update={"times": link.times.shared_by(times)})

        exceptions = tuple(
            e.model_copy(update={"link": shared(e.link)}) if e.where == "between" else e
            for e in self.exceptions
        )
        update: dict[str, object] = {"exceptions": exceptions}
        for where in ("between", "rack"):
            link = getattr(self, where)
            update[where] = None if link is None else shared(link)
        return self.model_copy(update=update)

    def of(self, where: Where, one: str, other: str) -> Link | None:
        """Return the link between devices of two classes inside a host, between hosts of two
        classes, or of an island or a rack."""
        if where == "island":
            return self.island or self.of("inside", one, other)
        if where == "rack":
            return self.rack or self.of("between", one, other)
        for exception in self.exceptions:
            if exception.where == where and sorted(exception.classes) == sorted((one, other)):
                return exception.link
        return self.inside if where == "inside" else self.between
