"""Lists the files below a folder that others can write to, whatever its links and depths are."""

import os
from collections.abc import Iterator
from pathlib import Path


def files(root: str | Path, *, follow: bool = False) -> Iterator[Path]:
    """Yield every file below `root`, in the order of `names`."""
    return map(Path, names(root, follow=follow))


def names(root: str | Path, *, follow: bool = False) -> Iterator[str]:
    """Yield the path of every file below `root`. Folders that cannot be listed are passed over.

    Links to folders are taken only with `follow`, and then each real folder once.
    """
    # With a stack instead of recursion: a path may have thousands of parts, more than Python's
    # recursion allows.
    left = [str(root)]
    seen: set[str] = set()
    while left:
        folder = left.pop()
        real = os.path.realpath(folder) if follow else folder
        if real in seen:
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError:
            continue
        for entry in found:
            try:
                folder_here = entry.is_dir(follow_symlinks=follow)
            except OSError:  # a link to itself
                folder_here = False
            if folder_here:
                left.append(entry.path)
            else:
                yield entry.path
