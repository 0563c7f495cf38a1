"""Templates for SLURM and Kubernetes. Pure: text from a cluster and a program."""
