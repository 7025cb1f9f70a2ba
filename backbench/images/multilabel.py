"""Lists of images that show objects of several classes each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from backbench.images.image_list import ImageList, taken

if TYPE_CHECKING:
    import numpy as np

# What a label table says of a class in an image
ABSENT = 0
PRESENT = 1
IGNORED = 2  # neither trained on nor scored: all of its objects there are difficult


@dataclass(frozen=True)
class MultiLabelList(ImageList):
    """Images with the classes that each shows. `labels` are all 0."""

    marks: tuple[str, ...]  # of each image, as `mark` writes them

    def subset(self, indices: Iterable[int]) -> Self:
        chosen = list(indices)
        return dataclasses.replace(
            super().subset(chosen), marks=taken(self.marks, chosen)
        )

    def table(self) -> np.ndarray:
        """Return ABSENT, PRESENT or IGNORED of each image and class, uint8 (N, C)."""
        return table_of(self.marks, len(self.classes))


def mark(present: Iterable[int], ignored: Iterable[int] = ()) -> str:
    """Write the classes of an image: `0,7` shows both; `0,7?` has only difficult objects of 7."""
    words = {label: f"{label}?" for label in ignored} | {
        label: str(label) for label in present
    }
    return ",".join(words[label] for label in sorted(words))


def table_of(marks: Iterable[str], classes: int) -> np.ndarray:
    """Read marks into a table (N, C). ValueError or IndexError for what `mark` does not write."""
    import numpy as np

    rows = []
    for text in marks:
        row = np.zeros(classes, np.uint8)
        for word in filter(None, text.split(",")):
            label = int(word.removesuffix("?"))
            row[label] = IGNORED if word.endswith("?") else PRESENT
        rows.append(row)
    return np.array(rows, np.uint8).reshape(-1, classes)
