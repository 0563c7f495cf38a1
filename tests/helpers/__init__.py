"""Shared pieces of the tests, by subject."""
