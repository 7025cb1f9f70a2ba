"""Finds images that two splits share: by pixels, or by looks where a lossy format changed those."""

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

BLOCKS = 8  # an image's looks: the mean colours of 8 x 8 blocks
MEAN_APART = 1.5  # of 255: a JPEG keeps the mean of a picture to about half of that
BLOCK_APART = 6.0  # of a block's gray
PIXEL_APART = (
    6.0  # mean over all pixels; JPEG at quality 75 loses about 3 to 5 of a photograph
)


class Look(NamedTuple):
    """One image: (width, height) and its looks, (8, 8, 3) bytes. Equal pixels have equal looks."""

    size: tuple[int, int]
    blocks: bytes


def look_at(image: Image.Image) -> Look:
    """Describe an RGB image."""
    # With the gap Pillow first means whole pixels, in one pass over them
    blocks = image.resize(
        (BLOCKS, BLOCKS), resample=4, reducing_gap=1.0
    )  # 4: Resampling.BOX
    return Look(image.size, blocks.tobytes())


def contents(
    seen: Mapping[str, tuple[ImageList, Sequence[Look | None]]],
) -> dict[str, dict[str, tuple[Look, bytes]]]:
    """Return, by split and path, what two images share only where all their pixels are equal.
    Images that look like another one are read again for it."""
    counts = Counter(look for _, looks in seen.values() for look in looks)
    out: dict[str, dict[str, tuple[Look, bytes]]] = {}
    for which, (images, looks) in seen.items():
        out[which] = {}
        for index, look in enumerate(looks):
            if look is None:
                continue
            with contextlib.suppress(BadInput):  # read a moment ago, so it is rare
                pixels = images.open(index).tobytes() if counts[look] > 1 else b""
                out[which][images.paths[index]] = look, hashlib.sha256(pixels).digest()
    return out


def rewritten(
    a: ImageList,
    looks_a: Sequence[Look | None],
    b: ImageList,
    looks_b: Sequence[Look | None],
) -> list[tuple[str, str]]:
    """Return pairs (path in a, path in b) of files in unlike formats that show the same picture
    with unequal pixels. `looks_x[i]` is of image i; None where it cannot be read."""
    from scipy.spatial import cKDTree

    known_a = [(i, look) for i, look in enumerate(looks_a) if look is not None]
    known_b = [(j, look) for j, look in enumerate(looks_b) if look is not None]
    if (
        not known_a
        or not known_b
        or len({*map(_format, a.paths), *map(_format, b.paths)}) < 2
    ):
        return []
    # 1. By the mean colour: three numbers find the few that may be the same among millions.
    blocks_a, blocks_b = _blocks(looks_a), _blocks(looks_b)
    tree = cKDTree(blocks_b.mean(1))
    out = []
    for (i, look), one in zip(known_a, blocks_a):
        for n in tree.query_ball_point(one.mean(0), MEAN_APART):
            j, other = known_b[n]
            if look.size != other.size or _format(a.paths[i]) == _format(b.paths[j]):
                continue
            # 2. By the blocks, and 3. by all pixels, read again.
            if np.abs(one.mean(1) - blocks_b[n].mean(1)).max() > BLOCK_APART:
                continue
            pixels, others = (
                a.array(i).astype(np.float32),
                b.array(j).astype(np.float32),
            )
            if 0 < np.abs(pixels - others).mean() <= PIXEL_APART:
                out.append((a.paths[i], b.paths[j]))
                break
    return out


def _blocks(looks: Sequence[Look | None]) -> NDArray[np.uint8]:
    """Stack the blocks of the images that could be read, (n, 64, 3)."""
    blocks = b"".join(look.blocks for look in looks if look is not None)
    return np.frombuffer(blocks, np.uint8).reshape(-1, BLOCKS * BLOCKS, 3)


def _format(path: str) -> str:
    """The format of an image file, by its name."""
    return PurePosixPath(path).suffix.lower().replace("jpeg", "jpg")
