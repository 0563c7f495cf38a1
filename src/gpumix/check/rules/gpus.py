"""Checks of GPU health, and of GPU speed within a class and against datasheets. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from gpumix.check.facts.cluster import GpuSpeed, RankFacts, Survey
from gpumix.check.finding import Finding, Severity
from gpumix.hardware.discovery.gpu_health import THROTTLE_REASONS, GpuHealth
from gpumix.hardware.estimates.gpu_catalogue import Card, PcieLink, find_card
from gpumix.schema.errors import InputError
from gpumix.schema.units import format_rate, show_bytes, show_flops

SLOWER = 0.8  # fraction of the class's median speed below which a GPU counts as slow
OF_DATASHEET = 0.6  # part of the datasheet's memory bandwidth reached by copies on any healthy card
USED_BYTES = 2**29  # memory in use on an idle GPU, including a display
POWER = 0.9  # fraction of the default power limit


def check_health(survey: Survey) -> Iterator[Finding]:
    """Check GPUs for memory errors, foreign processes and disabled features."""
    for rank in survey.gpus:
        if rank.health is not None:
            for severity, what, fix in _find_health_problems(rank.health):
                yield _of(rank, severity, f"GPU {rank.health.index}: {what}", fix)
    unloading = (
        r.host for r in survey.gpus if r.health is not None and r.health.persistent is False
    )
    for host in dict.fromkeys(unloading):
        yield Finding(
            severity=Severity.NOTE,
            what="the driver unloads between runs, each start takes seconds longer",
            fix="sudo nvidia-smi -pm 1",
            host=host,
        )


def _find_health_problems(gpu: GpuHealth) -> Iterator[tuple[Severity, str, str]]:
    if gpu.prohibited:
        yield (
            Severity.ERROR,
            "its compute mode lets no process use it",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.remap_failed:
        yield (
            Severity.ERROR,
            "memory has failed, and there is none left to take its place",
            "leave the card out (CUDA_VISIBLE_DEVICES), and have it replaced",
        )
    if gpu.pages_pending:
        yield (
            Severity.WARNING,
            "memory that has failed is taken out of use at the next reset",
            f"sudo nvidia-smi -r -i {gpu.index} while nobody uses it, or restart the host",
        )
    if gpu.uncorrected:
        yield (
            Severity.WARNING,
            f"{gpu.uncorrected} memory errors could not be corrected since the driver started",
            f"nvidia-smi -q -d ECC -i {gpu.index}; restart the host, and replace a card on which "
            "they come again",
        )
    yield from _check_used_memory(gpu)
    if gpu.power_watts is not None and gpu.power_watts[0] < POWER * gpu.power_watts[1]:
        limit, usual = gpu.power_watts
        yield (
            Severity.NOTE,
            f"its power limit is {limit:.0f} W, it came with {usual:.0f} W",
            f"if nobody wants that: sudo nvidia-smi -i {gpu.index} -pl {usual:.0f}",
        )


def _check_used_memory(gpu: GpuHealth) -> Iterator[tuple[Severity, str, str]]:
    """Report memory in use by others; containers hide the processes, but not the memory."""
    if gpu.used_bytes <= USED_BYTES:
        return
    pids = " ".join(str(pid) for pid, _ in gpu.others)
    who = f"process{'es' if len(gpu.others) > 1 else ''} {pids}" if pids else "somebody else"
    yield (
        Severity.WARNING,
        f"{show_bytes(gpu.used_bytes)} of its {show_bytes(gpu.memory_bytes)} are taken by {who}",
        f"kill {pids}" if pids else "nvidia-smi on the host shows who it is",
    )


def describe_health(survey: Survey) -> str:
    asked = [rank for rank in survey.gpus if rank.health is not None]
    return f"{len(asked)} without errors, used by nobody else" if asked else ""


def check_speed(survey: Survey) -> Iterator[Finding]:
    """Compare each GPU's speed with the class median, and check PCIe lanes."""
    for rank in survey.gpus:
        if rank.speed is None:
            continue
        held = [told for bit, told in THROTTLE_REASONS.items() if rank.speed.reasons & bit]
        slow = list(_slower(rank, rank.speed, _like(survey, rank)))
        for name, what, measured in slow:
            because = f"; {', '.join(held)}" if held else ""
            yield _of(
                rank,
                Severity.WARNING,
                f"{_title(rank)}: {name} {what}{because}",
                _suggest_fix(rank, held),
                {name.replace(" ", "_"): measured},
            )
        if not slow and any(rank.speed.reasons & bit for bit in (0x08, 0x40, 0x80)):
            said = f"{_title(rank)} is throttled: {', '.join(held)}"
            yield _of(rank, Severity.WARNING, said, _suggest_fix(rank, held))
        yield from _narrow(rank, rank.speed)


