"""A run: its folder and the names of its files, its state and stop flag."""
