"""How fast it is: compute, memory and network, measured."""
