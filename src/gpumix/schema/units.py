"""Units of measure: bytes and seconds internally, GiB and ms in output.

`Bytes`, `FlopRate` and `Seconds` are field types: a job or cluster file may say "24 GiB",
"8 GFLOP/s" or "90 s"; the value is a plain number of bytes, FLOP/s or seconds.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Annotated

from pydantic import BeforeValidator, Field

_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*$")
_BINARY = {"": 1, "B": 1} | {p + "iB": 1024**i for i, p in enumerate("KMGT", start=1)}
_DECIMAL = {p + "B": 1000**i for i, p in enumerate("KMGT", start=1)}
_BYTES = _BINARY | _DECIMAL | {"kB": 1000}
_FLOPS = {"": 1.0} | {f"{p}FLOP/s": 10.0 ** (3 * i) for i, p in enumerate(["", *"KMGTP"])}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}


def _parse_amount(value: object, table: dict[str, float] | dict[str, int], example: str) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("-"):
        raise ValueError(f"'{value}' is less than nothing: give an amount such as '{example}'")
    match = _NUMBER.match(value)
    if match is None or match.group(2) not in table:
        units = ", ".join(sorted((u for u in table if u), key=lambda u: table[u]))
        raise ValueError(f"'{value}' is not an amount such as '{example}' (units: {units})")
    return float(match.group(1)) * table[match.group(2)]


def _parse_bytes(value: object) -> object:
    parsed = _parse_amount(value, _BYTES, "24 GiB")
    if isinstance(parsed, float) and not isfinite(parsed):
        raise ValueError(f"'{value}' is not a finite number of bytes")
    return round(parsed) if isinstance(parsed, float) else parsed


# No value exceeds this limit; floats represent all integers up to it exactly.
LARGEST = 2**53
LARGEST_BATCH = 2**20  # samples of a step
LARGEST_LENGTH = 2**30  # tokens of a sample
LARGEST_RANK = 4096  # of LoRA; more than any width
LARGEST_FLOPS = 5e23  # of a sample, so that times of thousands of samples stay finite on any GPU
MOST_STEPS = 2**40  # samples stay countable in 64 bits
LONGEST_S = 1e9  # thirty years; longer waits overflow

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Flops = Annotated[float, Field(ge=0, le=LARGEST_FLOPS)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(ge=0, le=LARGEST)]
FlopRate = Annotated[
    float,
    BeforeValidator(lambda v: _parse_amount(v, _FLOPS, "8 GFLOP/s")),
    Field(gt=0, allow_inf_nan=False),
]
LinkRate = Annotated[
    float,
    BeforeValidator(lambda v: parse_rate(v) if isinstance(v, str) else v),
    Field(gt=0, allow_inf_nan=False),
]
Seconds = Annotated[
    float,
    BeforeValidator(lambda v: _parse_amount(v, _SECONDS, "90 s")),
    Field(allow_inf_nan=False),
    Field(gt=0, le=LONGEST_S),
]


def parse_bytes(text: str) -> int:
    """Parse an amount of memory such as "64 GiB".

    Raises:
        ValueError: `text` is no such amount.
    """
    found = _parse_bytes(text)
    assert isinstance(found, int)
    return found


def parse_rate(text: str) -> float:
    """Parse a rate such as "12 GB/s" or "900 GiB/s".

    Raises:
        ValueError: `text` is not a rate.
    """
    amount, slash, unit = text.rpartition("/")
    if not slash or unit.strip() != "s" or not (amount := amount.strip()):
        raise ValueError(f"'{text}' is not a rate such as '12 GB/s'")
    return float(_parse_amount(amount, _BYTES, "12 GB"))  # type: ignore[arg-type]


_EXACT_COUNT = re.compile(r" \(\d+ bytes\)")


def show_bytes(n: float) -> str:
    """Format `n` bytes for readers: '23.5 GiB', '512 B'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def show_exact_bytes(n: int) -> str:
    """Format `n` bytes for readers, with the exact count because rounding hides small changes."""
    return f"{n} bytes" if n < 1024 else f"{show_bytes(n)} ({n} bytes)"


def hide_exact_bytes(text: str) -> str:
    """Remove the exact counts of `show_exact_bytes` from a text for people."""
    return _EXACT_COUNT.sub("", text)


def show_seconds(seconds: float) -> str:
    """Format `seconds` for readers: '1.25 s', '340 ms', '2 min 5 s'."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-2 else f"{seconds * 1e3:.2f} ms"


def show_flops(rate: float) -> str:
    """Format `rate` in FLOP/s for readers: '8 GFLOP/s'."""
    for unit in ("", "K", "M", "G", "T"):
        if rate < 1000:
            return f"{rate:.3g} {unit}FLOP/s"
        rate /= 1000
    return f"{rate:.3g} PFLOP/s"


def format_count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
