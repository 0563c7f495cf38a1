"""What `benchmarks/doctor.py` has examined: functions and jobs with a fault each, and without."""
