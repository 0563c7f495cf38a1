"""Monitors of a training rank: step times, gradient spikes, corruption, clocks, host waits.

May use `engine` and `train.run_log`.
"""
