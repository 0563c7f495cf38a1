"""Bytes, seconds and FLOP/s: how people write them, and how they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gpumix.schema.units import Bytes, FlopRate, Seconds, show_bytes, show_flops, show_seconds

BYTES, RATE, SECONDS = TypeAdapter(Bytes), TypeAdapter(FlopRate), TypeAdapter(Seconds)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (BYTES, "24 GiB", 24 << 30), (BYTES, "24GiB", 24 << 30), (BYTES, " 1.5 KiB ", 1536),
        (BYTES, "2 GB", 2 * 10**9), (BYTES, "3 kB", 3000), (BYTES, "3 KB", 3000),
        (BYTES, "512 B", 512), (BYTES, "512", 512), (BYTES, 512, 512), (BYTES, "1e3", 1000),
        (BYTES, "0", 0), (BYTES, ".5 TiB", 1 << 39),
        (RATE, "8 GFLOP/s", 8e9), (RATE, "1.5 TFLOP/s", 1.5e12), (RATE, "3 FLOP/s", 3.0),
        (RATE, "2 PFLOP/s", 2e15), (RATE, 5, 5.0), (RATE, "5e9", 5e9),
        (SECONDS, "90 s", 90.0), (SECONDS, "20 ms", 0.02), (SECONDS, "2 min", 120.0),
        (SECONDS, "1.5 h", 5400.0), (SECONDS, "7", 7.0), (SECONDS, 0.5, 0.5),
    ],
)  # fmt: skip
def test_what_people_write(kind, text, value):
    assert kind.validate_python(text) == value
    assert kind.validate_json(f'"{text}"' if isinstance(text, str) else str(text)) == value


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (BYTES, "24 gib", "'24 gib'.*'24 GiB'.*B, KB, kB, KiB"),
        (BYTES, "GiB", "'24 GiB'"), (BYTES, "", "'24 GiB'"),
        (BYTES, "-1 GiB", "'-1 GiB'.*'24 GiB'"),
        (BYTES, -1, "greater than or equal to 0"),
        (BYTES, "1 2 GiB", "'24 GiB'"), (BYTES, [1], "integer"),
        (RATE, "8 GFLOPS", "'8 GFLOP/s'"), (RATE, 0, "greater than 0"),
        (RATE, "0 GFLOP/s", "greater than 0"), (RATE, "1e999 GFLOP/s", "finite"),
        (SECONDS, "90 sec", "'90 s'"), (SECONDS, 0, "greater than 0"),
        (SECONDS, float("inf"), "finite"), (SECONDS, float("nan"), "finite|greater"),
    ],
)  # fmt: skip
def test_what_is_no_amount(kind, text, said):
    with pytest.raises(ValidationError, match=said):
        kind.validate_python(text)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(0), "0 B"), (show_bytes(1023), "1023 B"), (show_bytes(1024), "1.0 KiB"),
        (show_bytes(23.5 * 2**30), "23.5 GiB"), (show_bytes(2**50), "1024.0 TiB"),
        (show_seconds(1.25), "1.25 s"), (show_seconds(0.34), "340 ms"),
        (show_seconds(0.00034), "0.34 ms"), (show_seconds(125), "2 min 5 s"),
        (show_flops(8e9), "8 GFLOP/s"), (show_flops(1.25e12), "1.25 TFLOP/s"),
        (show_flops(3), "3 FLOP/s"), (show_flops(2e15), "2 PFLOP/s"),
    ],
)  # fmt: skip
def test_what_is_shown(shown, expected):
    assert shown == expected


@given(st.integers(0, 2**50))
def test_shown_bytes_can_be_read_again(n):
    assert BYTES.validate_python(show_bytes(n)) == pytest.approx(n, rel=0.06)


@given(st.floats(1, 1e17))
def test_shown_rates_can_be_read_again(rate):
    assert RATE.validate_python(show_flops(rate)) == pytest.approx(rate, rel=0.01)
