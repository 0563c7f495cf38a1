"""Programs' own data loaders and samplers, divided by a plan.

May use `integrations.common` and `data`.
"""
