"""The engine that runs a plan: units, shards, collectives, the layered schedule."""
