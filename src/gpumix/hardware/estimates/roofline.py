"""Roofline estimates of a card's times from vendor data; never measurements.

A product runs at a part of the card's peak, or at the memory's speed of delivering weights,
whichever is slower; operations that are no products (norms, activations, additions) take the time
in which memory moves their tensors. The architecture's kernels limit the part reached, and so does
power on small boards: FLOPs per watt are similar for all cards of an architecture. The constants
are round figures, set by hand near the layer timings published by Cephalo (arXiv 2411.01075, twelve
cards from Pascal to Hopper; `benchmarks/planner_estimate.py` reports their error for seven of the
cards, and for cards, models and runs not used to set them), those of A100s, H100s and Gaudi 2 near
published training runs. Constants of all other architectures are assumptions, and marked. Where it
is published how fast torch multiplies large matrices on one, the assumption is seven tenths of
that; A100 and H100 train at nine tenths, by kernels that were tuned for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumix.hardware.estimates.gpu_catalogue import Card, CoherentLink
from gpumix.schema.curve import Curve
from gpumix.schema.plan.optimizer_state import OptimizerState
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.schema.profile.profile import RootUnit, UnitKind

LAUNCH_S = 2e-4  # of a unit's kernels, however small
BANDWIDTH_SHARE = 0.8  # of the stated bandwidth
BACKWARD_FLOPS = 2.0  # relative to the forward: gradients of inputs and of weights
SAVED_MOVES = 2.0  # of each saved byte in a forward: written and read
BACKWARD_MOVES = 2.0  # relative to the forward: with each tensor its gradient moves
# Each micro-batch's backward writes a weight gradient, and adds it to the fp32 gradient.
GRADIENT_BYTES = 16
HOST_LINK_PART = 0.75
HOST_MEMORY_BANDWIDTH = 4e10  # bytes/s, assumed: half of two channels of DDR5-5600
MOST_SAMPLES = 4096
# Per element of AdamW in 8 bits, by separate operations on temporaries in fp32.
QUANTISED_PASSES_BYTES = 260


@dataclass(frozen=True)
class PeakFraction:
    """Part of the peak reached by an architecture: at most `part`, and at most `per_watt` TFLOP/s
    per watt (None: power is no limit). `assumed`: no published times stand behind it."""

    part: float
    per_watt: float | None = None
    assumed: bool = False


def _assume(part: float, per_watt: float | None = None) -> PeakFraction:
    return PeakFraction(part, per_watt, assumed=True)


# By target. 16-bit products on matrix units.
MATRIX_FRACTIONS = {
    "7.0": PeakFraction(0.63),
    "7.5": PeakFraction(0.6, 0.35),
    # 8.0 and 9.0 by published training runs on SXM boards; those on PCIe are assumed to do more per
    # watt.
    "8.0": PeakFraction(0.8, 0.88),
    "8.6": PeakFraction(0.84, 0.36),
    "8.9": PeakFraction(0.8, 0.72),
    "9.0": PeakFraction(0.68, 1.0),
    "10.0": _assume(0.68, 1.1),
    "10.3": _assume(0.68, 1.1),
    "12.0": _assume(0.8, 0.72),  # like 8.9
    "12.1": _assume(0.52),  # matrices: 92 of 125 TFLOP/s
    "gfx908": _assume(0.52),
    "gfx90a": _assume(0.52),
    "gfx942": _assume(0.52),
    "gfx950": _assume(0.52),
    "gfx1030": _assume(0.53),  # matrices: 16 of 21 TFLOP/s on the RX 6600 XT
    "gfx1100": _assume(0.53),  # matrices: 88 to 99 of 123 TFLOP/s
    "gfx1201": _assume(0.44),  # matrices: 113 to 133 of 195 TFLOP/s
    "dg2": _assume(0.44),  # matrices: 75 to 92 of 131 TFLOP/s
    "bmg": _assume(0.44),  # like dg2
    "pvc": _assume(0.44),  # matrices: 263 to 273 of 419 TFLOP/s
    "gaudi2": PeakFraction(0.7),  # 260 TFLOP/s with MPT-7B, by Databricks
    "gaudi3": _assume(0.47),  # matrices: 1244 of 1835 TFLOP/s
}
# fp32 on general units. From 8.6 on half of the units also serve integers, and are rarely full.
GENERAL_FRACTIONS = {
    "5.2": _assume(0.6),  # like 6.1
    "6.0": PeakFraction(0.75),
    "6.1": PeakFraction(0.6),
    "7.0": PeakFraction(0.88),
    "7.5": PeakFraction(0.54),
    "8.0": PeakFraction(0.88),
    "8.6": PeakFraction(0.58, 0.066),
    "8.9": PeakFraction(0.5, 0.135),
    "9.0": PeakFraction(0.68),
    "10.0": _assume(0.6),
    "10.3": _assume(0.6),
    "12.0": _assume(0.5, 0.135),  # like 8.9
    "12.1": _assume(0.45),
    "gfx906": _assume(0.45),
    "gfx908": _assume(0.45),
    "gfx90a": _assume(0.45),
    "gfx942": _assume(0.45),
    "gfx950": _assume(0.45),
    "gfx1030": _assume(0.48),  # matrices: 8.5 of 10.6 TFLOP/s on the RX 6600 XT
    "gfx1100": _assume(0.24),  # matrices: 23 to 27 of 61 TFLOP/s, which count dual issue
    "gfx1201": _assume(0.2),  # matrices: 15 to 17 of 49 TFLOP/s, likewise
    "dg2": _assume(0.5),  # matrices: 15 of 17 TFLOP/s
    "bmg": _assume(0.5),  # like dg2
    "pvc": _assume(0.5),  # matrices: 23 of 26 TFLOP/s
    "gaudi2": _assume(0.4),
    "gaudi3": _assume(0.4),
}


def get_peak_flops_per_s(card: Card, dtype: ComputeDtype) -> float:
    """Return the datasheet rate of products in a dtype with fp32 accumulation.

    Cards without matrix units gain nothing from fp16, and cards without bf16 compute it in fp32.
    """
    rate = {"fp32": card.flops.fp32, "bf16": card.flops.bf16, "fp16": card.flops.fp16}[dtype]
    return rate if rate is not None and card.matrix_units else card.flops.fp32


def get_peak_fraction(card: Card, dtype: ComputeDtype) -> PeakFraction:
    """Return the part of the peak in a dtype that a card's architecture reaches."""
    on_matrix_units = get_peak_flops_per_s(card, dtype) != card.flops.fp32
    return (MATRIX_FRACTIONS if on_matrix_units else GENERAL_FRACTIONS)[card.target]


