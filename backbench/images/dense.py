"""Images with a label map each: lists of pairs, and how a map is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from backbench.errors import BadInput
from backbench.images.image_list import ImageList, readable, taken

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

IGNORED = 255  # in a label map as the suite uses it: pixels that are neither trained on nor scored


@dataclass(frozen=True)
class DenseList(ImageList):
    """Images whose labels are maps: `maps` are PNG files below `root`, one per image. `values`:
    pixel value -> class or IGNORED, any other is refused. `labels` are all 0."""

    maps: tuple[str, ...]
    values: Mapping[int, int]

    def subset(self, indices: Sequence[int]) -> Self:
        return dataclasses.replace(
            super().subset(indices), maps=taken(self.maps, indices)
        )

    @property
    def files(self) -> ImageList:
        both = (*self.paths, *self.maps)
        return ImageList(self.root, both, (0,) * len(both), self.classes)

    def label_map(self, index: int) -> np.ndarray:
        """Return uint8 (H, W): a class or IGNORED. BadInput for a bad file or unknown value."""
        import numpy as np
        from PIL import Image

        path = self.root / self.maps[index]
        with readable(path) as file:
            image = Image.open(file, formats=("PNG",))
            # A palette's indices are the labels: its colours would lose the 255
            mode, pixels = image.mode, np.asarray(image)
        if mode not in ("P", "L"):
            raise BadInput(
                f"{path}: a label map is a PNG of 8-bit indices, this one is {mode}"
            )
        table = np.full(256, -1)
        table[list(self.values)] = list(self.values.values())
        classes = table[pixels]
        if (classes < 0).any():
            value = int(pixels[classes < 0][0])
            raise BadInput(
                f"{path}: label {value} is none of this data set's; is it another map?"
            )
        return classes.astype(np.uint8)

    def pair(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Image `index` as PIL RGB, and its label map; BadInput where they differ in size."""
        picture, classes = self.open(index), self.label_map(index)
        if picture.size != classes.shape[::-1]:
            raise BadInput(
                f"{self.root / self.maps[index]}: {classes.shape[1]} x {classes.shape[0]} pixels,"
                f" its image {self.paths[index]} has {picture.width} x {picture.height}"
            )
        return picture, classes
