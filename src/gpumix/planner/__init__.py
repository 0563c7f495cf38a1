"""Which plan is best: one file per strategy. Pure: no torch."""
