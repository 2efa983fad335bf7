"""The checks, a file each: a new one is a file with a ``CHECK``, and nothing else."""
