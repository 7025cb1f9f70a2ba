"""A table: which images lie where in one container file, by a scanner or from the cache.

Tables come from processes that read strangers' files, so `check` distrusts every number in them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backbench.containers.spans import CODECS, SPAN, Span
from backbench.images.file_names import passed_over, unusable_in
from backbench.untrusted import jsons, opening, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of all scanners: with another number, every container is scanned anew
SCANNER_VERSION = 3
LARGEST_IMAGE = opening.GIGABYTE
LARGEST_TABLE = 4 * opening.GIGABYTE
LONGEST_NAME = 300  # bytes
ANY_SIZE = 1 << 62  # of a container file whose size is not known here
# An image's name in its container, label or -1, span
Row = tuple[str, int, Span]


@dataclass(frozen=True)
class Table:
    """The images in one container file, in its order, under the names that it gives them."""

    names: Sequence[str]
    labels: NDArray[np.int64]  # (N,); -1 where the container states none
    spans: NDArray[np.void]  # (N,) SPAN, `file` 0
    classes: tuple[str, ...] = ()  # names by label, where the container states them
    notes: tuple[str, ...] = ()  # what was passed over, and how the file was written
    # Whether labels are texts, so that the classes are those of this file's rows
    by_text: bool = False

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        classes: Sequence[str] = (),
        notes: Sequence[str] = (),
        *,
        by_text: bool = False,
    ) -> Table:
        """Make a table of rows, without hidden ones. ValueError for impossible ones."""
        seen = [row for row in rows if not passed_over(row[0])]
        if len(seen) < len(rows):
            notes = [*notes, f"{len(rows) - len(seen)} hidden images passed over"]
        table = cls(
            [name for name, _, _ in seen],
            np.array([label for _, label, _ in seen], np.int64),
            np.array([(0, *span) for _, _, span in seen], SPAN),
            tuple(classes),
            tuple(notes),
            by_text,
        )
        table.check(ANY_SIZE)
        return table

    @property
    def labelled(self) -> bool:
        """True if the container states the label of an image at least."""
        return bool((self.labels >= 0).any())

    def unlabelled(self) -> Table:
        """Return the table without its labels and classes."""
        return replace(self, labels=self.labels * 0 - 1, classes=(), by_text=False)

    def check(self, size: int) -> None:
        """Raise ValueError unless every span lies inside a file of `size` bytes, under a usable name."""
        spans = self.spans
        count = len(self.names)
        if spans.dtype != SPAN or not spans.shape == self.labels.shape == (count,):
            raise ValueError("columns of other types or lengths")
        if count:
            # The start is compared alone, too: a sum of uint64 may wrap around
            starts_outside = spans["start"] > size
            ends_outside = spans["start"] + spans["stored"] > size
            outside_block = (
                spans["inner"].astype(np.int64) + spans["size"] > (spans["block"])
            )
            bare = spans["codec"] == CODECS.index("bare")
            if (
                starts_outside.any()
                or ends_outside.any()
                or outside_block.any()
                or spans["codec"].max() >= len(CODECS)
                or spans["block"].max() > LARGEST_IMAGE
                or spans["file"].any()
                or (bare & (spans["stored"] != spans["size"])).any()
            ):
                raise ValueError("an image that is not inside the file")
        for name in (*self.names, *self.classes):
            found = unusable_in(name)
            if found:
                raise ValueError(f"a member's name holds the control character {found}")
        for name in self.classes:  # they become folders
            if "/" in name or name in (".", ".."):
                raise ValueError(f"the class name '{printable.shown(name, 100)}'")
        for name in self.names:
            parts = name.split("/")
            absolute = not parts[0]
            a_folder = not parts[-1]
            too_long = len(name.encode()) > LONGEST_NAME
            if absolute or a_folder or too_long or ".." in parts:
                raise ValueError(f"the name '{printable.shown(name, 100)}'")

    def dumped(self) -> bytes:
        """Return the table as numpy's archive, texts as arrays of bytes (nothing is pickled)."""
        about = json.dumps(
            {"classes": self.classes, "notes": self.notes, "by_text": self.by_text}
        )
        buffer = io.BytesIO()
        np.savez(
            buffer,
            labels=self.labels,
            spans=self.spans,
            names=np.frombuffer("\n".join(self.names).encode(), np.uint8),
            about=np.frombuffer(about.encode(), np.uint8),
        )
        return buffer.getvalue()

    @staticmethod
    def loaded(file: Path, size: int) -> Table:
        """Load the table of a container of `size` bytes. OSError, ValueError or KeyError if bad."""
        data = io.BytesIO(opening.read_bytes(file, most=LARGEST_TABLE))
        with np.load(data) as columns:
            names = columns["names"].tobytes().decode()
            about: dict[str, Any] = jsons.decode(columns["about"].tobytes())
            labels = columns["labels"]
            spans = columns["spans"]
        table = Table(
            names.split("\n") if names else [],
            labels,
            spans,
            tuple(about["classes"]),
            tuple(about["notes"]),
            bool(about.get("by_text")),
        )
        table.check(size)
        return table
