"""Profiles: measurements of a model on each device class. Values only."""
