"""What runs on workers of a Ray cluster is made of; see `gpumix.integrations.ray`."""
