"""Feeds it: one global order, shares of it, text."""
