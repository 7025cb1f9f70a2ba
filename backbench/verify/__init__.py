"""Whether numbers follow from what was kept beside them, and whether they differ."""
