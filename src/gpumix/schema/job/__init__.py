"""Jobs: the keys of a job file and their defaults. Values only."""
