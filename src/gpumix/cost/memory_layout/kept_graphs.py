"""Bytes of the graphs kept by micro-batches from forward to backward."""

from __future__ import annotations

import numpy as np

from gpumix.cost.memory_layout.curves import IntArray, MicroBatches, interpolate_bytes
from gpumix.schema.profile.profile import ModelProfile


class KeptGraphs:
    """Additional memory of graphs kept although the mode recomputes.

    Attributes:
        bytes_before: rows of additional bytes, before each call and after the last.
    """

    def __init__(
        self, model: ModelProfile, micro: MicroBatches, kept: IntArray, *, in_layers: bool
    ) -> None:
        self._micro, self._kept, self._calls = micro, kept, len(model.calls)
        rows = [np.zeros(micro.size.shape)]
        for call, name in enumerate(model.kind_of_call):
            kind = model.kind(name)
            assert kind.saved is not None, "graphs are kept, which were not measured"
            full, rest = micro.count_last_by_size(self.of_call(call))
            more = [
                np.ceil(interpolate_bytes(kind.saved, n)) - np.ceil(interpolate_bytes(kind.kept, n))
                for n in (micro.size, micro.rest)
            ]
            if in_layers:
                added = full * more[0] + rest * more[1]
            else:  # one micro-batch at a time: the one that keeps the most of this call
                smaller = np.ceil(interpolate_bytes(kind.saved, micro.rest)) - np.ceil(
                    interpolate_bytes(kind.kept, micro.size)
                )
                added = np.where(full > 0, more[0], np.where(rest > 0, smaller, 0.0))
            rows.append(rows[-1] + np.maximum(added, 0.0))
        self.bytes_before = np.stack(rows)

    def of_call(self, call: int) -> IntArray:
        """Return the number of micro-batches keeping the graph of `call`."""
        count = self._micro.count
        return np.asarray(np.clip(self._kept - (self._calls - 1 - call) * count, 0, count))

    def largest(self, call: int) -> IntArray:
        """Return the samples of the largest micro-batch keeping the graph of `call`; 0 if none."""
        full, rest = self._micro.count_last_by_size(self.of_call(call))
        return np.where(full > 0, self._micro.size, np.where(rest > 0, self._micro.rest, 0))

    def all_kept(self, call: int) -> IntArray:
        """Return True where all micro-batches keep the graph of `call`."""
        return np.asarray(self.of_call(call) == self._micro.count)
