"""The readings of frozen features, a file each."""
