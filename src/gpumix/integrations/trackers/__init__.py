"""Experiment trackers of runs, a file each, behind a small protocol (`tracker.py`).

Each tracker has its own process (`__main__.py`), which follows the run's files and is started by
`train/run_log/tracker_processes.py`. docs/trackers.md lists reported values and their names.
"""
