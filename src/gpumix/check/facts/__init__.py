"""Facts of a cluster before a run, as plain values: of hosts, devices, links and the job.

May use `schema` and `hardware`. Rules judge these values; probes gather them.
"""
