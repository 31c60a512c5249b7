"""Measuring on a cluster: job files for Slurm and Kubernetes, and following what they start."""
