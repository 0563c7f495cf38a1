"""What `endurance.py` runs: logs of long runs, and jobs of many short steps."""
