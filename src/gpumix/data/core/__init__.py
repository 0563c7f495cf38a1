"""Foundations of the input side: sources, token files, tokenizers, read policies and host limits.

Uses no other room of `data`.
"""