def _like(survey: Survey, rank: RankFacts) -> list[GpuSpeed]:
    """Return the speeds of a rank's class, without the rank."""
    others = (o for o in survey.gpus if o.device_class == rank.device_class and o is not rank)
    return [other.speed for other in others if other.speed is not None]


def _slower(
    rank: RankFacts, own: GpuSpeed, like: list[GpuSpeed]
) -> Iterator[tuple[str, str, float]]:
    """Yield the name, a description and the value of each slow speed."""
    kinds = {
        "compute": ([one.flops_per_s for one in like], own.flops_per_s, show_flops),
        "memory": ([one.memory_bytes_per_s for one in like], own.memory_bytes_per_s, format_rate),
        "host link": (
            [one.host_bytes_per_s for one in like if one.host_bytes_per_s],
            own.host_bytes_per_s,
            format_rate,
        ),
    }
    told = set()
    for name, (others, mine, show) in kinds.items():
        if others and mine is not None and mine < SLOWER * median(others):
            told.add(name)
            usual = median(others)
            yield name, f"{show(mine)}, others of its class {show(usual)}", mine
    card = card_of(rank.product)
    if card is not None and "memory" not in told:
        stated = float(card.memory_bandwidth)
        if own.memory_bytes_per_s < OF_DATASHEET * stated:
            what = (
                f"{format_rate(own.memory_bytes_per_s)}, its datasheet says {format_rate(stated)}"
            )
            yield "memory", what, own.memory_bytes_per_s


def _suggest_fix(rank: RankFacts, held: list[str]) -> str:
    index = 0 if rank.health is None else rank.health.index
    if any("warm" in reason for reason in held):
        return "see to its cooling: fans, dust, room for air"
    if any("brake" in reason for reason in held):
        return "see to its power supply and cables"
    return (
        f"nvidia-smi -q -i {index} -d CLOCK,PERFORMANCE,PCIE; see to cooling, power limit, slot "
        "and whoever else uses it"
    )


def _narrow(rank: RankFacts, own: GpuSpeed) -> Iterator[Finding]:
    """Report missing PCIe lanes, or an older generation than card and slot support."""
    generation, width = own.link
    if not width:
        return
    card = card_of(rank.product)
    slot = card.host_link if card is not None else None
    most = rank.health.most_link if rank.health is not None else None
    lanes = slot.lanes if isinstance(slot, PcieLink) else most[1] if most else 0
    fix = "another slot, or a riser that has them; look at how the BIOS divides lanes"
    if width < lanes:
        severity = Severity.NOTE if 2 * width >= lanes else Severity.WARNING
        what = f"{_title(rank)}: its PCIe link has {width} lanes, the card {lanes}"
        yield _of(rank, severity, what, fix, {"lanes": width})
    elif most is not None and generation < most[0]:
        what = (
            f"{_title(rank)}: its PCIe link runs at generation {generation}, card and slot could "
            f"have {most[0]}"
        )
        fix = "set the slot's generation in the BIOS; a riser may not bear more"
        yield _of(rank, Severity.WARNING, what, fix, {"generation": generation})


def describe_speed(survey: Survey) -> str:
    """Describe each class by its median speed."""
    classes: dict[str, list[GpuSpeed]] = {}
    for rank in survey.gpus:
        if rank.speed is not None:
            classes.setdefault(rank.device_class, []).append(rank.speed)
    return "; ".join(
        f"{name} {show_flops(median(one.flops_per_s for one in found))} in {found[0].dtype}, "
        f"memory {format_rate(median(one.memory_bytes_per_s for one in found))}"
        for name, found in classes.items()
    )


def collect_speeds(survey: Survey) -> dict[str, float]:
    """Return the speeds of each rank."""
    kinds = ("flops_per_s", "memory_bytes_per_s", "host_bytes_per_s")
    known = ((rank.rank, rank.speed) for rank in survey.gpus if rank.speed is not None)
    told = ((f"rank {n} {kind}", getattr(speed, kind)) for n, speed in known for kind in kinds)
    return {name: value for name, value in told if value is not None}


def card_of(product: str) -> Card | None:
    """Return the catalogue's card with exactly this product name."""
    try:
        card = find_card(product) if product else None
    except InputError:
        return None
    return card if card is not None and card.product.lower() == product.lower() else None


def _title(rank: RankFacts) -> str:
    return rank.device_class if rank.health is None else f"GPU {rank.health.index}"


def _of(
    rank: RankFacts,
    severity: Severity,
    what: str,
    fix: str,
    measured: dict[str, float] | None = None,
) -> Finding:
    return Finding(
        severity=severity,
        what=what,
        fix=fix,
        host=rank.host,
        device=rank.device,
        measured=measured or {},
    )
