"""Synthetic profiles: cards of stated speed and memory, and a model of a few kinds of unit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpumix.cost.loading_memory import compute_loading_bytes
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, StageInput
from gpumix.schema.profile.profile import (
    ROOT,
    CallInputs,
    ClassProfile,
    CollectiveTimes,
    EndParameters,
    ModelProfile,
    Profile,
    RootParameter,
    RootUnit,
    TensorParallelCollective,
    TensorParallelProfile,
    TensorParallelTraffic,
    UnitKind,
    UnitTimes,
)

T = TypeVar("T")

MIB = 1024**2
GIB = 1024**3


def curve(*values: float, sizes: Sequence[float] = ()) -> Curve:
    """Values at 1, 2, 3, ... or at the given sizes."""
    return Curve(sizes=tuple(sizes) or tuple(range(1, len(values) + 1)), values=values)


def line(slope: float, start: float = 0.0) -> Curve:
    """Up to more samples than any test has."""
    return curve(start + slope, start + 2**20 * slope, sizes=(1, 2**20))


FREE = line(0.0)


@dataclass(frozen=True)
class Card:
    """A device class: seconds by micro-batch for each kind of unit and the root."""

    name: str
    count: int
    memory: int
    times: dict[str, UnitTimes]
    optimizer_s_per_element: float = 0.0
    framework: int = 0
    largest: int | None = None
    accelerator: str = "cpu"
    host_copy: Curve | None = None
    host_bytes: int | None = None  # beyond what reading weights takes
    host_optimizer_s_per_element: float | None = None
    chunked_cross_entropy: Curve | None = None
    per_host: int = 0  # 0: all on one host, with all other cards


def steady(forward: float, start: float = 0.0, root: float = 0.0) -> dict[str, UnitTimes]:
    """A card that needs `forward` seconds a sample and call, three times that for backward."""
    unit = UnitTimes(forward=line(forward, start), backward=line(3 * forward, start))
    return {"block": unit, ROOT: UnitTimes(forward=line(root), backward=line(2 * root))}


def block(
    name: str = "block",
    *,
    trainable: int = 1000,
    kept: Curve = FREE,
    gradient: Curve = FREE,
    forward: Curve = FREE,
    backward: Curve = FREE,
    frozen: int = 0,
    saved: Curve | None = None,
    saved_forward: Curve = FREE,
    saved_backward: Curve = FREE,
    flops: float = 0.0,
) -> UnitKind:
    return UnitKind(
        name=name,
        trainable=trainable,
        frozen_bytes=frozen,
        kept=kept,
        saved=saved,
        saved_forward=None if saved is None else saved_forward,
        saved_backward=None if saved is None else saved_backward,
        gradient=gradient,
        forward=forward,
        backward=backward,
        flops=flops,
    )


def root(
    trainable: int = 0,
    buffers: int = 0,
    kept: Curve = FREE,
    head: Curve = FREE,
    before: int = 0,
    after: int = 0,
    chunked_cross_entropy: Curve | None = None,
) -> RootUnit:
    """Of all its trainable elements, some are used at its ends only."""
    return RootUnit(
        trainable=trainable,
        buffer_bytes=buffers,
        kept=kept,
        head=head,
        chunked_cross_entropy=chunked_cross_entropy,
        before=EndParameters(names=("tokens.weight",) if before else (), trainable=before),
        after=EndParameters(names=("head.weight",) if after else (), trainable=after),
    )


@dataclass(frozen=True)
class Network:
    """Curves by form; the collectives that the profile found to be the fastest."""

    gather: dict[str, Curve] = field(default_factory=dict)
    reduce: dict[str, Curve] = field(default_factory=dict)
    chosen: Collectives = field(default_factory=Collectives)
    inside: Curve | None = None  # of native collectives in each host
    across: Curve | None = None  # of all-reduces between hosts
    contention: float = 0.0

    @property
    def times(self) -> tuple[CollectiveTimes, ...]:
        gathers = [
            CollectiveTimes(operation="gather", form=f, times=c) for f, c in self.gather.items()
        ]
        reduces = [
            CollectiveTimes(operation="reduce", form=f, times=c) for f, c in self.reduce.items()
        ]
        return (*gathers, *reduces, *self._of_hosts())

    def _of_hosts(self) -> Iterator[CollectiveTimes]:
        for operation in ("gather", "reduce") if self.inside else ():
            for form in dict.fromkeys(("native", self.chosen.gather, self.chosen.reduce)):
                yield CollectiveTimes(
                    operation=operation, form=form, group="inside", times=self.inside
                )
        if self.across:
            yield CollectiveTimes(
                operation="reduce", form="native", group="across", times=self.across
            )


def profile(
    cards: Sequence[Card],
    *,
    calls: Sequence[str] = ("block",) * 4,
    kinds: Sequence[UnitKind] = (),
    root_unit: RootUnit | None = None,
    network: Network | None = None,
    dtype: ComputeDtype | Sequence[ComputeDtype] = "fp32",
    overhead: float = 0.0,
    links: StatedNetwork | None = None,
) -> Profile:
    """A profile of `calls` (kinds of unit in order) on `cards`, AdamW, 128 tokens a sample.

    Args:
        dtype: of all cards, or of each; the first one's is what `kinds` and `root_unit` are of. In
            another, what is held is half or twice as much.
    """
    network = network or Network()
    dtypes = [dtype] * len(cards) if isinstance(dtype, str) else list(dtype)
    first = ModelProfile(
        fingerprint="synthetic",
        compute_dtype=dtypes[0],
        calls=tuple(f"layers.{i}" for i in range(len(calls))),
        kind_of_call=tuple(calls),
        kinds=tuple(kinds) or (block(),),
        root=root_unit or root(),
    )
    loading = compute_loading_bytes(first)
    return Profile(
        sequence_length=128,
        optimizer_bytes_per_element=8,
        torch_version="2.13.0",
        cluster=Cluster(
            classes=tuple(
                DeviceClass(name=c.name, accelerator=c.accelerator, memory_bytes=c.memory)
                for c in cards
            ),
            devices=tuple(
                Device(id=f"{c.name}-{i}", device_class=c.name, host=_host(c, i), ordinal=i)
                for c in cards
                for i in range(c.count)
            ),
            network=links,
        ),
        model=first,
        other_models=tuple(
            in_dtype(first, other) for other in dict.fromkeys(dtypes) if other != dtypes[0]
        ),
        classes=tuple(
            ClassProfile(
                device_class=c.name,
                units=c.times,
                optimizer_s_per_element=c.optimizer_s_per_element,
                framework_bytes=c.framework,
                largest_micro_batch=c.largest,
                host_copy=c.host_copy,
                host_bytes=None if c.host_bytes is None else c.host_bytes + loading,
                host_optimizer_s_per_element=c.host_optimizer_s_per_element,
                chunked_cross_entropy=c.chunked_cross_entropy,
                compute_dtype=of_card,
            )
            for c, of_card in zip(cards, dtypes)
        ),
        collectives=network.chosen,
        network=network.times,
        step_overhead_s=overhead,
        contention=network.contention,
    )


def in_dtype(model: ModelProfile, dtype: ComputeDtype) -> ModelProfile:
    """The model in another dtype."""
    times = DTYPE_BYTES[dtype] / DTYPE_BYTES[model.compute_dtype]

    def held(unit: UnitKind | RootUnit) -> UnitKind | RootUnit:
        curves = {
            name: value.model_copy(update={"values": tuple(times * v for v in value.values)})
            for name, value in unit
            if isinstance(value, Curve)
        }
        return unit.model_copy(update=curves)

    kinds = tuple(held(kind) for kind in model.kinds)
    update = {"compute_dtype": dtype, "kinds": kinds, "root": held(model.root)}
    return model.model_copy(update=update)


def _host(card: Card, number: int) -> str:
    return f"{card.name}-{number // card.per_host}" if card.per_host else "localhost"


def fleet(devices: int = 64, *, memory_factor: float = 1.0, layers: int = 32) -> Profile:
    """Like a cluster of four kinds of GPU that trains a transformer of 2.7 G parameters, bf16."""
    table = [("a100", 40, 0.0012), ("a6000", 48, 0.0027), ("l4", 24, 0.0074), ("t4", 15, 0.0086)]
    cards = [
        Card(
            name,
            devices // 4,
            int(gib * GIB * memory_factor),
            steady(seconds, start=0.3 * seconds, root=seconds / 2),
            optimizer_s_per_element=seconds * 1e-8,
            framework=GIB,
            accelerator="cuda",
        )
        for name, gib, seconds in table
    ]
    bus = curve(1e-3, 2e-3, 30e-3, sizes=(1e6, 1e7, 2e8))
    return profile(
        cards,
        calls=("block",) * layers,
        kinds=[
            block(
                trainable=78_676_480,
                kept=line(2.6e6),
                gradient=line(2.6e6),
                forward=line(60e6),
                backward=line(300e6),
            )
        ],
        root_unit=root(130_000_000, kept=line(2.6e6), head=line(200e6)),
        network=Network(gather={"broadcast": bus}, reduce={"all_to_all": bus}),
        dtype="bf16",
    )


def shuffled(profile: Profile, dice: random.Random) -> Profile:
    """The same with devices and classes in another order."""

    def in_any_order(values: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(dice.sample(values, len(values)))

    classes, devices = profile.cluster.classes, profile.cluster.devices
    cluster = profile.cluster.model_copy(
        update={"classes": in_any_order(classes), "devices": in_any_order(devices)}
    )
    update = {"cluster": cluster, "classes": in_any_order(profile.classes)}
    return profile.model_copy(update=update)


def in_a_row(found: Profile, *, message: Curve = FREE, tied: int = 0) -> Profile:
    """The same, where each call takes what the one before it returns, of the bytes of `message`.

    Args:
        tied: elements of the root that the first call and the loss have together.
    """
    names = ("tied.weight",) if tied else ()
    calls = len(found.model.calls)
    takes = [CallInputs(outputs=(StageInput(call=n, output=0),)) for n in range(calls)]
    needs = [CallInputs(root=names), *takes[:-1], takes[-1].model_copy(update={"root": names})]
    model = found.model
    rest = model.root.trainable - tied
    root_unit = model.root.model_copy(
        update={"parameters": tuple(RootParameter(name=n, trainable=tied) for n in names)}
    )
    assert rest == 0, "the root has parameters without a name"
    kinds = tuple(kind.model_copy(update={"outputs": {0: message}}) for kind in model.kinds)
    update = {"needs": tuple(needs), "kinds": kinds, "root": root_unit}
    return found.model_copy(update={"model": model.model_copy(update=update)})


def with_tp_groups(
    found: Profile, degree: int, *, faster: float, waits: float = 0.0, divided: float | None = None
) -> Profile:
    """Where so many devices compute a unit together, `faster` than one alone, and with so many
    seconds for each of the four times that they tell each other something of a call. Where they
    divide the sequence too, they are `divided` as fast, and keep their part; None: they do not."""
    ways = {False: faster} if divided is None else {False: faster, True: divided}
    tp_profiles = tuple(
        _make_tp_profile(found, degree, speed, sequence=way) for way, speed in ways.items()
    )
    sums = CollectiveTimes(
        operation="sum",
        form=str(degree),
        group="inside",
        times=Curve(sizes=(1.0, 1e9), values=(waits, waits)),
    )
    network = (*found.network, sums)
    return found.model_copy(update={"tp_profiles": tp_profiles, "network": network})


def _make_tp_profile(
    found: Profile, degree: int, faster: float, *, sequence: bool
) -> TensorParallelProfile:
    model, part = found.model, 1 / degree if sequence else 1.0

    def smaller(kind: UnitKind) -> UnitKind:
        outputs = {place: curve.scaled(part) for place, curve in kind.outputs.items()}
        update = {"kept": kind.kept.scaled(part), "outputs": outputs}
        return kind.model_copy(update={"trainable": kind.trainable // degree, **update})

    def times(of_kind: UnitTimes) -> UnitTimes:
        forward, backward = (c.scaled(1 / faster) for c in (of_kind.forward, of_kind.backward))
        return UnitTimes(forward=forward, backward=backward)

    told = TensorParallelCollective(operation="all_reduce", times=2, bytes=line(1.0))
    of_kinds = {
        kind.name: TensorParallelTraffic(
            forward=(told,),
            backward=(told,),
            part=smaller(kind).outputs.get(0) if sequence else None,
        )
        for kind in model.kinds
    }
    return TensorParallelProfile(
        degree=degree,
        sequence=sequence,
        enters=(0,) if sequence else (),
        model=model.model_copy(update={"kinds": tuple(map(smaller, model.kinds))}),
        classes=tuple(
            c.model_copy(update={"units": {name: times(t) for name, t in c.units.items()}})
            for c in found.classes
        ),
        told={c.device_class: of_kinds for c in found.classes},
    )
