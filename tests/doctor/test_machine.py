"""What is said of a machine, and how the driver and the kernel are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpumix.data.workers.autotune import Limit
from gpumix.doctor.machine import (
    GpuSamples,
    MachineObservations,
    paged_in_bytes,
    remark_on_cores,
    remark_on_machine,
    remark_on_starvation,
    sample_gpus,
    stalled_us,
    watch_machine,
)
from gpumix.hardware.discovery.gpu_health import GpuReading

FULL = (5, 16)


def remarks(
    *looks: GpuReading, most=FULL, stalled=None, rate=0.0, input_share=0.0, retries=0
) -> list[str]:
    gpus = (GpuSamples("GPU 0", most, looks),)
    seen = MachineObservations(gpus, stalled, rate)
    found = remark_on_machine(seen, input_share=input_share, retries=retries)
    return [one.text for one in found]


def look(used=True, reasons=0, link=FULL) -> GpuReading:
    return GpuReading(used, reasons, link)


def test_nothing_is_said_of_a_machine_that_does_what_it_can():
    assert remarks(look(), look(), stalled=0.5, rate=1e8) == []  # nobody waits for that disk


@pytest.mark.parametrize(
    ("bits", "said"),
    [(0x04, "power limit"), (0x20, "too warm"), (0x40, "far too warm"), (0x08, "slows it down")],
)
def test_a_throttled_gpu(bits, said):
    (told,) = remarks(*[look(reasons=bits)] * 3, look())
    assert told.startswith("GPU 0 is throttled in 75%") and said in told


def test_reasons_of_idle_moments_and_clocks_that_somebody_set_do_not_count():
    assert remarks(look(used=False, reasons=0x40), look(), look(reasons=0x01 | 0x02)) == []


def test_rare_moments_do_not_count():
    assert remarks(look(reasons=0x04), *[look()] * 19) == []


def test_a_link_below_its_class():
    (told,) = remarks(look(link=(5, 8)), look(link=(5, 8)))
    assert "generation 5 and 8 lanes, it could have 5 and 16" in told


def test_a_link_that_only_saves_power():
    assert remarks(look(link=(1, 16)), look(link=(5, 16)), look(used=False, link=(1, 1))) == []


def test_a_slow_disk_is_one_that_training_waits_for():
    (told,) = remarks(stalled=0.6, rate=50e6, input_share=0.5)
    assert "60% of the time" in told and "gave 50 MB/s" in told and "takes 100 MB/s" in told
    assert remarks(stalled=0.05, rate=50e6, input_share=0.5) == []
    assert remarks(stalled=None, rate=50e6, input_share=0.5) == []
    assert remarks(stalled=0.6, rate=5e5, input_share=0.5) == []  # somebody else's waits


def test_an_allocator_that_is_short_of_memory():
    (told,) = remarks(retries=3)
    assert "3 times" in told


def test_training_that_still_waits_for_its_data():
    """On the rank that waits longest; what is short is told where it is known."""
    assert list(remark_on_starvation([0.02, 0.01], [Limit.DEVICE, Limit.CORES])) == []
    (short,) = remark_on_starvation([0.1, 0.3], [Limit.DEVICE, Limit.CORES])
    assert short.name == "starved"
    assert short.text.startswith(
        "training still waits for its data in 30% of a step, held back by cores"
    )
    for limit in (Limit.UNKNOWN, Limit.DEVICE):
        (told,) = remark_on_starvation([0.3, 0.1], [limit, Limit.CORES])
        assert "for its data in 30% of a step: make reading" in told.text


def test_too_few_cores():
    (told,) = remark_on_cores(3.9, 1.0, 4.0, input_share=0.3)
    assert told.name == "cores" and "all 4 cores" in told.text
    assert list(remark_on_cores(2.0, 1.0, 4.0, input_share=0.3)) == []  # half of them are free
    assert list(remark_on_cores(3.9, 1.0, 4.0, input_share=0.01)) == []  # nobody waits


def test_how_gpus_are_looked_at():
    """A driver of two GPUs, of which one is idle."""
    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=(97, 0)[gpu]),
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: (4, 1)[gpu],
        nvmlDeviceGetCurrPcieLinkGeneration=lambda gpu: (4, 1)[gpu],
        nvmlDeviceGetCurrPcieLinkWidth=lambda gpu: 16,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda gpu: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda gpu: 16,
    )
    answers = iter([False, False, True])
    busy, idle = sample_gpus(nvml, lambda: next(answers))
    assert busy == GpuSamples("GPU 0", (5, 16), (GpuReading(True, 4, (4, 16)),) * 2)
    assert idle.looks == (GpuReading(False, 1, (1, 16)),) * 2


def test_the_kernels_accounts():
    pressure = "some avg10=0.02 avg60=0.06 avg300=0.11 total=3095585\nfull avg10=0.00 total=18\n"
    assert stalled_us(pressure) == 3095585 and stalled_us("") is None
    assert paged_in_bytes("nr_free 3\npgpgin 2048\npgpgout 7\n") == 2048 * 1024


def test_watching_gives_what_was_seen_afterwards():
    with watch_machine() as told:
        pass
    assert isinstance(told(), MachineObservations)
