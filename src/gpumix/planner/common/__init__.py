"""Parts of all strategies: requests, device pools, scores and reasons. Pure.

May use `schema` and `cost`.
"""
