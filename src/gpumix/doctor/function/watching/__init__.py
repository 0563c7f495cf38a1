"""Observation of a function while it trains."""
