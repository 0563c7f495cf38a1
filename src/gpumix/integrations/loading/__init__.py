"""Models whose weights stay in files until a plan says which rank stores what."""
