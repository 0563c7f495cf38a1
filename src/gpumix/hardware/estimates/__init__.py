"""Estimates of devices that are not there: catalogue, datasheet peaks, roofline, what-if clusters.

Pure, without torch.
"""
