"""Search for the best plan: one file per strategy. Pure Python and NumPy, no torch."""
