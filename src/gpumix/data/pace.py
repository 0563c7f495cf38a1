"""What a device takes for its steps, and how long it stands idle between them.

The loader sees when a batch is taken and when the next one is asked for. Where the host waits for
the device in between, its clock tells both. Where it runs ahead, the time between is what it takes
to give work to the device, so there stamps go into the device's own stream: they are read once they
have passed, and nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic

import torch

from gpumix.hardware.stamps import HostStamps, S, Stamps, StreamStamps


@dataclass(frozen=True)
class Step:
    """One step as the device saw it: how long it stood idle for data, and how long it had the batch
    before then; `ready`: the batch was there when it was asked for."""

    waited_s: float
    device_s: float
    ready: bool


class Pace(Generic[S]):
    """Tells a loader's steps apart: `asked` for a batch, `taken`, once it is there."""

    def __init__(self, stamps: Stamps[S]) -> None:
        self._stamps = stamps
        self._before: S | None = None  # when the batch before was taken
        self._asked: S | None = None
        self._under_way: deque[tuple[S, S, S, bool]] = deque()

    def asked(self) -> None:
        self._asked = self._stamps.now()

    def taken(self, *, ready: bool) -> None:
        assert self._asked is not None, "it was asked for"
        now = self._stamps.now()
        if self._before is not None:
            self._under_way.append((self._before, self._asked, now, ready))
        self._before = now

    def told(self) -> list[Step]:
        """The steps that the device is through with, since this was asked last."""
        found = []
        while self._under_way and all(map(self._stamps.passed, self._under_way[0][:3])):
            before, asked, taken, ready = self._under_way.popleft()
            waited_s = self._stamps.between(asked, taken)
            found.append(Step(waited_s, self._stamps.between(before, asked), ready))
        return found

    def forget(self) -> None:
        """What is under way, and the batch before the next one."""
        self._under_way.clear()
        self._before = None


def pace_of(device: torch.device | None) -> Pace[Any]:
    """By the stream of a GPU, or by the host's clock."""
    return Pace(HostStamps()) if device is None else Pace(StreamStamps(device))
