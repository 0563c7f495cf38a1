"""Clusters: devices, classes, hosts, links and kernels. Values only."""
