"""Where traps can be, and what they do beside sending a signal."""

PLACES = ("begin", "forward", "backward", "reduction", "optimizer", "copy", "save", "restore")
# Those that are passed before the first step of a start.
BEFORE_STEPS = ("begin", "restore")
# Those that a rank passes no more than once in a step.
ONCE = ("begin", "optimizer", "copy", "save", "restore")
# In place of a signal: a call that does not come back, while the process lives.
HANG = 0
