"""A training process: its context (rank, device, data), its model and its optimizer."""
