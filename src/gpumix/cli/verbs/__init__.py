"""Verbs of the command line, a module each: options, and a call of the package doing the work."""
