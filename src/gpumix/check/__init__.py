"""Cluster checks before a run: gather facts of every rank and host, and report problems."""
