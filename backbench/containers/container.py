"""A container: the files that hold the images of one split, or of a whole dataset."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.untrusted import printable

# Split -> what other people's files and folders call it, in upper or lower case: the words of the
# Hub's library `datasets`
SPLIT_WORDS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
# A word for a split with something beside it: train_set, seg_test, val2017
_LIKE_A_SPLIT = re.compile(
    rf"(.*[-_ .])?({'|'.join(_SPLIT_OF)})(([-_ .]?set|[-_ .]?\d|[-_ .]).*)?",
    re.IGNORECASE,
)
_PART = re.compile(r"-\d{5}-of-(\d{5})\b")  # train-00003-of-00294.parquet


@dataclass(frozen=True)
class Container:
    """Files of one kind that hold a split. Where they hold several, `inside` is its folder."""

    kind: str
    files: tuple[Path, ...]
    inside: str = ""
    # Of a table: the columns that may hold the labels, the first that is there; by default it tells
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        folder = self.files[0].parent
        for file in self.files:
            if file.parent != folder:
                raise BadInput(
                    f"{folder}: holds the same split as {file.parent}; move one away"
                )
        for file in self.files:
            part = _PART.search(file.name)
            if part and int(part[1]) != len(self.files):
                raise BadInput(
                    f"{file}: is one of {int(part[1])} files, and {len(self.files)} are there;"
                    " get all of them, and only them"
                )


def split_of(name: str) -> str | None:
    """Return the split that a file or folder of this name holds: `val` for `Valid`."""
    return _SPLIT_OF.get(name.lower())


def splits_among(
    folders: Collection[str], where: Path, beside: Iterable[str] = ()
) -> dict[str, str]:
    """Return split -> its folder among `folders`, the first folders of a dataset; empty where all
    are classes.

    `train`, `val` and `test` are splits wherever they are. A folder with another word for a split
    (`Testing`) is one only if nothing but splits is there, or train and another split; `beside` has
    the splits that lie in files. BadInput names a split that is there twice."""
    words: dict[str, list[str]] = {}
    for folder in sorted(folders):
        split = split_of(folder)
        if split is not None:
            words.setdefault(split, []).append(folder)
    exact = any(split in names for split, names in words.items())
    alone = all(split_of(folder) is not None for folder in folders)
    there = {*words, *beside}
    if not (exact or alone or ("train" in there and len(there) > 1)):
        return {}
    for split, names in words.items():
        if len(names) > 1:
            raise BadInput(
                f"{where}: '{split}' is there twice, as {names[0]} and {names[1]}; move one away"
            )
    return {split: names[0] for split, names in words.items()}


def refuse_misspelled(folders: Collection[str], where: Path) -> None:
    """Refuse classes that are splits under other names, as `train_set` and `test_set`."""
    matches = [_LIKE_A_SPLIT.fullmatch(folder) for folder in folders]
    splits = {split_of(match[2]) for match in matches if match is not None}
    if None in matches or "train" not in splits or len(splits) < 2:
        return
    names = " and ".join(printable.shown(folder, 80) for folder in sorted(folders)[:3])
    raise BadInput(
        f"{where}: {names} look like splits, and would be read as classes; rename the folders to"
        " train, val and test"
    )
