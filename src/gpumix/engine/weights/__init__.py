"""Weights in files: read by memory map, a tensor or a part of one at a time."""
