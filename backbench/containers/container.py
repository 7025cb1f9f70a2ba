"""A container: the files that hold the images of one split, or of a whole dataset."""

import re
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput

# Split -> what other people's files and folders call it
SPLIT_WORDS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}
SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_PART = re.compile(r"-\d{5}-of-(\d{5})\b")  # train-00003-of-00294.parquet


@dataclass(frozen=True)
class Container:
    """Files of one kind that hold a split. Where they hold several, `inside` is its folder."""

    kind: str
    files: tuple[Path, ...]
    inside: str = ""

    def __post_init__(self) -> None:
        folder = self.files[0].parent
        for file in self.files:
            if file.parent != folder:
                raise BadInput(
                    f"{folder}: and {file.parent} hold the same split, twice; move one away"
                )
            part = _PART.search(file.name)
            if part and int(part[1]) != len(self.files):
                raise BadInput(
                    f"{file}: is one of {int(part[1])} files, and {len(self.files)} are there;"
                    " get all of them, and only them"
                )
