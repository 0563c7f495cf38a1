"""The most that a device class computes, as far as somebody says: never another card's figure.

Pure, on top of the catalogue. What nobody states, `profiler.peak` measures.
"""

from __future__ import annotations

from gpumix.hardware.catalogue import find
from gpumix.hardware.roofline import flops_per_s
from gpumix.spec.cluster import DeviceClass
from gpumix.spec.errors import InputError
from gpumix.spec.peak import Peak
from gpumix.spec.stage import ComputeDtype


def stated_peak(
    device_class: DeviceClass, dtype: ComputeDtype, *, tf32: bool = False
) -> Peak | None:
    """In a dtype, or in TF32 where that is fp32: the rate of an emulated device, what the cluster
    file says, or the datasheet of just this product; None where none of them says anything."""
    if device_class.emulate_flops_per_s is not None:
        return Peak(flops_per_s=device_class.emulate_flops_per_s, source="emulated")
    if device_class.peak_flops_per_s is not None:
        return Peak(flops_per_s=device_class.peak_flops_per_s, source="stated")
    if not device_class.is_gpu or not device_class.product:
        return None
    try:
        card = find(device_class.product)
    except InputError:  # unknown, or several that differ in memory: it is measured
        return None
    if card.product.lower() != device_class.product.lower():  # a name that is merely like it
        return None
    rate = flops_per_s(card, dtype)
    if tf32 and dtype == "fp32" and card.flops.tf32 is not None:
        rate = card.flops.tf32
    return Peak(flops_per_s=rate, source="stated")
