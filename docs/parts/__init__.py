"""What `docs/generate.py` makes the reference pages of: beginnings written by hand (`*.md`), and
one module per page that reads the rest from the code."""
