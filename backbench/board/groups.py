"""Which rows can be compared at all: those that common columns connect, directly or in a chain."""

import numpy as np


def connected(values: np.ndarray) -> list[list[int]]:
    """Return the groups of rows that common columns connect; the largest group comes first.

    `values` (rows, columns) are nan where nothing was measured. A row without a number is in no
    group."""
    there = ~np.isnan(values)
    left = np.flatnonzero(there.any(1))
    found = []
    while len(left):
        # The columns of the group grow until no other row has one of them
        columns = there[left[0]]
        joined = there[left][:, columns].any(1)
        grown = there[left[joined]].any(0)
        while (grown != columns).any():
            columns = grown
            joined = there[left][:, columns].any(1)
            grown = there[left[joined]].any(0)
        found.append([int(row) for row in left[joined]])
        left = left[~joined]
    # Of groups of one size, the one with more numbers comes first
    return sorted(found, key=lambda group: (-len(group), -int(there[group].sum())))


def meetings(values: np.ndarray) -> np.ndarray:
    """Return (rows, rows): True where two rows have a column in common."""
    there = (~np.isnan(values)).astype(np.float32)
    return there @ there.T > 0
