"""What several test files share: published files, a Slurm of our own, stand-in verbs."""
