"""Freezing of the garbage collector, imported last by the server process forking the ranks.

A rank's garbage collector would otherwise copy all inherited memory page by page: 0.3 s of each
rank's start. Also, the server outlives a SIGTERM to its process group: it reports to the launcher
how ranks end, which do so only after saving.
"""

import atexit
import gc
import os
import signal

gc.collect()
gc.freeze()
# Libraries warn of leftovers when the process ends.
atexit.register(gc.unfreeze)

_of_ranks = [signal.signal(signal.SIGTERM, signal.SIG_IGN)]


def outlive_sigterm() -> None:
    """Ignore SIGTERM in a process forked from the server and forking ranks itself."""
    if not _of_ranks:
        _of_ranks.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))


def _in_rank() -> None:
    if _of_ranks:  # child processes of a rank decide for themselves
        signal.signal(signal.SIGTERM, _of_ranks.pop())


os.register_at_fork(after_in_child=_in_rank)
