"""Processes of a run: local launcher, torchrun, store, rendezvous, watchdogs and stop signals.

May use `hardware`, `engine.comm` and `train.elastic`.
"""
