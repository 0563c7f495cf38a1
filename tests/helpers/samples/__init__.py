"""Datasets that show where each sample came from."""
