"""Parts of the strategy for Lightning; see `gpumix.integrations.lightning`."""
