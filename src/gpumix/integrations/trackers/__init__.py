"""Experiment trackers of runs, one file each, behind one small protocol (`tracker.py`).

Each tracker has a process of its own (`__main__.py`), which follows the files that the run writes;
`train/tracking.py` starts it. docs/trackers.md has what is told, and by which names.
"""
