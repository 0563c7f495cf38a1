"""Reduction of losses: denominators, the rule of a model or a program, and the chunked head.

May use `engine.cross_entropy`, `engine.batch`, `engine.model` and the head's shards.
"""
