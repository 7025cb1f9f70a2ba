"""Names a list of images by its contents, at the cost of one stat per file and of reading SAMPLE
files. It sees another number, order, path or size of files, and other contents in a share f of them
with probability 1 - (1 - f)^SAMPLE: one half always, 5% in 96 of 100 cases."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs import atomic, seeding
from backbench.runs.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SAMPLE = 64  # files
# In a run's identity: the `sample` of each split; in a row's provenance: the `whole` of what was
# scored
KEY = "image_contents"
READERS = 8  # threads
_SIGNED = 2**63 - 1


@dataclass(frozen=True)
class Named:
    """A list's name, and what the same stats say of its files: one stat per file serves both."""

    digest: str
    inodes: Sequence[int] = field(default=(), repr=False)
    changed: Sequence[int] = field(default=(), repr=False)  # ctimes, ns


def named(images: ImageList) -> Named:
    """By paths, sizes and the contents of SAMPLE files; of an array, by all its pixels."""
    sha = hashlib.sha256("\n".join(images.paths).encode(errors="surrogateescape"))
    if isinstance(images, ArrayList):
        sha.update(images.pixels.tobytes())
        return Named(sha.hexdigest(), [0] * len(images), [0] * len(images))
    about = list(images.stamps())
    sha.update("".join(f"\n{each.size}" for each in about).encode())
    sha.update(sample(images).encode())
    inodes = [each.inode & _SIGNED for each in about]
    return Named(sha.hexdigest(), inodes, [each.changed for each in about])


def sample(images: ImageList) -> str:
    """16 hex digits of the contents of SAMPLE images, chosen by a seed."""
    images, sha = images.files, hashlib.sha256()
    for i in chosen(len(images), SAMPLE):
        with contextlib.suppress(BadInput):  # who needs it will say so
            sha.update(hashlib.sha256(images.read(i)).digest())
    return sha.hexdigest()[:16]


def whole(images: ImageList) -> str:
    """Return 16 hex digits of all images' contents, in order. Every file is read once; the result
    is cached by paths, sizes, inodes, ctime (which no program can set) and places in containers."""
    if isinstance(images, ArrayList):
        return hashlib.sha256(images.pixels.tobytes()).hexdigest()[:16]
    images = images.files
    # 1. The same files as before?
    about = hashlib.sha256()
    for path, stamp in zip(images.paths, images.stamps()):
        # Without the device, which has other numbers on other machines
        place = stamp.place[1:] if isinstance(stamp.place, tuple) else ""
        line = f"{path}\n{stamp.size} {stamp.inode} {stamp.changed}{place}\n"
        about.update(line.encode(errors="surrogateescape"))
    known = cache_folder() / "contents" / about.hexdigest()[:32]
    with contextlib.suppress(OSError):
        digest = known.read_text()
        if re.fullmatch("[0-9a-f]{16}", digest):
            return digest
    # 2. Each file's own digest, in the order of the list
    sha = hashlib.sha256()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for one in pool.map(
            lambda i: hashlib.sha256(images.read(i)).digest(), range(len(images))
        ):
            sha.update(one)
    digest = sha.hexdigest()[:16]
    with contextlib.suppress(OSError):  # what cannot be kept is read again
        atomic.write_text(known, digest)
    return digest


def of_splits(found: Iterable[tuple[str, ImageList]]) -> dict[str, str]:
    """By split, the `sample` of its images."""
    return {name: sample(images) for name, images in found}


def chosen(count: int, most: int) -> list[int]:
    """At most `most` of 0..count-1, the same ones every time, in order."""
    import torch

    order = torch.randperm(count, generator=seeding.generator(0, "contents", count))
    return sorted(order[:most].tolist())
