"""Experiment trackers of runs, a file each, behind a small protocol (`tracker.py`).

One background process (`__main__.py`) calls all trackers of a run, each in a thread that follows
the run's log; `train/run_log/tracker_process.py` starts it. docs/trackers.md lists reported values
and their names.
"""
