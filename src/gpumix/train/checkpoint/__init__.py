"""Checkpoints on disk: manifest, shards, content, export and inspection.

May use `engine` and `train.run_log`.
"""
