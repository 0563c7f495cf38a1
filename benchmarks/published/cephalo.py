"""Cephalo's measured layers as gpumix profiles: one kind of unit, on any of its GPUs.

What becomes of each thing that their files and their model hold:

* **Times** are measured points of one layer, forward f and backward g; where a list is empty there
  is only their fit, a straight line. Backward here is f + g, for it recomputes.
* **State** is 16 bytes a parameter, and three quarters of a device's memory may be used. All
  parameters lie in the layers: theirs are divided like them, and the root costs nothing.
* **Peak memory** was profiled on whole engines: it holds gathered parameters and gradients, which
  gpumix counts itself. What gpumix counts is taken off the peak, so nothing counts twice; 2 GiB for
  communication, which they set aside, are added. It goes on after the last point by its largest
  step, for some curves bend upwards.
* **Inputs of layers** lie in host memory at no cost in time: they are counted as nothing.
* **Collectives** take no time, unless links are stated; nor do messages between stages. A layer
  takes what the one before it returns: one vector of the model's width for each token.

Their memory was profiled at 512 tokens. For longer samples a point at b is read at
b x 512 / tokens, for activations grow with tokens at least. Of some models only fp32 was profiled:
for fp16 that is an upper bound, and some of the fp16 entries are nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from gpumix.cost.peak_memory import CUDA_RESERVE
from gpumix.hardware.estimates import gpu_catalogue
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.network import Network
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, StageInput
from gpumix.schema.profile.profile import (
    ROOT,
    CallInputs,
    ClassProfile,
    ModelProfile,
    Profile,
    RootUnit,
    UnitKind,
    UnitTimes,
)
from published import GIB, SAMPLES, Work, read

FILE = "cephalo/layer_profiles.json"
THEIR_DTYPE: dict[ComputeDtype, str] = {"fp32": "float32", "fp16": "float16"}
TOKENS_OF_MEMORY = 512
COMMUNICATION = 2 * GIB
PART_OF_MEMORY = 0.75
ADAM = 8  # bytes beside parameter and gradient: 16 in all
SAVED_WIDTHS = 29  # of each token and layer, in widths: products' inputs, norms and activations
IN_FLIGHT = 2  # units whose parameters, and whose gradients, gpumix holds at once in the backward
EXTRA_S = 0.010  # what their model adds for each micro-batch after the first
CARDS = {
    "a6000": "rtxa6000", "l4": "l4", "p40": "p40", "a10g": "a10g", "t4": "t4",
    "p100": "p100-12gb-pcie", "v100x16": "v100-16gb-sxm",
}  # fmt: skip
"""Their devices of which layers were measured, as the catalogue calls them."""

FREE = Curve(sizes=(1.0, SAMPLES), values=(0.0, 0.0))


@dataclass(frozen=True)
class Setting:
    """What was measured: a model in a precision at a sequence length."""

    model: str
    dtype: ComputeDtype
    tokens: int = 512

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.tokens}"


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer on one GPU by samples; `largest` is None where they are fits."""

    forward: Curve
    backward: Curve
    largest: int | None


def timed_layers() -> list[tuple[Setting, str]]:
    """All settings and GPUs in which a layer was timed."""
    ours = {theirs: dtype for dtype, theirs in THEIR_DTYPE.items()}
    return [
        (Setting(entry["model"], ours[entry["dtype"]], entry["seq_len"]), entry["device"])
        for entry in read(FILE)["layers"]
    ]


def settings() -> dict[Setting, tuple[str, ...]]:
    """All settings with memory of the model and at least two GPUs, and these GPUs."""
    found: dict[Setting, list[str]] = {}
    for setting, gpu in timed_layers():
        if _memory(setting) and setting.model in read(FILE)["models"]:
            found.setdefault(setting, []).append(gpu)
    return {s: tuple(sorted(gpus)) for s, gpus in found.items() if len(gpus) > 1}


