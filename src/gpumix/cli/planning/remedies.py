"""Ways to make a model fit that does not, each computed; and the page that says so.

The page has those that fit first. Of these a way that needs nothing new comes first: another
optimizer, adapters, a smaller batch, shorter samples. Then one more card, and last the largest
model of this shape that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpumix.schema.errors import GpumixError, NoFeasiblePlanError
from gpumix.schema.units import hide_exact_bytes, show_bytes

if TYPE_CHECKING:
    from rich.text import Text

    from gpumix.cli.planning.estimate_source import Estimate
    from gpumix.schema.job.search_space import Space
    from gpumix.schema.profile.profile import Profile

LORA_RANK = 16
RAM = "--ram "
SMALLEST_STEP = 0.05  # the largest model that fits is found within this fraction
SMALLEST_MODEL = 5e6  # parameters
GROWTH = 1.2  # of sizes that are tried with several stages
FEWER_TRIES = 4  # of memory of hosts, with several stages
SHORTEST = 128  # tokens of a sample
GIB = 2**30


@dataclass(frozen=True)
class Remedy:
    """A change of a model that does not fit, and its effect.

    Attributes:
        change: options to add to the command, or words.
        state_bytes: bytes of weights, gradients and optimizer state over all GPUs.
        fits: whether a plan exists then.
    """

    change: str
    state_bytes: int
    fits: bool


@dataclass(frozen=True)
class Shortfall:
    """A model that does not fit: bytes that its state takes, and that GPUs have.

    Attributes:
        usable_bytes: memory that a plan may fill, by GPU type, of one GPU.
        counts: GPUs of each type.
        short: what devices or hosts are short of, in words.
        remedies: changes that were tried, fitting or not.
    """

    model: str
    state_bytes: int
    usable_bytes: dict[str, int]
    counts: dict[str, int]
    short: str
    remedies: tuple[Remedy, ...]

    def as_dict(self) -> dict[str, object]:
        return {
            "state_bytes": self.state_bytes,
            "usable_bytes": self.usable_bytes,
            "remedies": [vars(way) for way in self.remedies],
        }


def shortfall_page(found: Shortfall, assumed: str) -> Text:
    """Return the page of a model that does not fit, in 80 columns."""
    from rich.text import Text

    from gpumix.hardware.estimates.gpu_catalogue import shorten_product
    from gpumix.train.console.text_page import wrap_line

    total = sum(found.usable_bytes[name] * count for name, count in found.counts.items())
    cards = " and ".join(
        f"{count}x {shorten_product(name)} ({show_bytes(found.usable_bytes[name])} usable)"
        for name, count in found.counts.items()
    )
    what = (
        f"Does not fit: {found.model} needs {show_bytes(found.state_bytes)} for weights, gradients "
        f"and optimizer state; {cards} {'has' if sum(found.counts.values()) == 1 else 'have'} "
        f"{show_bytes(total)} in all."
    )
    if found.state_bytes < total:
        what += f" What is short is room for activations: {found.short}."
    elif ram := next((w.change for w in found.remedies if w.fits and w.change.startswith(RAM)), ""):
        what += (
            " What is short is free system RAM: offloading the rest takes "
            f"{ram.removeprefix(RAM).replace('GiB', ' GiB')} in a host."
        )
    lines = [Text(line, style="bold red") for line in wrap_line(what)]
    title = "What would make it fit"
    width = max([len(title) - 2, *(len(way.change) for way in found.remedies)])
    lines += [Text(), Text(f"{title.ljust(width + 2)}  {'state':>9}", style="bold")]
    for way in sorted(found.remedies, key=lambda way: not way.fits):
        fits = "fits" if way.fits else "does not fit"
        text = f"  {way.change.ljust(width)}  {show_bytes(way.state_bytes):>9}  {fits}"
        lines.append(Text(text, style="green" if way.fits else "dim"))
    lines += [Text(), *(Text(t, style="dim") for t in wrap_line(f"Assumed    {assumed}", 11))]
    return Text("\n").join(lines)


def find_remedies(
    estimate: Estimate, profile: Profile, space: Space, error: NoFeasiblePlanError
) -> Shortfall:
    """Return what is short for an estimate, of this profile, without a plan; and remedies."""
    from gpumix.cost.peak_memory import compute_usable_bytes

    usable = {c.name: compute_usable_bytes(c) for c in profile.cluster.classes}
    return Shortfall(
        model=f"{estimate.model.name}, {estimate.tuning.describe()}",
        state_bytes=count_state_bytes(profile),
        usable_bytes=usable,
        short=hide_exact_bytes(error.what.rpartition(": ")[2]),
        counts={name: len(profile.cluster.members(name)) for name in usable},
        remedies=tuple(_try_all(estimate, list(usable), space)),
    )


def count_state_bytes(profile: Profile) -> int:
    """Return the bytes of weights, gradients and optimizer state of a model, once."""
    from gpumix.cost.peak_memory import MASTER_BYTES, SHARD_GRADIENT_BYTES

    model = profile.model
    per_element = MASTER_BYTES + SHARD_GRADIENT_BYTES + profile.optimizer_bytes_per_element
    units = dict(zip(model.calls, model.kind_of_call))
    frozen = sum(model.kind(kind).frozen_bytes for kind in units.values())
    return round(model.parameters * per_element) + frozen + model.root.frozen_bytes


def _try_all(estimate: Estimate, classes: Sequence[str], space: Space) -> Iterator[Remedy]:
    from gpumix.hardware.estimates.adapters import FineTuning
    from gpumix.schema.job.job import OptimizerSpec

    def tried(change: str, other: Estimate) -> Remedy | None:
        return _try(change, other, space)

    changes: list[tuple[str, Estimate]] = []
    if estimate.tuning.trains_all:
        if estimate.optimizer.name == "adamw":
            narrow = OptimizerSpec(name="adamw_8bit")
            changes.append(("--optimizer adamw_8bit", replace(estimate, optimizer=narrow)))
        if estimate.optimizer.name != "adafactor":
            adafactor = OptimizerSpec(name="adafactor")
            changes.append(("--optimizer adafactor", replace(estimate, optimizer=adafactor)))
        lora = FineTuning(LORA_RANK)
        changes.append((f"--lora {LORA_RANK}", replace(estimate, tuning=lora)))
    if not estimate.tuning.base.startswith("nf4"):
        rank = estimate.tuning.lora_rank or LORA_RANK
        nf4 = replace(estimate, tuning=FineTuning(rank, "nf4"))
        changes.append((f"--lora {rank} --base nf4", nf4))
    found = [way for change, other in changes if (way := tried(change, other)) is not None]
    yield from found
    yield from filter(None, [_smaller_batch(estimate, space), _shorten(estimate, space)])
    yield from filter(None, [_offload(estimate, space)])
    if estimate.cluster.text and not estimate.cluster.is_file:
        for name in classes:
            if (way := tried(f"one more {name}", estimate.with_more(name))) is not None:
                yield way
    if (largest := _largest_model(estimate, space)) is not None:
        yield largest


def _try(change: str, other: Estimate, space: Space, *, thorough: bool = True) -> Remedy | None:
    """Return the way out; None if the estimate does not know it.

    Args:
        thorough: whether plans of several stages and tensor-parallel groups are searched, where no
            plan of one stage fits.
    """
    from gpumix.planner.data_parallel.no_fit_error import can_fit_devices

    try:
        profile = other.profile()
    except GpumixError:
        return None
    devices = profile.cluster.in_rank_order()
    fits = can_fit_devices(profile, devices, space, other.global_batch)
    if not fits and thorough:
        fits = _has_plan(profile, other.global_batch, space)
    return Remedy(change, count_state_bytes(profile), fits)


def _has_plan(profile: Profile, batch: int, space: Space) -> bool:
    from gpumix.planner.common.strategy import PlanRequest
    from gpumix.planner.optimal import plan_fastest

    try:
        plan_fastest(profile, PlanRequest(global_batch=batch, space=space))
    except NoFeasiblePlanError:
        return False
    return True


def _smaller_batch(estimate: Estimate, space: Space) -> Remedy | None:
    """Return the largest global batch that fits in one stage; None if none does."""

    def of_batch(batch: int) -> Remedy | None:
        smaller = replace(estimate, global_batch=batch)
        return _try(f"--global-batch-size {batch}", smaller, space, thorough=False)

    best, low, high = None, 0, estimate.global_batch
    while high - low > 1:
        middle = (low + high) // 2
        way = of_batch(middle)
        if way is not None and way.fits:
            best, low = way, middle
        else:
            high = middle
    return best


def _shorten(estimate: Estimate, space: Space) -> Remedy | None:
    """Return the longest of halved sequence lengths that fits; None if none does."""
    length = estimate.sequence_length // 2
    while length >= SHORTEST:
        shorter = replace(estimate, sequence_length=length)
        way = _try(f"--sequence-length {length}", shorter, space, thorough=False)
        if way is not None and way.fits:
            return way
        length //= 2
    return None


def _offload(estimate: Estimate, space: Space) -> Remedy | None:
    """Return whether more memory of hosts would do, and how much; None if it would not."""
    from gpumix.schema.units import LARGEST

    if not _fits_with_ram(estimate, space, LARGEST // 2):
        return None
    low, high = GIB, GIB
    while not _fits_with_ram(estimate, space, high):
        low, high = high, 2 * high
    while high - low > GIB:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_with_ram(estimate, space, middle) else (middle, high)
    low = GIB
    for _ in range(FEWER_TRIES):  # several stages may need less
        middle = (low + high) // 2
        way = _try("", replace(estimate, ram_bytes=middle), space)
        low, high = (low, middle) if way is not None and way.fits else (middle, high)
    return _try(f"{RAM}{-(-high // GIB)}GiB", replace(estimate, ram_bytes=high), space)


def _fits_with_ram(estimate: Estimate, space: Space, ram_bytes: int) -> bool:
    way = _try("", replace(estimate, ram_bytes=ram_bytes), space, thorough=False)
    return way is not None and way.fits


def _largest_model(estimate: Estimate, space: Space) -> Remedy | None:
    """Return the largest Llama-shaped model that fits, in place of the one that does not."""
    from gpumix.hardware.estimates.decoder_shapes import make_llama_like
    from gpumix.hardware.estimates.known_models import NamedDecoder

    def of_size(parameters: float, thorough: bool = False) -> Remedy | None:
        try:
            shape = make_llama_like(parameters)
        except GpumixError:
            return None
        model = NamedDecoder("", shape)
        name = f"--model {shape.parameters / 1e9:.2g}B"
        return _try(name, replace(estimate, model=model), space, thorough=thorough)

    most = float(estimate.model.shape.parameters)
    largest, size = _bisect(of_size, SMALLEST_MODEL, most)
    while (size := size * GROWTH) < most:  # with several stages there may be room for more
        way = of_size(size, thorough=True)
        if way is None or not way.fits:
            break
        largest = way
    return None if largest is None else replace(largest, change=f"{largest.change}, the largest")


def _bisect(
    of_size: Callable[[float], Remedy | None], low: float, high: float
) -> tuple[Remedy | None, float]:
    """Return the largest size that fits, with its way out; None if none does."""
    best: Remedy | None = None
    while high / low > 1 + SMALLEST_STEP:
        middle = (low * high) ** 0.5
        way = of_size(middle)
        if way is not None and way.fits:
            best, low = way, middle
        else:
            high = middle
    return best, low
