"""Writes a dataset's images as tar files, zip files or class folders, byte for byte."""

import io
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from backbench.containers import finding, reading
from backbench.containers.container import SPLIT_WORDS
from backbench.datasets import catalog, outside, splits
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList
from backbench.runs import atomic, failures
from backbench.runs.run_progress import Progress
from backbench.untrusted import opening

LARGEST_FILE = opening.GIGABYTE  # bytes of images in one archive


def pack(name: str, root: Path, kind: str, out: Path) -> None:
    """Write each split to OUT, and compare its list with the source's.

    After a kill, the same command goes on at the first file that is not whole."""
    parts = dict(_sources(name, root))
    if not parts:
        raise BadInput(
            f"{root / name}: neither class folders nor containers; `data pack` is for those"
        )
    outside.refuse_inside(root, [name], out)
    _refuse_other_forms(out, parts, kind)
    for split, images in parts.items():
        if kind == "folder":
            _write_folder(out / split, images)
        else:
            # Files of an undivided dataset are called "images": its name may be a word for a split
            _write_archives(out, split or "images", images, kind)
    for split, images in parts.items():
        written = reading.read_split(out, split)
        # OUT may hold what was packed from an older state of the images
        same_list = splits.digest(written) == splits.digest(images)
        same_files = contents.named(written).digest == contents.named(images).digest
        if not same_list or not same_files:
            raise BadInput(
                f"{out}: '{split}' has other images than the source; empty the folder"
            )
        print(
            f"{name} {split or 'images'}: {len(written)} images in {out}, the same list"
        )


def _refuse_other_forms(out: Path, parts: Collection[str], kind: str) -> None:
    """Raise BadInput if OUT holds archives of another kind, or folders beside which archives would
    lie: a split would be there twice."""
    there = [
        file for other in {"tar", "zip"} - {kind} for file in out.glob(f"*.{other}")
    ]
    if kind != "folder":
        there += [out / split for split in parts if split and (out / split).is_dir()]
    if there:
        raise BadInput(
            f"{out}: holds '{min(there).name}', and '{kind}' would write the same images beside it;"
            " give another --out"
        )


def _sources(name: str, root: Path) -> Iterator[tuple[str, ImageList]]:
    """Yield (split, all its images); the split has no name where the dataset is not divided.

    Nothing is yielded for a dataset of another layout than class folders."""
    row = catalog.row(name)
    if row is not None and row.needs != ("train", "val"):
        return
    base = row.base(root) if row else root / name
    catalog.present(name, root)
    there = []
    for split in SPLIT_WORDS:
        if finding.find(base, split) or finding.split_folder(base, split).is_dir():
            there.append(split)
    for split in there:
        yield split, catalog.open_split(root, name, split)
    if not there:
        yield "", reading.read_split(base, "")


def _write_folder(folder: Path, images: ImageList) -> None:
    progress = Progress(None, len(images), f"{folder}: writing", unit="image")
    for index, path in enumerate(images.paths):
        file = folder / path
        data = images.read(index)
        if not file.is_file() or file.read_bytes() != data:
            failures.make_folder(file.parent)
            file.write_bytes(data)
        progress.advance()


def _write_archives(out: Path, word: str, images: ImageList, kind: str) -> None:
    """Write OUT/<word>-00000.tar and so on, each whole or not there."""
    progress = Progress(None, len(images), f"{out}: writing {word}", unit="image")
    # 1. Which images go into which file
    groups: list[range] = []
    begin = 0
    size = 0
    for index, stamp in enumerate(images.stamps()):
        if size and size + stamp.size > LARGEST_FILE:
            groups.append(range(begin, index))
            begin = index
            size = 0
        size += stamp.size
    groups.append(range(begin, len(images)))
    # 2. The files that an earlier run did not write
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
                info = zipfile.ZipInfo(images.paths[index])
                archive.writestr(info, images.read(index))
        return
    with tarfile.open(file, "w") as tar:
        for index in group:
            data = images.read(index)
            member = tarfile.TarInfo(images.paths[index])
            member.size = len(data)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(data))
