"""What a step will look like: events, critical path, idle time, trace. Pure: no torch."""
