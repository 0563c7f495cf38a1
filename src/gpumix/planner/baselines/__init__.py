"""Strategies of others, as baselines and as candidates: even, Cephalo, Poplar, Whale, best subset.

May use `planner.common` and the searches.
"""
