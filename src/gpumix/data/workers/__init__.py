"""Processes and threads that read ahead: worker pool, prefetched batches, copies to the device.

May use `data.core` and `data.order`.
"""
