"""Rules: findings from the facts of a cluster, one module per subject. Pure.

May use facts, and nothing that touches a device.
"""
