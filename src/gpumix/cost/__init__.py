"""What a plan costs: time, memory, network. Pure: no torch."""
