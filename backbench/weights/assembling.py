"""Makes a Checkpoint of a trunk that lies whole in a file, with everything that the file tells of it."""

from collections.abc import Mapping

import torch

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.checkpoint import (
    PIXELS_FROM,
    Checkpoint,
    assumed_pixels,
    from_about,
)
from backbench.weights.family import TrunkInFile
from backbench.weights.file_contents import IN_IMPORT, FileContents
from backbench.weights.leftovers import heads
from backbench.weights.tensor_names import is_statistic
from backbench.weights.wholeness import missing_statistics, refuse_unless_whole

PIXEL_CHOICES = ("imagenet", "half", "clip")  # what --pixels takes


def checkpoint(
    contents: FileContents,
    trunk: TrunkInFile,
    stem: str | None = None,
    allow_missing_statistics: bool = False,
    *,
    copy: bool = True,
) -> Checkpoint:
    """Return the whole trunk as a Checkpoint. BadInput names the first tensors that do not fit.

    With `copy` False the heads are left out, and the tensors may still be the file's own memory.
    """
    # 1. The trunk is whole, and everything is known that its tensors do not tell
    with contents.refusals():
        refuse_unless_whole(contents, trunk, allow_missing_statistics)
        stem = _known_stem(trunk, stem)
        pixels = _known_pixels(trunk)
    # 2. Where it comes from
    encoder = next(
        name for name, trunks in contents.encoders.items() if trunk in trunks
    )
    provenance = {
        "name": contents.path.name.split(".")[0],
        "source": contents.path.name,
        "sha256": contents.opened.sha256,
        "format": contents.form.name if contents.form else "unrecognised",
        "encoder": encoder,
        "prefix": f"{trunk.table}:{trunk.prefix}" if trunk.table else trunk.prefix,
    }
    format_is_known = contents.form is not None and contents.form.method != "unknown"
    if trunk.metadata.pixels is None and not format_is_known:
        provenance[PIXELS_FROM] = assumed_pixels(trunk.arch, pixels, "the file")
    # 3. Its tensors
    tensors = trunk.assembled(contents.tables[trunk.table])
    if copy and contents.opened.container == "torch zip":
        # Only a torch zip is mapped: its tensors would change with the file.
        tensors = {ours: tensor.clone() for ours, tensor in tensors.items()}
    if missing_statistics(trunk) == "all":
        # These are the values of a batch norm before its first batch.
        provenance["statistics"] = "missing in the file: mean 0 and variance 1"
        for key, shape in trunk.shapes().items():
            if is_statistic(key):
                value = 1.0 if key.endswith("var") else 0.0
                tensors[key] = torch.full(shape, value)
    # 4. A file that `exporting.write_detectron2` wrote holds everything about its checkpoint
    own = contents.at_top("backbench")
    is_detectron2 = contents.form is not None and contents.form.name == "detectron2"
    if isinstance(own, Mapping) and is_detectron2:
        # A ResNet's metadata is what the user has typed
        if trunk.metadata.pixels is not None:
            raise BadInput(
                f"{contents.path}: `backbench export` has written its pixels into it; leave out the"
                " choice of pixels"
            )
        if "name" not in own:
            raise BadInput(
                f"{contents.path}: its header is incomplete (KeyError('name'))"
            )
        written = from_about(
            contents.path, {**own, "arch": trunk.arch}, state_dict=tensors
        )
        named = {**written.provenance, "name": own["name"]}
        return written.replace(provenance=named)
    return Checkpoint(
        arch=trunk.arch,
        stem=stem,
        method=contents.form.method if contents.form else "unknown",
        epochs=_epochs(contents),
        reading=trunk.reading(),
        state_dict=tensors,
        heads=heads(contents, trunk) if copy else {},
        pixels=pixels,
        provenance=provenance | trunk.provenance(),
    )


def _epochs(contents: FileContents) -> int | None:
    """Return how many epochs were finished; None where the file does not tell."""
    if contents.form is None:
        return None
    key, add = contents.form.epoch
    value = contents.tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    # True is an int in Python, but no count.
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    finished = value + add
    return finished if 0 < finished < 100_000 else None


def _known_stem(trunk: TrunkInFile, wanted: str | None) -> str:
    """Return the trunk's stem. If neither file nor `wanted` tells it, BadInput names the option."""
    stem = trunk.stem(wanted)
    if stem is None:
        raise BadInput(
            "the first convolution is 3x3 and the file does not tell its padding; choose --stem conv3"
            " (padding 1: SimCLR, CLLR), conv3_p0 (MIO) or conv3_p2 (ARB, solo-learn)"
            f" {IN_IMPORT}"
        )
    return stem


def _known_pixels(trunk: TrunkInFile) -> Pixels:
    """Return the trunk's pixels. BadInput names the option that tells them where nothing else does."""
    pixels = trunk.metadata.pixels or trunk.pixels()
    if pixels is None:
        raise BadInput(
            "neither the file nor one beside it tells the statistics of its pixels; choose"
            f" --pixels {' or '.join(PIXEL_CHOICES)} {IN_IMPORT}"
        )
    return pixels
