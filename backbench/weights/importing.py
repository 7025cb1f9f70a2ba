"""Published checkpoint formats -> Checkpoint: what a file, or a name of timm's, becomes (`found` says
how)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backbench.errors import BadInput
from backbench.weights import archs, timm_weights
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.checkpoint_contents import Found
from backbench.weights.header import FORMAT
from backbench.weights.sidecar_metadata import Told, on_the_command_line
from backbench.weights.weight_file import open_file


def read(
    path: str | Path,
    *,
    encoder: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    name: str | None = None,
    published: str | Sequence[str] | None = None,
    stem: str | None = None,
    allow_missing_statistics: bool = False,
    arch: str | None = None,
    reading: str | None = None,
    pixels: str | None = None,
    pos: str | None = None,
) -> Checkpoint:
    """Open a Checkpoint file or any published format (docs/checkpoints.md). Nothing in the file is
    executed.

    `encoder` chooses among several trunks and `stem` among the paddings of a 3x3 first convolution;
    `arch`, `reading`, `pixels` (`told.PIXELS`) and `pos` say what no file of a vision transformer
    does; `method`, `epochs`, `name` and `published` override or add what the file tells. Raises
    BadInput that names the tensor, key or prefix for anything that is not exactly one whole trunk.
    """
    told = on_the_command_line(arch, reading, pixels, pos)
    if timm_weights.is_name(path):
        if encoder is not None or stem is not None or arch:
            raise BadInput(f"{path}: names one trunk; leave out the choice of encoder, stem, arch")
        drawn = timm_weights.random(path, told)
        if drawn is not None:
            return _renamed(drawn, method, epochs, name, published)
        name = name or timm_weights.name_of(path)
        path, told = timm_weights.cached(path, told)
    opened = open_file(path)
    if opened.metadata.get("format") == FORMAT:
        if encoder is not None or stem is not None or arch or pixels:
            raise BadInput(
                f"{path}: a backbench checkpoint holds one trunk; leave out the choice of encoder,"
                " stem, arch and pixels"
            )
        checkpoint = _retold(Checkpoint.load(path), told)
    else:
        found = Found(opened, told)
        checkpoint = found.checkpoint(found.choose(encoder), stem, allow_missing_statistics)
    return _renamed(checkpoint, method, epochs, name, published)


def _renamed(
    checkpoint: Checkpoint,
    method: str | None,
    epochs: int | None,
    name: str | None,
    published: str | Sequence[str] | None,
) -> Checkpoint:
    """With what was said instead of what the file tells."""
    if method is not None:
        checkpoint = checkpoint.replace(method=method)
    if epochs is not None:
        checkpoint = checkpoint.replace(epochs=epochs)
    keys = published if published is None or isinstance(published, str) else list(published)
    for key, value in (("name", name), ("published", keys)):
        if value is not None:
            checkpoint = checkpoint.replace(provenance={**checkpoint.provenance, key: value})
    return checkpoint


def _retold(checkpoint: Checkpoint, told: Told) -> Checkpoint:
    """Our own checkpoint, read otherwise or at other sizes: another row."""
    if told.reading:
        checkpoint = checkpoint.replace(reading=told.reading)
    if told.options:
        checkpoint = checkpoint.replace(arch=archs.with_options(checkpoint.arch, told.options))
    return checkpoint
