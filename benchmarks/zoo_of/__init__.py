"""Model classes that this project did not write, each made small and given data that fits it."""
