"""The values: what crosses from one verb to the next. Pure: no torch."""
