"""Cost model of a plan: time, memory and network. Pure Python: no torch."""
