"""What is here: discovery of devices, and emulated ones."""
