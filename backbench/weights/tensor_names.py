"""Names of tensors: what a wrapper put before them, which ones count batches, how they are printed."""

from __future__ import annotations

import re
from collections.abc import Iterable


def is_counter(name: str) -> bool:
    """True for a batch norm's number of batches, which nothing is computed from."""
    return name.endswith("num_batches_tracked")


def is_statistic(name: str) -> bool:
    """True for a batch norm's running mean or variance."""
    return name.endswith(("running_mean", "running_var"))


def unwrapped(key: str) -> str:
    """The key without what DistributedDataParallel and torch.compile put before it."""
    return re.sub(r"^((module|_orig_mod)\.)+", "", key)


def shown(text: str) -> str:
    """A stranger's text for the terminal: printable, and not longer than a line."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 160 else f"{text[:150]}..."


def first_names(items: Iterable[str], count: int = 3) -> str:
    """'a, b, c and 7 more'"""
    listed = [shown(item) for item in items]
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
