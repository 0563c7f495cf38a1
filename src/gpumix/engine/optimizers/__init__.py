"""Optimizers of full parameters, although every rank stores only a part of each.

Element-wise optimizers (AdamW, SGD) need nothing from here: torch's own work.
"""
