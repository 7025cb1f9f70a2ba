"""Checks, by one system call per file, that all exist and no two splits share a name or content."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs.run_progress import QUIET_SECONDS, Progress

Sizes = Mapping[str, "array[int]"]  # by split, bytes of its images in their order
Sides = tuple[
    list[int], list[int]
]  # places in two lists of images that are alike so far
AT_ONCE = 1000  # files between two looks at the clock


def look(dataset: str, splits: Splits) -> Sizes:
    """The sizes of all files. Refuses a missing file, and one that is in two splits, by name."""
    total = sum(len(images) for _, images in splits.items())
    progress = Progress(
        None, total, f"{dataset}: looking for files", unit="file", after=QUIET_SECONDS
    )
    home: dict[
        object, str
    ] = {}  # inode, ctime and place -> the split that has the image
    sizes: dict[str, array[int]] = {}
    for name, images in splits.items():
        sizes[name] = array("q")
        for index, (path, stamp) in enumerate(zip(images.paths, images.stamps())):
            key = stamp[1:]
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
    """Refuse a test image whose content is also in train or val. Reads only files of equal size."""
    if any(isinstance(images, ArrayList) for _, images in splits.items()):
        return
    for other, images in (("train", splits.train), ("val", splits.val)):
        shared = shared_content(splits.test, sizes["test"], images, sizes[other])
        if shared:
            a, b = shared[0]
            more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            both = f"the test image {a} is also in training data as {b}{more}"
            raise BadInput(f"{dataset}: {both}; remove it from one")


def shared_content(
    a: ImageList, sizes_a: array[int], b: ImageList, sizes_b: array[int]
) -> list[tuple[str, str]]:
    """Pairs (path in a, path in b) of files with the same bytes."""
    # Three tests, each dearer than the one before and asked only of what that could not tell apart.
    # 1. Sizes are known. Those that only one of the lists has need no reading.
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
    for mine, others in alike.values():
        # 2. The first and last 4 KiB tell nearly all pictures apart, and 3. the whole content
        #    decides. Each file is read once for each, however many have its size.
        for near, far in _alike(a, mine, b, others, lambda images, i: images.ends(i)):
            for same, partners in _alike(
                a, near, b, far, lambda images, i: images.read(i)
            ):
                out += [(i, partners[0]) for i in same]  # one partner is enough
        progress.advance(len(mine) + len(others))
    return [(a.paths[i], b.paths[j]) for i, j in sorted(out)]


def _alike(
    a: ImageList,
    mine: list[int],
    b: ImageList,
    others: list[int],
    part: Callable[[ImageList, int], bytes],
) -> list[Sides]:
    """`mine` of a and `others` of b in groups of files with one `part`, where both sides have some."""
    groups: dict[bytes, Sides] = defaultdict(lambda: ([], []))
    for i in mine:
        groups[hashlib.sha256(part(a, i)).digest()][0].append(i)
    for j in others:
        groups[hashlib.sha256(part(b, j)).digest()][1].append(j)
    return [group for group in groups.values() if all(group)]
