"""Search of plans of several pipeline stages and tensor-parallel groups. Pure.

May use `planner.data_parallel`, `planner.common` and `cost`.
"""
