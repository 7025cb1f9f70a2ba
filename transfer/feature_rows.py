"""Features that lie in several files, as one table: ImageNet's train and val would be 10 GB again as
a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureRows:
    """(N, D) rows: those of the first part (n_0, D), then of the second (n_1, D), ...; never
    copied as a whole."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, index: Tensor) -> Tensor:
        """The rows at `index` (n,), in that order: (n, D)."""
        if len(self.parts) == 1:
            return self.parts[0][index]
        first = self.parts[0]
        out = first.new_empty(len(index), first.shape[1])
        begin, found = 0, 0
        for part in self.parts:
            # Part p holds rows begin_p .. begin_p + n_p - 1 of the table
            (here,) = torch.where((index >= begin) & (index < begin + len(part)))
            out[here] = part[index[here] - begin]
            begin, found = begin + len(part), found + len(here)
        if found != len(index):
            raise IndexError(f"a row outside 0..{len(self) - 1}")
        return out

    def split(self, rows: int) -> Iterator[Tensor]:
        """All rows in order, at most `rows` at a time, as views."""
        for part in self.parts:
            yield from part.split(rows)
