"""Imported last by the process that ranks are forked from: what is there is no garbage.

A rank that looked through all of it would copy all of it, page by page: 0.3 s of each rank's start.
And this process outlives SIGTERM to its whole group: it tells the launcher how ranks end, which do
so when they have saved.
"""

import atexit
import gc
import os
import signal

gc.collect()
gc.freeze()
# Libraries warn of what is left when the process ends.
atexit.register(gc.unfreeze)

_of_ranks = [signal.signal(signal.SIGTERM, signal.SIG_IGN)]


def outlive_sigterm() -> None:
    """In a process that was forked from this one, and that ranks are forked from in turn."""
    if not _of_ranks:
        _of_ranks.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))


def _in_rank() -> None:
    if _of_ranks:  # what a rank itself forks is its own affair
        signal.signal(signal.SIGTERM, _of_ranks.pop())


os.register_at_fork(after_in_child=_in_rank)
