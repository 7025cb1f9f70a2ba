"""What several test files stand on: published files made here, a Slurm of our own, stand-in verbs,
processes."""
