"""What `docs/generate.py` makes pages of: beginnings written by hand (`*.md`), and modules that
read the rest from the code. `site.py` is what mkdocs is told beside mkdocs.yml."""
