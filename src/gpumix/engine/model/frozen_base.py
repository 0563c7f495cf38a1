"""The frozen base that adapters belong to, known by name and checksum.

A checkpoint of adapters refers to its base, which is read again from where it came from. The sum is
of the values as given, before ranks round them: it depends neither on the plan nor on a dtype,
because sums of bytes, each times a number of its own place, can be added over ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.adapters import iterate_adapter_layers
from gpumix.schema.errors import InputError

# Half as many bits as the weights of words have, so that no bit of a word is lost in a product.
WORD_BYTES, ROW_WORDS = 4, 1 << 16
_WRAP = 1 << 64
_ODD = 0x9E3779B97F4A7C15  # the golden ratio's digits: its multiples are spread evenly
_MIX = 0xBF58476D1CE4E5B9


@dataclass(frozen=True)
class FrozenBase:
    """Frozen parameters of a model, by the name of where they come from and the checksum of their
    values."""

    name: str
    checksum: str

    def check_same(self, saved: FrozenBase, where: str) -> None:
        """Check the base that saved adapters belong to.

        Raises:
            InputError: it has other values.
        """
        if saved.checksum != self.checksum:
            raise InputError(
                "the adapters belong to another base model",
                code="adapters-of-another-base",
                where=where,
                why=f"they were trained on {saved.name or 'a model'} with checksum "
                f"{saved.checksum}; {self.name or 'this one'} has {self.checksum}",
                fix="use the weights that the run started from (`model.weights` of a job), and "
                "the same quantisation",
            )


class DigestingSource:
    """A source of initial values that takes sums of the frozen ones on the way."""

    def __init__(self, source: Callable[..., torch.Tensor]) -> None:
        self._source = source
        self._sums: dict[tuple[str, int, int], int] = {}

    def __call__(self, name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        values = self._source(name, parameter, start, end)
        if not parameter.requires_grad:
            self._sums[name, start, end] = checksum(values, start)
        return values

    def make_own_sum(self, read: Iterable[tuple[str, int, int]]) -> int:
        """Return the sum of values read here, by name of the parameter, begin and end."""
        terms = (self._sums[key] * _factor_of_name(key[0]) for key in read)
        return sum(terms) % _WRAP


def make_base(name: str, own_sum: int, comm: Communicator) -> FrozenBase:
    """Return the base of which each rank has summed a part. Collective."""
    parts = [own_sum >> 32, own_sum % (1 << 32)]
    own = torch.tensor(parts, dtype=torch.int64, device=comm.device)
    table = comm.exchanged(own, "checksum of the frozen base").tolist()
    return FrozenBase(name, format_sum(sum((high << 32) + low for high, low in table)))


def format_sum(total: int) -> str:
    """Return the checksum that a sum of all values stands for."""
    return f"{total % _WRAP:016x}"


def _factor_of_name(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def has_frozen_base(model: nn.Module, packed: bool) -> bool:
    """Return True for a model of adapters, or with quantised weights: its base is elsewhere too."""
    return packed or any(True for _ in iterate_adapter_layers(model))


def find_source_name(model: nn.Module, weights: Any) -> str:
    """Return the name of where a model's frozen parameters come from; may be empty."""
    if weights is not None:
        return str(weights)
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def checksum(values: torch.Tensor, start: int = 0) -> int:
    """Return a 64-bit number of the bytes of values, which begin at element `start` of a tensor.
    Numbers of parts of a tensor add up to the number of the tensor, modulo 2**64."""
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    begin, total = start * values.element_size(), 0
    weights = _make_weights(min(ROW_WORDS, (begin + len(flat)) // WORD_BYTES + 1), flat.device)
    while flat.numel():
        row, inside = divmod(begin, ROW_WORDS * WORD_BYTES)
        part, flat = flat.tensor_split([min(flat.numel(), ROW_WORDS * WORD_BYTES - inside)])
        first, front = divmod(inside, WORD_BYTES)
        words = nn.functional.pad(part, (front, -(front + len(part)) % WORD_BYTES))
        words = words.view(torch.int32).to(torch.int64)
        of_row = (words * weights[first : first + len(words)]).sum()
        total += int(of_row) * (_mix(row + 1) | 1)
        begin += len(part)
    return total % _WRAP


def _make_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each word of a row: no change of a single word goes unnoticed."""
    numbers = torch.arange(1, count + 1, device=device) * as_signed(_ODD)
    numbers ^= numbers >> 29
    numbers *= as_signed(_MIX)
    return (numbers ^ (numbers >> 32)) | 1


def as_signed(number: int) -> int:
    """Return the signed number with the 64 bits of `number`."""
    return number - _WRAP if number >= _WRAP // 2 else number


def _mix(number: int) -> int:
    """Return 64 bits that look random, always the same for a number (splitmix64)."""
    z = (number + 1) * _ODD % _WRAP
    z = (z ^ (z >> 30)) * _MIX % _WRAP
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WRAP
    return z ^ (z >> 31)
