"""Parts that all integrations share: sharding by a plan, gathering, saving, the record of a run.

May use the packages below `integrations`, and no other integration.
"""
