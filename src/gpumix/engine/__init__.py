"""Runs a plan: units, shards, collectives, the layered schedule."""
