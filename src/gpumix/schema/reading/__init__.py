"""Reading of users' files: YAML with positions, overrides, and errors with place and fix.

May use the values of `schema`.
"""
