"""What slows a job down, proved on that job, and the setting that mends it."""
