"""What `torch.cuda.Stream` and `torch.cuda.Event` are made of: torch's classes for any device."""

from __future__ import annotations

from typing import Any

import torch

from cuda_device.library import call

CUDA = 1  # the number of the type of device
STREAMS = 33


def stream_data(device: int, stream_id: int) -> tuple[int, int, int]:
    """What `torch.cuda.current_stream` makes a stream of."""
    return stream_id, device if device >= 0 else call("current")(), CUDA


class StreamBase(torch._C.Stream):
    """A stream of the current device, or that of a number."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = CUDA,
        **_given: Any,
    ) -> StreamBase:
        torch.cuda._lazy_init()
        if stream_id is None:
            return super().__new__(cls, device=f"cuda:{call('current')()}", priority=priority)
        return super().__new__(
            cls, stream_id=stream_id, device_index=device_index, device_type=device_type
        )

    def __init__(self, *_args: Any, **_given: Any) -> None:
        pass

    @property
    def cuda_stream(self) -> int:
        """A number as its address: 0 is the default one of any device."""
        number: int = self.stream_id
        return self.device_index * STREAMS + number if number else 0

    @property
    def priority(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class EventBase(torch._C.Event):
    """An event of the current device."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> EventBase:
        torch.cuda._lazy_init()
        if interprocess:
            raise RuntimeError("the CUDA device for tests has no events between processes")
        return super().__new__(
            cls, f"cuda:{call('current')()}", enable_timing=enable_timing, blocking=blocking
        )

    def __init__(self, *_args: Any, **_given: Any) -> None:
        pass

    @property
    def cuda_event(self) -> int:
        number: int = self.event_id
        return number

    def elapsed_time(self, end_event: EventBase) -> float:
        """Milliseconds between two events that have come."""
        passed = call("elapsed_ms")(self.event_id or None, end_event.event_id or None)
        if passed < 0:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return passed
