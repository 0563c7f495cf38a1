"""Time and memory of a step of several pipeline stages. Pure.

Owns what a stage costs; the order of passes is in `cost.pipeline_schedule`.
"""
