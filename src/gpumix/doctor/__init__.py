"""Bottleneck diagnosis of a job: measured suspects, and settings fixing the confirmed cases."""
