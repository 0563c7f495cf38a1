"""The user's model: forward as a coroutine, buffers, random numbers, settings and extra state.

Knows nothing of shards or schedules. May use `engine.comm`.
"""
