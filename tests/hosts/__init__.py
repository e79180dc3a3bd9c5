"""Several machines, which are network namespaces of this one, and a Slurm of one node: `make hosts`."""
