"""Communicator: collectives and messages of a rank's groups, their records, and reports of hangs.

Owns process groups and the exchange at the end of a step. May use `hardware` and copy lanes.
"""
