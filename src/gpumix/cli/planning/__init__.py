"""Verbs that plan and measure nothing: plan, compare, whatif, simulate.

Owns the questions that they share (which cluster, which model, which profile) and their tables. May
use everything below the command line.
"""
