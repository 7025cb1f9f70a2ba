"""Processes, devices and ranks: everything that crosses them."""
