"""Ragged shards of parameters, gradients and optimizer state, as flat groups in buckets.

Owns all-gather and reduce-scatter of a unit, state dicts and mixed precision. May use
`engine.comm`.
"""