def block_work(setting: Setting) -> Work | None:
    """Products with weights and of attention; None where the file lacks a model's sizes, and of
    images, whose tokens it does not say."""
    sizes = read(FILE)["models"].get(setting.model)
    if sizes is None or setting.model.startswith("vit"):
        return None
    tokens, elements = setting.tokens, sizes["parameters_per_layer"]
    width = sizes["hidden_size"]
    flops = 2.0 * tokens * elements + 4.0 * tokens**2 * width
    return Work(flops, elements, SAVED_WIDTHS * tokens * width)


def profile(
    setting: Setting,
    counts: Mapping[str, int],
    *,
    network: Network | None = None,
    host_devices: int = 8,
) -> Profile:
    """A profile of so many GPUs of each type, `host_devices` of one type a host.

    Raises:
        ValueError: there is no memory of the model, or no times of a GPU.
    """
    return Profile(
        sequence_length=setting.tokens,
        optimizer_bytes_per_element=ADAM,
        torch_version="published",
        cluster=_cluster(setting, counts, network, host_devices),
        model=_model(setting),
        classes=tuple(_class(name, layer(setting, name), setting.dtype) for name in counts),
        collectives=Collectives(gather="list", reduce="list"),
    )


def summed(of: Profile) -> Profile:
    """The same by their cost model: of each device forward and backward are summed before the
    slowest device is looked for, and each micro-batch takes 10 ms more, of which one is none.

    That is ours with all of it in the backward curve. 10 ms a layer are to be taken off the step.
    """
    classes = []
    for device in of.classes:
        unit = device.units["block"]
        sizes = tuple(sorted({*unit.forward.sizes, *unit.backward.sizes}))
        both = tuple(_at(unit.forward, size) + _at(unit.backward, size) + EXTRA_S for size in sizes)
        times = UnitTimes(forward=FREE, backward=Curve(sizes=sizes, values=both))
        classes.append(device.model_copy(update={"units": device.units | {"block": times}}))
    return of.model_copy(update={"classes": tuple(classes)})


def layer(setting: Setting, gpu: str) -> Layer:
    """What was measured of a layer.

    Raises:
        ValueError: nothing was.
    """
    wanted = (setting.model, gpu, THEIR_DTYPE[setting.dtype], setting.tokens)
    for entry in read(FILE)["layers"]:
        if (entry["model"], entry["device"], entry["dtype"], entry["seq_len"]) != wanted:
            continue
        if not entry["forward_ms"]:
            return Layer(_fit(entry["forward_fit_ms"]), _fit(entry["backward_fit_ms"]), None)
        points = len(entry["forward_ms"])
        return Layer(_points(entry["forward_ms"]), _points(entry["backward_ms"]), points)
    raise ValueError(f"no times of {setting.name} on {gpu}")


def peak_bytes(setting: Setting) -> Curve:
    """Their peak above the state, by samples, without what they set aside for communication."""
    peaks = [gib * GIB for gib in _memory_of(setting)[1]]
    step = max((b - a for a, b in pairwise(peaks)), default=peaks[0])
    sizes = [b * TOKENS_OF_MEMORY / setting.tokens for b in range(1, len(peaks) + 1)]
    beyond = peaks[-1] + (SAMPLES - sizes[-1]) * step * setting.tokens / TOKENS_OF_MEMORY
    return Curve(sizes=(*sizes, SAMPLES), values=(*peaks, beyond))


def _memory(setting: Setting) -> tuple[int, list[float]] | None:
    """Parameters, and their peaks in GiB at 1, 2, 3, ... samples: of several clusters' entries the
    longest, of these the largest; of fp32 where there are none of the setting's precision."""
    entries = [entry for entry in read(FILE)["memory"] if entry["model"] == setting.model]
    for dtype in (THEIR_DTYPE[setting.dtype], THEIR_DTYPE["fp32"]):
        found = [
            (entry["parameters"], entry["peak_gib_above_state"][dtype])
            for entry in entries
            if dtype in entry["peak_gib_above_state"]
        ]
        if found:
            return max(found, key=lambda pair: (len(pair[1]), pair[1]))
    return None


