"""Writes a dataset's images as tar files, zip files or class folders, byte for byte."""

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from backbench.containers import containers
from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList
from backbench.runs import atomic
from backbench.runs.run_progress import Progress
from backbench.untrusted import opening

LARGEST_FILE = opening.GIGABYTE  # bytes of images in one archive


def pack(name: str, root: Path, kind: str, out: Path) -> None:
    """Write each split and compare its list with the source's. After a kill, the same command goes
    on at the first file that is not whole."""
    parts = dict(_sources(name, root))
    if not parts:
        raise BadInput(
            f"{root / name}: neither class folders nor containers; `data pack` is for those"
        )
    if out.resolve() == (root / name).resolve():
        raise BadInput(f"--out {out}: is the dataset itself; name another folder")
    for split, images in parts.items():
        word = (
            split or "images"
        )  # the name of an undivided set may be a word for a split
        if kind == "folder":
            _write_folder(out / split, images)
        else:
            _write_archives(out, word, images, kind)
    for split, images in parts.items():
        written = containers.read_split(out, split)
        # OUT may hold what was packed from an older state of the images
        same = splits.digest(written) == splits.digest(images)
        if not same or contents.named(written).digest != contents.named(images).digest:
            raise BadInput(
                f"{out}: '{split}' has other images than the source; empty the folder"
            )
        print(
            f"{name} {split or 'images'}: {len(written)} images in {out}, the same list"
        )


def _sources(name: str, root: Path) -> Iterator[tuple[str, ImageList]]:
    """(split, all its images); one of no name where the dataset is not divided."""
    row = catalog.row(name)
    if row is not None and row.needs != ("train", "val"):
        return
    base = row.base(root) if row else root / name
    catalog.present(name, root)
    there = [
        s for s in containers.WORDS if containers.find(base, s) or (base / s).is_dir()
    ]
    for split in there:
        yield split, catalog.open_split(root, name, split)
    if not there:
        yield "", containers.read_split(base, "")


def _write_folder(folder: Path, images: ImageList) -> None:
    progress = Progress(None, len(images), f"{folder}: writing", unit="image")
    for index, path in enumerate(images.paths):
        file, data = folder / path, images.read(index)
        if not file.is_file() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        progress.advance()


def _write_archives(out: Path, word: str, images: ImageList, kind: str) -> None:
    """OUT/<word>-00000.tar and so on, each whole or not there."""
    progress = Progress(None, len(images), f"{out}: writing {word}", unit="image")
    begin, size = 0, 0
    groups: list[range] = []
    for index, stamp in enumerate(images.stamps()):
        if size and size + stamp.size > LARGEST_FILE:
            groups.append(range(begin, index))
            begin, size = index, 0
        size += stamp.size
    groups.append(range(begin, len(images)))
    for number, group in enumerate(groups):
        file = out / f"{word}-{number:05}.{kind}"
        if not file.exists():
            with atomic.atomic_path(file) as temporary:
                _write_archive(temporary, images, group, kind)
        progress.advance(len(group))


def _write_archive(file: Path, images: ImageList, group: range, kind: str) -> None:
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for index in group:
                archive.writestr(
                    zipfile.ZipInfo(images.paths[index]), images.read(index)
                )
        return
    with tarfile.open(file, "w") as tar:
        for index in group:
            data = images.read(index)
            member = tarfile.TarInfo(images.paths[index])
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
