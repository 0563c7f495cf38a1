"""Tests a cluster before a run: facts of every rank and host, and what is wrong with them."""
