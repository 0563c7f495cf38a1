"""Launchers of a host's ranks: processes started, watched, stopped and ended.

May use `train.processes`.
"""
