"""SLURM: frozen points as job arrays through submitit, and what the queue says about them."""
