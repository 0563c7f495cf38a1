"""Launch of a program on all devices of a host or of several hosts: `gpumix launch`."""
