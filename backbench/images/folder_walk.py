"""Walks through class folders: links to folders are followed, and each real folder counts once.

What cannot be followed is refused. A disk that is away, or a link to another class, would otherwise
change the list of images without a word."""

import operator
import os
from collections.abc import Iterator
from pathlib import Path

from backbench.errors import BadInput
from backbench.images.file_names import (
    is_image,
    is_image_name,
    name_passed_over,
    passed_over,
    refuse_run,
)
from backbench.untrusted import printable


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in a folder, linked ones too, without those passed over."""
    out = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not passed_over(entry.name) and is_folder(entry):
                out.append(entry.name)
    return sorted(out)


def refuse_broken_links(folder: Path) -> None:
    """Refuse a folder with a link that leads nowhere: it may have been a class or a split.

    Links named as images are left to whoever looks for all images."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            skipped = passed_over(entry.name) or is_image(entry.name)
            if entry.is_symlink() and not skipped:
                _refuse_broken(entry.path)


# A path below the root, and whether its name is that of an image
Found = tuple[str, bool]
_name_of = operator.attrgetter("name")


class ClassWalk:
    """Lists the files of the classes in one folder, first below real folders, then behind links."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # Where the path below the root begins. Texts, not Paths: a Path for each of a million files
        # takes ten times as long
        self._begin = len(os.path.join(root, ""))  # noqa: PTH118
        # Device and inode of each folder -> the class that it was listed for
        self._class_of: dict[tuple[int, int], str] = {}
        self._links: list[tuple[str, str]] = []  # class, path of a link to a folder

    def files(self, name: str) -> Iterator[Found]:
        """Yield every file of a class that is not behind a link."""
        return self._below(os.path.join(self._root, name), name)  # noqa: PTH118

    def linked_files(self) -> Iterator[tuple[str, Found]]:
        """Yield (class, file) of every file behind links, when all classes have been listed.

        A link to a folder that the same class has already adds nothing."""
        while self._links:
            # Sorted, so that of two links to one folder the same one is taken everywhere
            self._links.sort(reverse=True)
            name, link = self._links.pop()
            for found in self._below(link, name):
                yield name, found

    def _below(self, top: str, name: str) -> Iterator[Found]:
        # With a stack instead of recursion: a path may have thousands of parts
        left = [top]
        while left:
            folder = left.pop()
            if not self._claim(folder, name):
                continue
            below_root = folder[self._begin :]
            # A million times over: most entries are plain files with an image's name
            others = []
            for entry in _listed(folder):
                if is_image_name(entry.name) and entry.is_file(follow_symlinks=False):
                    yield f"{below_root}/{entry.name}", True
                elif not name_passed_over(entry.name):
                    others.append(entry)
            # Sorted, so that of two that are wrong the same one is named everywhere
            for entry in sorted(others, key=_name_of):
                image = is_image_name(entry.name)
                if entry.is_symlink() and not image:
                    _refuse_broken(entry.path)
                    if is_folder(entry):
                        self._links.append((name, entry.path))
                        continue
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                    if not image:
                        continue
                if not image:
                    refuse_run(entry.path, entry.name)
                # A folder called as an image is yielded, too, so that its reader refuses it
                yield f"{below_root}/{entry.name}", image

    def _claim(self, folder: str, name: str) -> bool:
        """Note which class a folder is of; False where that class has it already."""
        try:
            about = os.stat(folder)  # noqa: PTH116
        except OSError as error:
            raise _unlisted(folder, error) from None
        identity = (about.st_dev, about.st_ino)
        owner = self._class_of.get(identity)
        if owner is not None and owner != name:
            raise BadInput(
                f"{printable.shown(folder, 300)}: is, through a link, a folder of the class"
                f" '{printable.shown(owner, 80)}', too; an image has one class, so remove the link"
            )
        self._class_of[identity] = name
        return owner is None


def _listed(folder: str) -> list[os.DirEntry[str]]:
    """List a folder, in the order of its file system."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unlisted(folder, error) from None


def _unlisted(folder: str, error: OSError) -> BadInput:
    shown = printable.shown(folder, 300)
    return BadInput(
        f"{shown}: this folder cannot be listed ({error.strerror}); make it readable, or move it"
        " out of the images"
    )


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder and for a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _refuse_broken(link: str) -> None:
    """Refuse a link that leads nowhere."""
    if not os.path.exists(link):  # noqa: PTH110
        target = printable.shown(os.readlink(link), 200)  # noqa: PTH115
        raise BadInput(
            f"{printable.shown(link, 300)}: is a link to {target}, which is not there; bring that"
            " back, or remove the link"
        )
