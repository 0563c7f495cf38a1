"""Optimizers that look at whole parameters although every rank stores a part of each.

What treats elements one by one (AdamW, SGD) needs nothing from here: torch's own does.
"""
