"""CPU processes emulating devices of given speed and memory. Slows compute, not results."""
