"""A unit (transformer block or root) in a step: call, saved inputs, recomputation, backward.

May use `engine.sharding`, `engine.loss` and `engine.model`.
"""
