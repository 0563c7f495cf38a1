"""Values passed from one command to the next. Pure Python without torch."""
