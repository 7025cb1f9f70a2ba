"""Weights: the trunks, the Checkpoint file, and every published format that becomes one."""