def get_reached_flops_per_s(card: Card, dtype: ComputeDtype) -> float:
    """Return the FLOP/s likely to be reached."""
    peak, reach = get_peak_flops_per_s(card, dtype), get_peak_fraction(card, dtype)
    part = reach.part
    if reach.per_watt is not None and card.tdp_watts is not None:
        part = min(part, reach.per_watt * card.tdp_watts / (peak / 1e12))
    return part * peak


def make_forward_curve(
    card: Card, dtype: ComputeDtype, flops: float, weight_bytes: float, moved_bytes: float = 0.0
) -> Curve:
    """Return the seconds of a unit's forward by samples.

    Args:
        flops, moved_bytes: of a sample: its products, and the tensors that all else moves.
    """
    read_s = weight_bytes / _reached_bandwidth(card)
    per_sample = flops / get_reached_flops_per_s(card, dtype) + moved_bytes / _reached_bandwidth(
        card
    )
    return _curve(lambda n: LAUNCH_S + max(n * per_sample, read_s))


def make_gradient_curve(
    card: Card, dtype: ComputeDtype, flops: float, elements: float, moved_bytes: float = 0.0
) -> Curve:
    """Return the seconds of a unit's backward with a saved graph.

    Args:
        flops, moved_bytes: of a sample's forward.
        elements: parameters that get a gradient.
    """
    added_s = elements * GRADIENT_BYTES / _reached_bandwidth(card)
    products_s = BACKWARD_FLOPS * flops / get_reached_flops_per_s(card, dtype)
    per_sample = products_s + BACKWARD_MOVES * moved_bytes / _reached_bandwidth(card)
    return _curve(lambda n: 2 * LAUNCH_S + n * per_sample + added_s)


