"""Barrier before collectives called by a program: a rank calling alone gets an error.

A program may call on the first rank alone a function needing all ranks, such as saving the model.
The other ranks have moved on, and a collective would never end.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gpumix.engine.comm.process_groups import group_timeout
from gpumix.schema.errors import InputError

# Wait of the first rank for other ranks. Another rank waits as long as a collective may take: a
# call there is normally made on the first rank too, perhaps later.
FIRST_RANK_TIMEOUT_S = 120.0


class CollectiveGuard:
    """Barrier made by all ranks of the default process group, equally often on each."""

    def __init__(self) -> None:
        self._times = 0
        self._others: list[int] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._rank = dist.get_rank()
        self._others = [r for r in range(dist.get_world_size()) if r != self._rank]
        default = dist.distributed_c10d._get_default_store()
        number = default.add(f"gpumix/meetings/{self._rank}", 1)
        self._store = dist.PrefixStore(f"gpumix/meeting{number}", default)

    def wait_for_all(self, what: str, fix: str) -> None:
        """Wait until all ranks have arrived as often as this rank.

        Args:
            what: name of the request, for the message.

        Raises:
            InputError: some ranks have not arrived.
        """
        if not self._others:
            return
        time = self._times + 1
        own, awaited = f"{time}/{self._rank}", {rank: f"{time}/{rank}" for rank in self._others}
        self._store.set(own, "")
        longest = group_timeout()
        assert longest is not None, "there are other ranks"
        patience = longest
        if self._rank == 0:
            patience = min(longest, timedelta(seconds=FIRST_RANK_TIMEOUT_S))
        try:
            self._store.wait(list(awaited.values()), patience)
        except RuntimeError as error:  # includes DistStoreError
            self._store.delete_key(own)  # withdraw: all ranks may still arrive together
            missing = [str(rank) for rank, key in awaited.items() if not self._store.check([key])]
            many = "s" if len(missing) > 1 else ""
            raise InputError(
                f"{what} is asked for on rank {self._rank}, and not on all ranks",
                code="not-on-all-ranks",
                why=f"each rank has a part of it, and rank{many} {', '.join(missing)} did not ask "
                f"for it in {patience.total_seconds():.0f} s",
                fix=fix,
            ) from error
        self._times = time
