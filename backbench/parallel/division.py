"""Checks how a global batch divides into micro-batches, ranks and groups of batch norm.

A step is `accumulate` micro-batches: equal, contiguous parts of the global batch. Each of them is
divided among the ranks likewise. So the images that meet in a batch norm or a queue are the same on
any number of ranks. What does not divide is refused before anything starts."""

import math

from backbench.errors import BadInput


def check_batch(batch_size: int, ranks: int, accumulate: int) -> None:
    """Refuse a batch that does not give every rank equally many images of every micro-batch."""
    parts = ranks * accumulate
    if parts < 1:
        raise BadInput(
            f"{ranks} processes in all: --devices and --nodes must be at least 1"
        )
    if batch_size % parts:
        nearest = max(1, round(batch_size / parts)) * parts
        raise BadInput(
            f"batch_size {batch_size} does not divide over {ranks} processes x {accumulate}"
            f" accumulation steps; the nearest that does is {nearest}"
        )


def check_nesting(groups: int, ranks: int) -> None:
    """Refuse groups and ranks of which neither number divides the other."""
    if groups % ranks and ranks % groups:
        # The next smaller and the next larger number of ranks that nest with the groups
        below = max(n for n in range(1, ranks) if groups % n == 0 or n % groups == 0)
        above = math.ceil(ranks / groups) * groups
        raise BadInput(
            f"{groups} batch norm groups and {ranks} processes do not nest: a process must hold "
            f"whole groups, or a group whole processes; start {below} or {above} processes "
            "(--devices times --nodes)"
        )


def check_groups(groups: int | None, images: int) -> None:
    """Refuse groups into which a forward pass's `images`, over all ranks, do not divide."""
    if groups is not None and (groups < 1 or images % groups):
        raise BadInput(
            f"{groups} batch norm groups do not divide the {images} images that a forward pass of"
            " all processes holds; change method.groups, batch_size or accumulate"
        )
