"""Finds images that two splits share: by pixels, or by looks where a lossy format changed those."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from backbench.images.image_list import ImageList

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS = 8  # an image's looks: the gray of 8 x 8 blocks, and its mean red, green and blue
MEAN_APART = 1.5  # of 255: a JPEG keeps the mean of a picture to about half of that
BLOCK_APART = 6.0
PIXEL_APART = 6.0  # mean over all pixels; JPEG at quality 75 loses about 3 to 5 of a photograph


@dataclass(frozen=True)
class Look:
    """One image: a digest of its pixels, its size and its looks (67,) float32."""

    pixels: str
    size: tuple[int, int]
    looks: NDArray[np.float32]


def look_at(pixels: NDArray[np.uint8]) -> Look:
    """Describe an image (H, W, 3)."""
    import cv2

    height, width = pixels.shape[:2]
    digest = hashlib.sha256(f"{height} {width} ".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    # INTER_AREA averages each channel over a block; OpenCV takes a tenth of numpy's time for both
    blocks = cv2.resize(pixels.astype(np.float32), (BLOCKS, BLOCKS), interpolation=cv2.INTER_AREA)
    looks = np.concatenate([cv2.mean(pixels)[:3], blocks.mean(2).ravel()]).astype(np.float32)
    return Look(digest.hexdigest(), (height, width), looks)


def rewritten(
    a: ImageList, looks_a: Sequence[Look | None], b: ImageList, looks_b: Sequence[Look | None]
) -> list[tuple[str, str]]:
    """Return pairs (path in a, path in b) of files in unlike formats that show the same picture
    with unequal pixels. `looks_x[i]` is of image i; None where it cannot be read."""
    from scipy.spatial import cKDTree

    there = [(j, look) for j, look in enumerate(looks_b) if look is not None]
    if not there:
        return []
    # 1. By the mean colour: three numbers find the few that may be the same among millions.
    tree = cKDTree(np.stack([look.looks[:3] for _, look in there]))
    out = []
    for i, look in enumerate(looks_a):
        if look is None:
            continue
        for n in tree.query_ball_point(look.looks[:3], MEAN_APART):
            j, other = there[n]
            if other.pixels == look.pixels or _format(a.paths[i]) == _format(b.paths[j]):
                continue
            # 2. By the blocks, and 3. by all pixels, read again.
            if other.size != look.size or np.abs(other.looks - look.looks).max() > BLOCK_APART:
                continue
            one, two = a.array(i).astype(np.float32), b.array(j).astype(np.float32)
            if np.abs(one - two).mean() <= PIXEL_APART:
                out.append((a.paths[i], b.paths[j]))
                break
    return out


def _format(path: str) -> str:
    """The format of an image file, by its name."""
    return PurePosixPath(path).suffix.lower().replace("jpeg", "jpg")
