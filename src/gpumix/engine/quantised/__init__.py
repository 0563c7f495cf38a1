"""Frozen parameters stored in few bits: packed bytes and constants in one flat vector.

Deciding code sees bytes; modules see their library's own parameters.
"""
