"""Reports of a run: an offline HTML page, and a live view in a terminal. Never imports torch."""
