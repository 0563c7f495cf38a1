"""Scripts of users and the examples, as they were and with gpumix."""
