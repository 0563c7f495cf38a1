"""Imported last by the process that ranks are forked from: what is there is no garbage.

A rank that looked through all of it would copy all of it, page by page: 0.3 s of each rank's start.
"""

import atexit
import gc

gc.collect()
gc.freeze()
# Libraries warn of what is left when the process ends.
atexit.register(gc.unfreeze)
