"""Processes, devices and ranks: everything that crosses them.

distributed  collectives with the right gradient, agreement among ranks, the start of ranks
batchnorm    batch norm over all ranks, or over groups of samples
division     how a global batch divides into micro-batches, ranks and groups
loading      loader workers that survive signals and tell their errors
gpus         whether there are as many GPUs as were asked for
precision    what float32 means on a GPU
"""
