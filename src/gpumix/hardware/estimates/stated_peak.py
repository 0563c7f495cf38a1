"""Peak rates of device classes, if stated anywhere; never another card's figure.

Pure, on top of the catalogue. `profiler.compute.peak_flops` measures peaks that are not stated.
"""

from __future__ import annotations

from gpumix.hardware.estimates.gpu_catalogue import find_product
from gpumix.hardware.estimates.roofline import get_peak_flops_per_s
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.stage import ComputeDtype


def find_stated_peak(
    device_class: DeviceClass, dtype: ComputeDtype, *, tf32: bool = False
) -> Peak | None:
    """Return the peak in a dtype, or in TF32 for fp32: the rate of an emulated device, the cluster
    file's rate, or the datasheet of exactly this product; None without any of them."""
    if device_class.emulate_flops_per_s is not None:
        return Peak(flops_per_s=device_class.emulate_flops_per_s, source="emulated")
    if device_class.peak_flops_per_s is not None:
        return Peak(flops_per_s=device_class.peak_flops_per_s, source="stated")
    if not device_class.is_gpu or not device_class.product:
        return None
    card = find_product(device_class.product, device_class.memory_bytes)
    if card is None:  # measured instead
        return None
    rate = get_peak_flops_per_s(card, dtype)
    if tf32 and dtype == "fp32" and card.flops.tf32 is not None:
        rate = card.flops.tf32
    return Peak(flops_per_s=rate, source="stated")
