"""Profiler: measured speed of compute, memory and network."""
