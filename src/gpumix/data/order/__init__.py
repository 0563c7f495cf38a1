"""Order of samples in an epoch, and the division of a batch among ranks.

May use `data.core`.
"""
