"""Parameters that no rank has a gradient of in a step.

An optimizer of torch passes over a parameter whose gradient is None: neither weight decay nor
momentum moves it. A rank sees which of the parameters got no gradient in its own micro-batches; all
ranks together know which got none at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gpumix.engine.buckets import Bucket
from gpumix.engine.comm import Communicator, Pending
from gpumix.engine.inventory import Inventory


class UnusedParameters:
    """Takes the gradients of zero from parameters that no rank used.

    Ranks join one flag for each trained parameter. Only a rank that lacks a gradient itself reads
    the flags: in most models none does, and updates go on meanwhile.
    """

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket], inventory: Inventory) -> None:
        self._comm = comm
        self._groups = [group for bucket in buckets for group in bucket.trainable]
        trained = (name for name, one in inventory.parameters.items() if one.trained)
        self._numbers = {name: number for number, name in enumerate(trained)}
        here = {piece.name for group in self._groups for piece in group.pieces}
        flags = [name in here for name in self._numbers]
        self._all_used = torch.tensor(flags, dtype=torch.uint8, device=comm.device)
        self._told: Pending | None = None

    def drop(self) -> None:
        """All gradients of the step are there: drop those of parameters that no rank used, where
        earlier steps left none to be added to. Collective."""
        absent = [name for group in self._groups for name in group.unused_names()]
        if self._comm.world > 1:
            absent = self._used_by_none(absent)
        if not absent:
            return
        names = frozenset(absent)
        for group in self._groups:
            for shard in group.shards:
                shard.drop_new_gradients(names)

    def finish(self) -> None:
        """The step ends: other ranks may read the flags until then."""
        if self._told is not None:
            self._wait(self._told)
            self._told = None

    def _wait(self, told: Pending) -> None:
        self._comm.record.meets("slower rank")
        told.wait()
        self._comm.record.goes_on()

    def _used_by_none(self, absent: Iterable[str]) -> list[str]:
        """Those of `absent`, which this rank has no gradient of, that the others have none of."""
        absent = list(absent)
        flags = self._all_used.clone()
        if absent:
            numbers = torch.tensor([self._numbers[name] for name in absent])
            flags.index_fill_(0, numbers.to(flags.device), 0)
        label = "exchange of which parameters have a gradient"
        self._told = self._comm.start_all_reduce(flags, label, flags=True)
        if not absent:
            return []
        self._wait(self._told)
        used = flags.tolist()
        return [name for name in absent if not used[self._numbers[name]]]
