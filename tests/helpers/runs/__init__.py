"""Tiny jobs, and the folders that their runs leave."""