def make_half_gradient_curve(
    card: Card, dtype: ComputeDtype, flops: float, moved_bytes: float = 0.0
) -> Curve:
    """Return the seconds of a backward's input gradients: half of its products, and all else."""
    products_s = BACKWARD_FLOPS / 2 * flops / get_reached_flops_per_s(card, dtype)
    per_sample = products_s + BACKWARD_MOVES * moved_bytes / _reached_bandwidth(card)
    return _curve(lambda n: LAUNCH_S + n * per_sample)


def compute_moved_bytes(unit: UnitKind | RootUnit) -> float:
    """Return the bytes of memory that a forward moves for a sample outside of its products.

    A tensor that is saved is written once and read once, in a backward with its gradient. Of head
    and loss, whose `head` holds all tensors between logits and their gradient, forward and backward
    together move one and a half times as much.
    """
    if isinstance(unit, RootUnit):
        return _per_sample(unit.head) / 2
    return SAVED_MOVES * _per_sample(unit.saved or unit.forward)


def _per_sample(curve: Curve) -> float:
    return curve.values[-1] / curve.sizes[-1]


def _reached_bandwidth(card: Card) -> float:
    return card.memory_bandwidth * BANDWIDTH_SHARE


def add_curves(one: Curve, other: Curve) -> Curve:
    """Add the curves of recompute and backward, which run in sequence."""
    values = tuple(a + b for a, b in zip(one.values, other.values, strict=True))
    return Curve(sizes=one.sizes, values=values)


def compute_optimizer_s_per_element(
    card: Card, state_bytes: float, state: OptimizerState = "fp32"
) -> float:
    """Return the seconds to update an element, limited by memory; `state_bytes` are those of the
    element's state."""
    return _count_moved_bytes(state_bytes, state) / _reached_bandwidth(card)


def compute_host_optimizer_s_per_element(
    state_bytes: float, state: OptimizerState = "fp32"
) -> float:
    """Return the seconds in which a host's cores update an element of its only device, limited by
    memory, in fp32 as on the device."""
    return _count_moved_bytes(state_bytes, state) / HOST_MEMORY_BANDWIDTH


def _count_moved_bytes(state_bytes: float, state: OptimizerState) -> float:
    """Count the bytes that an update of an element moves: parameter and state are read and written,
    the gradient is read, in fp32. State in 8 bits takes many passes over temporaries too."""
    return 2 * (4 + state_bytes) + 4 + (QUANTISED_PASSES_BYTES if state == "8bit" else 0)


def make_memory_curve(card: Card, moved_bytes: float) -> Curve:
    """Return the seconds to move bytes to or from the card's memory, whatever the samples."""
    return _curve(lambda _: moved_bytes / _reached_bandwidth(card))


def make_host_copy_curve(card: Card) -> Curve:
    """Return the seconds to copy bytes to the host."""
    part = 1.0 if isinstance(card.host_link, CoherentLink) else HOST_LINK_PART
    rate = card.host_link.bandwidth * part
    sizes = (1.0, 2.0**34)
    return Curve(sizes=sizes, values=tuple(1e-5 + size / rate for size in sizes))


def _curve(seconds: Callable[[int], float]) -> Curve:
    sizes = [2**i for i in range(MOST_SAMPLES.bit_length())]
    return Curve(sizes=tuple(map(float, sizes)), values=tuple(seconds(n) for n in sizes))
