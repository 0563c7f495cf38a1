"""Changes of a running plan: rebalancing, new stages, recovery after the loss of a device.

May use `planner`, `cost` and `train.run_log`.
"""
