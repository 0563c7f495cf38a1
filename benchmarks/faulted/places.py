"""Where traps can be."""

PLACES = ("forward", "backward", "reduction", "optimizer", "copy", "save")
