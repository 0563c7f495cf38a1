"""The host of a process: cores, cgroup limits, environment variables and pinned memory.

`environment` is the only module that reads environment variables.
"""
