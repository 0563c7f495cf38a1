"""Time of collectives and messages, from measured or stated links. Pure.

May use `schema` and `cost.memory_layout`.
"""
