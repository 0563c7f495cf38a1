"""Schedules of a step: sequential, layered (each block for all micro-batches), and pipeline stages.

Owns the order of passes of a rank. May use units, shards, losses and `engine.comm`.
"""
