"""Divides a global batch into micro-batches, then ranks, with groups of batch norm across them. A
step is `accumulate` micro-batches, equal contiguous parts of the global batch, each spread over the
ranks likewise. So the images that meet in a batch norm or a queue are the same on any number of
ranks. What does not divide is refused before anything starts."""

from backbench.errors import BadInput


def check_batch(batch_size: int, ranks: int, accumulate: int) -> None:
    """BadInput unless every rank gets equally many images of every micro-batch."""
    parts = ranks * accumulate
    if parts < 1:
        raise BadInput(
            f"{ranks} processes in all: --devices and --nodes must be at least 1"
        )
    if batch_size % parts:
        nearest = max(1, round(batch_size / parts)) * parts
        split = f"{ranks} processes x {accumulate} accumulation steps"
        near = f"the nearest that does is {nearest}"
        raise BadInput(f"batch_size {batch_size} does not divide over {split}; {near}")


def check_nesting(groups: int, ranks: int) -> None:
    """BadInput unless a rank holds whole groups, or a group whole ranks."""
    if groups % ranks and ranks % groups:
        below = max(n for n in range(1, ranks) if groups % n == 0 or n % groups == 0)
        above = -(-ranks // groups) * groups
        raise BadInput(
            f"{groups} batch norm groups and {ranks} processes do not nest: a process must hold "
            f"whole groups, or a group whole processes; start {below} or {above} processes "
            "(--devices times --nodes)"
        )


def check_groups(groups: int | None, images: int) -> None:
    """Raise BadInput unless a forward pass's `images`, over all ranks, divide into the groups."""
    if groups is not None and (groups < 1 or images % groups):
        whole = f"the {images} images that a forward pass of all processes holds"
        change = "change method.groups, batch_size or accumulate"
        raise BadInput(f"{groups} batch norm groups do not divide {whole}; {change}")
