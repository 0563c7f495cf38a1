"""What `benchmarks/faults.py` trains: models whose ranks come to harm."""
