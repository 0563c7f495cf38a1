"""Shows a run: one page that opens offline, and live in a terminal. Never imports torch."""
