"""Probes: tasks for each rank, requested through the store, with a time limit each.

A probe looks at its host, its device and its peers. May use `hardware`, `engine.comm` and facts.
"""
