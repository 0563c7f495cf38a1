"""Division of a batch into micro-batches, for rows and for ragged entries.

May use `engine.comm`.
"""
