"""Training loop, optimizer, checkpoints, metrics and ranks."""
