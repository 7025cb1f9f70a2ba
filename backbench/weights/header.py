"""Reads the header of a safetensors file, without its tensors.

Such a file begins with a length (8 bytes, little-endian) and that many bytes of JSON (tensor ->
dtype, shape, data_offsets; `__metadata__` -> texts). Then the tensors follow. A Checkpoint describes
itself in the metadata, under `about`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.untrusted import jsons, opening

FORMAT = "backbench-checkpoint"
LONGEST = 100_000_000  # bytes; no real header comes near


@dataclass(frozen=True)
class Header:
    """Describes a file by its header."""

    about: Mapping[str, Any]  # empty for a file that is no Checkpoint
    size: int  # bytes that the whole file has when all its tensors are there


def read(file: Path) -> Header | None:
    """Read the header of a safetensors file; None for any other file."""
    try:
        with opening.open_regular(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > LONGEST:
                return None
            entries = jsons.decode(opened.read(length))
        metadata = entries.pop("__metadata__", {})
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        about = {}
        if metadata.get("format") == FORMAT:
            about = jsons.decode(metadata["about"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    if not isinstance(about, dict) or not all(type(end) is int for end in ends):
        return None
    return Header(about, 8 + length + max(ends, default=0))


def about(file: Path) -> Mapping[str, Any]:
    """Return the description in a Checkpoint file; empty for any other file."""
    header = read(file)
    return header.about if header is not None else {}


def digest(file: Path) -> str | None:
    """Return the digest of the weights in a Checkpoint file; None for any other file."""
    digest = about(file).get("digest")
    return digest if isinstance(digest, str) else None
