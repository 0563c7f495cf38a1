"""The loop: step, optimizer, checkpoint, metrics, ranks."""
