"""Text files, and packing of documents into sequences.

May use `data.core`, `data.order` and the padding of `data.workers`.
"""
