"""Lists of images with a label map each, and how a map is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from backbench.errors import BadInput
from backbench.images.decoding import readable
from backbench.images.image_list import ImageList, taken

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

IGNORED = 255  # in a label map as the suite uses it: pixels that are neither trained on nor scored


@dataclass(frozen=True)
class DenseList(ImageList):
    """Images whose labels are maps. `labels` are all 0."""

    maps: tuple[str, ...]  # PNG files below `root`, one per image
    values: Mapping[int, int]  # pixel value -> class or IGNORED; any other is refused

    def subset(self, indices: Sequence[int]) -> Self:
        return dataclasses.replace(
            super().subset(indices), maps=taken(self.maps, indices)
        )

    @property
    def files(self) -> ImageList:
        """The images and their maps, as one list."""
        both = (*self.paths, *self.maps)
        return ImageList(self.root, both, (0,) * len(both), self.classes)

    def label_map(self, index: int) -> np.ndarray:
        """Return map `index`, uint8 (H, W): a class or IGNORED of each pixel.

        BadInput names a file that is no such map, and a value that is none of `values`."""
        import numpy as np
        from PIL import Image

        path = self.root / self.maps[index]
        with readable(path) as file:
            image = Image.open(file, formats=("PNG",))
            mode = image.mode
            # The indices of a palette are the labels; converted to colours, they would be lost
            pixels = np.asarray(image)
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
        """Return image `index` as PIL RGB, and its label map; BadInput where they differ in size."""
        picture = self.open(index)
        classes = self.label_map(index)
        if picture.size != classes.shape[::-1]:
            raise BadInput(
                f"{self.root / self.maps[index]}: {classes.shape[1]} x {classes.shape[0]} pixels,"
                f" its image {self.paths[index]} has {picture.width} x {picture.height}"
            )
        return picture, classes
