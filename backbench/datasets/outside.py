"""Keeps what a command writes out of the datasets that it reads.

A folder of runs among class folders would be a class the next time: runs hold pictures."""

from collections.abc import Iterable
from pathlib import Path

from backbench.containers.container import split_of
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images.file_names import passed_over
from backbench.images.folder_walk import subfolders
from backbench.runs.folder import RUN_FILE, cache_folder

# A folder of boxes or label maps holds one of these
_OF_BOXES = ("annotations", "ImageSets")


def refuse_inside(
    data: Path, names: Iterable[str], out: Path, *, root: Path | None = None
) -> None:
    """Refuse an --out that is --data itself, or that lies in one of its datasets, through links too.

    The cache of features must not lie in a dataset, either. Beside the datasets both may lie. `root`
    is the folder above where `data` is the one dataset."""
    if out.resolve() == data.resolve():
        raise BadInput(
            f"--out {out}: is --data itself, so what is written there would be read as data; give"
            " another folder"
        )
    root = root or data
    folders = _folders_of(names, root)
    # A dataset of another name, which some later command will read
    for above in (out.resolve(), *out.resolve().parents):
        if above.parent == root.resolve() and above.is_dir() and _is_dataset(above):
            folders.append(above)
    for folder in folders:
        images = folder.resolve()
        if out.resolve().is_relative_to(images):
            raise BadInput(
                f"--out {out}: lies in the dataset {folder}, so what is written there would be read"
                f" as its data; give a folder outside of it, as {folder.parent / 'runs'}"
            )
        cache = cache_folder().resolve()
        in_dataset = cache.is_relative_to(images)
        # A hidden folder, as the default ~/.cache, is never read as a class
        if in_dataset and not passed_over(cache.relative_to(images).as_posix()):
            raise BadInput(
                f"BACKBENCH_CACHE={cache}: lies in the dataset {folder}, so what is written there"
                " would be read as its data; set it to a folder outside of it, as"
                f" {folder.parent / 'cache'}"
            )


def _folders_of(names: Iterable[str], root: Path) -> list[Path]:
    """List where the datasets of these names lie."""
    folders = []
    for name in names:
        folders.append(root / name)
        row = catalog.row(name)
        if row is None or not row.needs:
            continue
        try:
            folders.append(row.base(root))
        except BadInput:  # it is not there, which others refuse
            continue
    return folders


def _is_dataset(folder: Path) -> bool:
    """Return True if a folder that nobody named looks like a dataset, and not like one of runs."""
    inside = subfolders(folder)
    if any((folder / name / RUN_FILE).exists() for name in inside):
        return False
    if any(name in _OF_BOXES for name in inside):
        return True
    divided = [folder / name for name in inside if split_of(name) is not None]
    return any(
        len(subfolders(part)) > 1 and catalog.all_hold_images(part)
        for part in (folder, *divided)
    )
