"""What `benchmarks/goodput.py` trains, and how it is told of."""