def _memory_of(setting: Setting) -> tuple[int, list[float]]:
    found = _memory(setting)
    if found is None:
        raise ValueError(f"no memory of {setting.name}")
    return found


def _model(setting: Setting) -> ModelProfile:
    sizes = read(FILE)["models"][setting.model]
    layers, width = sizes["num_layers"], sizes["hidden_size"]
    numel = _memory_of(setting)[0] // layers
    counted = IN_FLIGHT * numel * (DTYPE_BYTES[setting.dtype] + 4)  # gradients are fp32
    peak = peak_bytes(setting)
    working = tuple(max(0.0, value + COMMUNICATION - counted) for value in peak.values)
    block = UnitKind(
        name="block",
        trainable=numel,
        kept=FREE,
        gradient=FREE,
        forward=FREE,
        backward=Curve(sizes=peak.sizes, values=working),
        outputs={0: _line(setting.tokens * width * DTYPE_BYTES[setting.dtype])},
    )
    return ModelProfile(
        fingerprint=setting.name,
        compute_dtype=setting.dtype,
        calls=tuple(f"layers.{i}" for i in range(layers)),
        kind_of_call=("block",) * layers,
        needs=(
            CallInputs(),
            *(CallInputs(outputs=(StageInput(call=n, output=0),)) for n in range(layers)),
        ),
        kinds=(block,),
        root=RootUnit(trainable=0, kept=FREE, head=FREE),
    )


def _class(name: str, measured: Layer, dtype: ComputeDtype) -> ClassProfile:
    f, g = measured.forward, measured.backward
    again = Curve(sizes=f.sizes, values=tuple(a + b for a, b in zip(f.values, g.values)))
    return ClassProfile(
        device_class=name,
        units={
            "block": UnitTimes(forward=f, backward=again, gradient=g),
            ROOT: UnitTimes(forward=FREE, backward=FREE),
        },
        optimizer_s_per_element=0.0,
        framework_bytes=0,
        largest_micro_batch=measured.largest,
        compute_dtype=dtype,
    )


def _cluster(
    setting: Setting, counts: Mapping[str, int], network: Network | None, host_devices: int
) -> Cluster:
    gib = read(FILE)["device_memory_gib"]
    classes = []
    for name in counts:
        rates = gpu_catalogue.find_card(CARDS[name]).flops
        # Without fast fp16 its products run as fp32 does: so it was measured on the P40.
        peak = rates.fp32 if setting.dtype == "fp32" else rates.fp16 or rates.fp32
        usable = PART_OF_MEMORY * gib[name] * GIB  # for ours, which keeps a reserve of its own
        memory = int(usable / (1 - CUDA_RESERVE))
        classes.append(
            DeviceClass(name=name, accelerator="cuda", memory_bytes=memory, peak_flops_per_s=peak)
        )
    devices = tuple(
        Device(
            id=f"{name}-{i:03d}",
            device_class=name,
            host=f"{name}-{i // host_devices}",
            ordinal=i % host_devices,
        )
        for name, count in counts.items()
        for i in range(count)
    )
    return Cluster(classes=tuple(classes), devices=devices, network=network)


def _points(milliseconds: list[float]) -> Curve:
    sizes = tuple(float(b) for b in range(1, len(milliseconds) + 1))
    return Curve(sizes=sizes, values=tuple(ms / 1e3 for ms in milliseconds))


def _fit(line: list[float]) -> Curve:
    """A straight line: two points say it all."""
    slope, start = line
    ends = (1.0, SAMPLES)
    return Curve(sizes=ends, values=tuple((slope * size + start) / 1e3 for size in ends))


def _line(slope: float) -> Curve:
    return Curve(sizes=(1.0, SAMPLES), values=(slope, SAMPLES * slope))


def _at(curve: Curve, size: float) -> float:
    """A value at one of the points."""
    return dict(zip(curve.sizes, curve.values))[size]
