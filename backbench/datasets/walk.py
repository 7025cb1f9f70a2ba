"""Checks that all files of a dataset exist, and that no two splits share a file or an image.

This costs one system call per file; contents are read only of files of equal size."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs.run_progress import QUIET_SECONDS, Progress

# By split: the bytes of its images, in their order
Sizes = Mapping[str, "array[int]"]
# Indices in two lists, of images that are alike so far
Sides = tuple[list[int], list[int]]
AT_ONCE = 1000  # files between two looks at the clock


def look(dataset: str, splits: Splits) -> Sizes:
    """Return the sizes of all files. BadInput names a missing file, and one that is in two splits."""
    total = sum(len(images) for _, images in splits.items())
    progress = Progress(
        None, total, f"{dataset}: looking for files", unit="file", after=QUIET_SECONDS
    )
    # Inode, ctime and place -> the split that has the image
    home: dict[object, str] = {}
    sizes: dict[str, array[int]] = {}
    for name, images in splits.items():
        sizes[name] = array("q")
        for index, (path, stamp) in enumerate(zip(images.paths, images.stamps())):
            key = (stamp.inode, stamp.changed, stamp.place)
            if home.setdefault(key, name) != name:
                raise BadInput(
                    f"{dataset}: {path} is in {home[key]} and in {name}; remove it from one of them"
                )
            sizes[name].append(stamp.size)
            if index % AT_ONCE == AT_ONCE - 1:
                progress.advance(AT_ONCE)
        progress.advance(len(images) % AT_ONCE)
    return sizes


def refuse_shared(dataset: str, splits: Splits, sizes: Sizes) -> None:
    """Refuse a test image whose content is also in train or val."""
    if any(isinstance(images, ArrayList) for _, images in splits.items()):
        return
    for other, images in (("train", splits.train), ("val", splits.val)):
        shared = shared_content(splits.test, sizes["test"], images, sizes[other])
        if shared:
            tested, trained = shared[0]
            more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            raise BadInput(
                f"{dataset}: the test image {tested} is also in training data as {trained}{more};"
                " remove it from one"
            )


def shared_content(
    a: ImageList, sizes_a: array[int], b: ImageList, sizes_b: array[int]
) -> list[tuple[str, str]]:
    """Return pairs (path in a, path in b) of files with the same bytes.

    There are three tests, each dearer than the one before, and made only of files that the one
    before could not tell apart."""
    # 1. Sizes are known, so a file needs no reading if its size is in one of the lists only
    alike: dict[int, Sides] = {size: ([], []) for size in set(sizes_a) & set(sizes_b)}
    for side, sizes in enumerate((sizes_a, sizes_b)):
        for index, size in enumerate(sizes):
            if size in alike:
                alike[size][side].append(index)
    total = sum(len(mine) + len(others) for mine, others in alike.values())
    progress = Progress(
        None,
        total,
        f"{a.root}: comparing files of equal size",
        unit="file",
        after=QUIET_SECONDS,
    )
    out: list[tuple[int, int]] = []
    for sides in alike.values():
        # 2. The first and last 4 KiB tell nearly all pictures apart
        for equal_ends in _grouped(a, b, sides, lambda images, i: images.ends(i)):
            # 3. The whole content decides
            for in_a, in_b in _grouped(
                a, b, equal_ends, lambda images, i: images.read(i)
            ):
                # One partner is enough to name
                out += [(i, in_b[0]) for i in in_a]
        progress.advance(len(sides[0]) + len(sides[1]))
    return [(a.paths[i], b.paths[j]) for i, j in sorted(out)]


def _grouped(
    a: ImageList, b: ImageList, sides: Sides, part: Callable[[ImageList, int], bytes]
) -> list[Sides]:
    """Group images of a and of b by their `part`; keep the groups with images of both."""
    groups: dict[bytes, Sides] = defaultdict(lambda: ([], []))
    for side, (images, indices) in enumerate(zip((a, b), sides)):
        for index in indices:
            digest = hashlib.sha256(part(images, index)).digest()
            groups[digest][side].append(index)
    return [group for group in groups.values() if all(group)]
