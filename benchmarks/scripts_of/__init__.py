"""Small training scripts, as people write them for the libraries that they train with."""
