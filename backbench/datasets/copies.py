"""Finds images that two splits share: by pixels, or by looks where a lossy format changed those.

An image's look is the mean colours of 8 x 8 blocks: a few bytes that every reading keeps, by which
the few images are found that must be compared pixel by pixel."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backbench.errors import BadInput
from backbench.images.image_list import ImageList

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

BLOCKS = 8  # in a row, and in a column
# Two images are no copies of each other if they are further apart than this, of 255 levels,
MEAN_APART = 1.5  # in their mean colour: a JPEG keeps it to about half of that
BLOCK_APART = 6.0  # in the gray of a block
PIXEL_APART = 6.0  # in the mean over all pixels: JPEG at quality 75 loses about 3 to 5


class Look(NamedTuple):
    """One image's (width, height) and blocks, (8, 8, 3) bytes. Equal pixels have equal looks."""

    size: tuple[int, int]
    blocks: bytes


def look_at(image: Image.Image) -> Look:
    """Return the look of an RGB image."""
    from PIL.Image import Resampling

    # By the gap, Pillow averages whole pixels first, in one pass over them
    blocks = image.resize((BLOCKS, BLOCKS), resample=Resampling.BOX, reducing_gap=1.0)
    return Look(image.size, blocks.tobytes())


def contents(
    seen: Mapping[str, tuple[ImageList, Sequence[Look | None]]],
) -> dict[str, dict[str, tuple[Look, bytes]]]:
    """Return, by split and path, a value that two images share only if all their pixels are equal.

    `seen` has each split's images and their looks. An image whose look no other has is told apart
    by it alone; the others are read again."""
    counts = Counter(look for _, looks in seen.values() for look in looks)
    out: dict[str, dict[str, tuple[Look, bytes]]] = {}
    for which, (images, looks) in seen.items():
        out[which] = {}
        for index, look in enumerate(looks):
            if look is None:
                continue
            # The image was read a moment ago; in the rare case that it is gone, it is left out
            with contextlib.suppress(BadInput):
                pixels = images.open(index).tobytes() if counts[look] > 1 else b""
                out[which][images.paths[index]] = look, hashlib.sha256(pixels).digest()
    return out


def rewritten(
    a: ImageList,
    looks_a: Sequence[Look | None],
    b: ImageList,
    looks_b: Sequence[Look | None],
) -> list[tuple[str, str]]:
    """Return pairs (path in a, path in b) of files that show one picture with unequal pixels.

    Such files have unlike formats: a lossy one rewrote the other. `looks_x[i]` is of image i; None
    where it cannot be read."""
    from scipy.spatial import cKDTree

    known_a = [(i, look) for i, look in enumerate(looks_a) if look is not None]
    known_b = [(j, look) for j, look in enumerate(looks_b) if look is not None]
    formats = {_format(path) for path in (*a.paths, *b.paths)}
    if not known_a or not known_b or len(formats) < 2:
        return []
    # 1. By the mean colour: three numbers find the few that may be the same among millions
    blocks_a = _blocks(known_a)
    blocks_b = _blocks(known_b)
    tree = cKDTree(blocks_b.mean(1))
    out = []
    for (i, look), own in zip(known_a, blocks_a):
        for n in tree.query_ball_point(own.mean(0), MEAN_APART):
            j, other = known_b[n]
            if look.size != other.size or _format(a.paths[i]) == _format(b.paths[j]):
                continue
            # 2. By the gray of the blocks
            if np.abs(own.mean(1) - blocks_b[n].mean(1)).max() > BLOCK_APART:
                continue
            # 3. By all pixels, read again
            pixels = a.array(i).astype(np.float32)
            others = b.array(j).astype(np.float32)
            if 0 < np.abs(pixels - others).mean() <= PIXEL_APART:
                out.append((a.paths[i], b.paths[j]))
                break
    return out


def _blocks(known: Sequence[tuple[int, Look]]) -> NDArray[np.uint8]:
    """Stack the blocks of n looks: (n, 64, 3)."""
    blocks = b"".join(look.blocks for _, look in known)
    return np.frombuffer(blocks, np.uint8).reshape(-1, BLOCKS * BLOCKS, 3)


def _format(path: str) -> str:
    """Return the format of an image file, by its name."""
    return PurePosixPath(path).suffix.lower().replace("jpeg", "jpg")
