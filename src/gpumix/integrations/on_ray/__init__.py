"""Parts of the workers on a Ray cluster; see `gpumix.integrations.ray`."""
