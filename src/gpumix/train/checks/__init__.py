"""Checks of a job before training: data, plan, heads, output folder, resumed runs.

Each raises an error with a fix.
"""
