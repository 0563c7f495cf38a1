"""Copies of state between a device and its host, with a separate lane for each direction
(`engine.offload.copy_lanes`): a link carries both at once. Lanes and threads of a rank, and the
masters of a shard on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gpumix.engine.offload.copy_lanes import CopyLane, LaneMark
from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.hardware.memory_limit import count_as_host_memory


class StateTransfers:
    """Both lanes of a rank, and the thread that prepares copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self.to_device = CopyLane(device, "device")
        self.to_host = CopyLane(device, "host")
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` on the preparing thread, in the order of calls."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gpumix-prepare")
        return self._thread.submit(work)

    def arrived(self) -> None:
        """Wait until all copies to the host have arrived."""
        self.to_host.mark().wait()


class HostMasters:
    """Masters of a shard on the host, and the values for the device: in pinned memory, and in the
    gathered dtype, so no more is copied than needed.

    Masters are rounded once in a step: from its beginning to its end (`may_change`) the values for
    the device stay the same, except for early updates, which come after a step's last gather of the
    shard. The next step uses everything written into masters since, by any code.

    Args:
        dtypes: dtype of the masters, and dtype of gathered values.
        values: memory for the values; default: this rank's own.
    """

    def __init__(
        self, numel: int, dtypes: tuple[torch.dtype, torch.dtype], transfers: StateTransfers,
        device: torch.device, values: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        master, gathered = dtypes
        self._transfers = transfers
        self._rounded: torch.Tensor | None = None
        if values is None:
            values = allocate_on_host(numel, gathered, device)
        if master == gathered:
            self.master = values
        else:
            with count_as_host_memory():
                self.master = torch.empty(numel, dtype=master)
            self._rounded = values
        self._rounding: Future[None] | None = None
        self._is_rounded = False
        self._sent: LaneMark | None = None

    def round_ahead(self) -> None:
        """Begin a step: round masters while other shards are gathered and computed with. Without a
        GPU, the thread would only slow down computing."""
        wanted = self._rounded is not None and not self._is_rounded and self._rounding is None
        if wanted and self._transfers.to_device.is_stream:
            self._rounding = self._transfers.prepare(self._round)

    def send(self, start: Callable[[torch.Tensor], None]) -> LaneMark:
        """Let `start` copy the values to the device, on the lane; return the mark of its end."""
        values = self.values()
        lane = self._transfers.to_device
        lane.carry(values.nbytes)
        with lane.active():
            start(values)
        self._sent = lane.mark()
        return self._sent

    def values(self) -> torch.Tensor:
        """Return the values for the device in this step."""
        if self._rounded is None:
            return self.master
        if self._rounding is not None:
            self._rounding.result()
            self._rounding = None
        elif not self._is_rounded:
            self._round()
        return self._rounded

    def may_change(self) -> None:
        """Allow writes into masters at the end of a step."""
        if self._rounded is None and self._sent is not None:
            self._sent.wait()  # until then the device reads them
        if self._rounding is not None:
            self._rounding.result()
        self._rounding, self._is_rounded = None, False

    def _round(self) -> None:
        assert self._rounded is not None
        if self._sent is not None:
            self._sent.wait()  # until then the device reads the last step's values
        self._rounded.copy_(self.master)
        self._is_rounded = True
