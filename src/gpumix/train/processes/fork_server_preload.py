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

_sigterm_handlers = [signal.signal(signal.SIGTERM, signal.SIG_IGN)]


def ignore_sigterm() -> None:
    """Ignore SIGTERM in a process forked from the server and forking ranks itself."""
    if not _sigterm_handlers:
        _sigterm_handlers.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))


def _restore_sigterm() -> None:
    if _sigterm_handlers:  # child processes of a rank decide for themselves
        signal.signal(signal.SIGTERM, _sigterm_handlers.pop())


os.register_at_fork(after_in_child=_restore_sigterm)
