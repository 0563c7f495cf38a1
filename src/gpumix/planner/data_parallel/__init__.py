"""Search of plans of a single stage: samples and shards of each device. Pure.

May use `planner.common` and `cost`.
"""
