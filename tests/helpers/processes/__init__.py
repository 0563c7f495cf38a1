"""Processes of tests: commands, ranks, hosts and ports."""
