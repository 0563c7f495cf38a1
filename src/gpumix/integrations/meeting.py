"""Ranks that a program calls, together before a collective: one that is called alone hears of it.

A program may do on the first rank alone what takes all of them, such as to save the model. The
others have then gone on to something else, and no collective would ever end.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gpumix.engine.groups import group_timeout
from gpumix.spec.errors import InputError

# So long the first rank waits for the others. Whoever calls another one calls the first one too:
# that may take as long as any collective.
PATIENCE_S = 120.0


class Meeting:
    """Made by all ranks of the default process group, as often on each."""

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

    def come(self, what: str, fix: str) -> None:
        """Wait until all ranks have come as often as this one.

        Args:
            what: is asked for.

        Raises:
            InputError: some have not come.
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
            patience = min(longest, timedelta(seconds=PATIENCE_S))
        try:
            self._store.wait(list(awaited.values()), patience)
        except RuntimeError as error:  # DistStoreError among them
            self._store.delete_key(own)  # it has not come: all may come together yet
            missing = [str(rank) for rank, key in awaited.items() if not self._store.check([key])]
            many = "s" if len(missing) > 1 else ""
            raise InputError(
                f"{what} is asked for on rank {self._rank}, and not on all ranks",
                why=f"each rank has a part of it, and rank{many} {', '.join(missing)} did not ask "
                f"for it in {patience.total_seconds():.0f} s",
                fix=fix,
            ) from error
        self._times = time
