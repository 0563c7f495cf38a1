"""Probes of hosts before a launch, and their readiness. Nothing is started yet."""
