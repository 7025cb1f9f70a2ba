"""Lists the files below a folder that others can write to, whatever its links and depths are."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def files(root: str | Path, *, follow: bool = False) -> Iterator[Path]:
    """Every file below `root`, as `names` has them."""
    return map(Path, names(root, follow=follow))


def names(
    root: str | Path,
    *,
    follow: bool = False,
    never_folders: Callable[[str], bool] = lambda _: False,
) -> Iterator[str]:
    """Yield every file below `root`, its name beginning with that; folders that cannot be listed
    are passed over. A folder whose name `never_folders` accepts is given too, for its reader to
    refuse. Links to folders are taken only with `follow`, and then each real folder once."""
    # A stack of our own: a path may have thousands of parts, more than Python goes deep
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
            if not folder_here or never_folders(entry.name):
                yield entry.path
