"""Parameters without a gradient on any rank in a step.

An optimizer of torch passes over a parameter whose gradient is None: neither weight decay nor
momentum moves it. A rank sees which parameters got no gradient in its own micro-batches; only all
ranks together know which parameters got none at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gpumix.engine.comm.communicator import Communicator, Pending
from gpumix.engine.sharding.bucket import Bucket
from gpumix.engine.sharding.parameter_index import ParameterIndex


class UnusedParameters:
    """Removal of zero gradients from parameters that no rank used.

    Ranks all-reduce one flag per trained parameter. Only a rank lacking a gradient itself reads the
    flags: in most models none does, and updates proceed meanwhile.

    Attributes:
        groups: of the trained parameters.
        told: the exchange of flags under way.
    """

    def __init__(
        self, comm: Communicator, buckets: Sequence[Bucket], inventory: ParameterIndex
    ) -> None:
        self._comm = comm
        self.groups = [group for bucket in buckets for group in bucket.trainable]
        trained = (name for name, one in inventory.parameters.items() if one.trained)
        self._numbers = {name: number for number, name in enumerate(trained)}
        here = {piece.name for group in self.groups for piece in group.pieces}
        flags = [name in here for name in self._numbers]
        self._all_used = torch.tensor(flags, dtype=torch.uint8, device=comm.device)
        self.told: Pending | None = None

    def drop(self) -> None:
        """Drop the gradients of parameters that no rank used, unless earlier steps left gradients
        to add to. All gradients of the step must be complete. Collective."""
        absent = [name for group in self.groups for name in group.unused]
        if self._comm.world > 1:
            absent = self._find_globally_unused(absent)
        if not absent:
            return
        names = frozenset(absent)
        for group in self.groups:
            for shard in group.shards:
                shard.drop_new_gradients(names)

    def finish(self) -> None:
        """End the step's exchange of flags; other ranks may read the flags until here."""
        if self.told is not None:
            self._wait(self.told)
            self.told = None

    def _wait(self, told: Pending) -> None:
        self._comm.record.meets("slower rank")
        told.wait()
        self._comm.record.goes_on()

    def _find_globally_unused(self, absent: Iterable[str]) -> list[str]:
        """Return the parameters of `absent`, without a gradient here, unused on all other ranks."""
        absent = list(absent)
        flags = self._all_used.clone()
        if absent:
            numbers = torch.tensor([self._numbers[name] for name in absent])
            flags.index_fill_(0, numbers.to(flags.device), 0)
        label = "exchange of which parameters have a gradient"
        self.told = self._comm.start_all_reduce(flags, label, flags=True)
        if not absent:
            return []
        self._wait(self.told)
        used = flags.tolist()
        return [name for name in absent if not used[self._numbers[name]]]
