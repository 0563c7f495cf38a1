"""Simulation of a training step: events, critical path, idle time, trace. Pure: no torch."""
