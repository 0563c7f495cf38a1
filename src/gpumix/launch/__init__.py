"""Starts a program on all devices of one host or of several: `gpumix launch`."""
