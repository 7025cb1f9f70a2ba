"""Writes which containers a row was measured on. The note decides no column."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.images.image_list import ImageList

if TYPE_CHECKING:
    from backbench.containers.spans import Mark

CONTAINER_KEY = "container"  # of a row's provenance


def container_provenance(
    splits: Iterable[tuple[str, ImageList]],
) -> dict[str, dict[str, dict[str, object]]]:
    """Return {"container": {split: kind, number of files, digest of their marks}}; empty where all
    splits are class folders."""
    from backbench.containers.spans import NamedImages, SpanList

    out: dict[str, dict[str, object]] = {}
    for name, images in splits:
        marks: tuple[Mark, ...] = ()
        if isinstance(images, SpanList):
            kind = images.kind
            marks = images.marks
        elif isinstance(images, NamedImages) and images.containers:
            kind = Path(next(iter(images.containers))).suffix[1:]
            marks = tuple(images.containers.values())
        if marks:
            index = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
            out[name] = {"kind": kind, "files": len(marks), "index": index}
    return {CONTAINER_KEY: out} if out else {}
