"""Checkpoints in host memory, with a copy on a buddy: recovery without a disk.

May use `train.checkpoint`.
"""
