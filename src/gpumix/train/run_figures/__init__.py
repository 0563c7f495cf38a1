"""Figures of a run, computed from its files, and the texts that show them."""
