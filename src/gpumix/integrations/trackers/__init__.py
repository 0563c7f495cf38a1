"""Experiment trackers of runs, a file each, behind a small protocol (`tracker.py`).

Each tracker has its own process (`__main__.py`), which follows the run's files; `train/tracking.py`
starts it. docs/trackers.md lists reported values and their names.
"""
