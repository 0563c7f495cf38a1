"""What the strategy for Lightning is made of; see `gpumix.integrations.lightning`."""
