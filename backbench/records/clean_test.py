"""Scores on a clean test set: without copies of training images, and with known label errors mended.

A list names test images and says what is wrong with each. No image is read: the scores follow from
the predictions that were kept beside a number, which are kept once more beside what the list says of
each image. `verify` computes them again from that file alone.

A line of a list has two or three columns, parted by tabs; a line that begins with # is a remark:

    dog/0017.png    copy    dog/0901.png    a copy of this training image (who need not be named)
    dog/0018.png    wrong                   its label is wrong, and nobody says which is right
    dog/0019.png    label   cat             its label is wrong, and this one is right

The csv of ciFAIR (columns TestID, TrainID, Distance, Judgment) is read as it is, for CIFAR's own files.
"""

import csv
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbench.errors import BadInput, nearest
from backbench.records.predictions import Arrays, hits
from backbench.records.result_line import Result
from backbench.stats import confidence, left_out
from backbench.stats.confidence import Interval
from backbench.untrusted import opening, printable

TASK = "clean_test"
SCORE = "clean"  # clean_top1_1a2b3c4d: the score on what the list leaves, by its labels
CHANGE = (
    "change"  # change_top1_1a2b3c4d: that minus the full score of the same predictions
)
KINDS = (SCORE, CHANGE)
_DIGITS = 8  # of the digest of what a list says, in a metric's name
# What a list says of an image, as the array `flaw` holds it
COPY = 1
WRONG = 2
RELABELLED = 3
_WORDS = {"copy": COPY, "wrong": WRONG, "label": RELABELLED}
_LARGEST = 256 * opening.MEGABYTE
_CIFAIR = ["TestID", "TrainID", "Distance", "Judgment"]


# ---- the list


class Flaw(NamedTuple):
    """Holds what one line of a list says of a test image."""

    line: int
    kind: int
    label: str = ""  # the right one, a class's name or number


@dataclass(frozen=True, kw_only=True)
class CleanList:
    """A list as it was read: test image -> what is wrong with it."""

    file: Path
    sha256: str
    flaws: Mapping[str, Flaw]
    by_place: bool  # the images are named by their place in CIFAR's own test file


def read_list(file: Path) -> CleanList:
    """Read a list. BadInput names the first line that is wrong."""
    try:
        content = opening.read_bytes(file, most=_LARGEST)
    except OSError as error:
        raise BadInput(
            f"--list {file}: {error.strerror}; `backbench data check NAME --copies"
            f" {shlex.quote(str(file))}` writes one"
        ) from None
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise BadInput(
            f"--list {file}: is no text; give lines of image, tab, copy or wrong"
        ) from None
    by_place = bool(lines) and next(csv.reader(lines[:1]), []) == _CIFAIR
    flaws: dict[str, Flaw] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#") or (by_place and number == 1):
            continue
        where = f"--list {file}:{number}"
        image, flaw = _cifair(line, number) if by_place else _own(line, number, where)
        # One test image may be a copy of several training images; nothing else is said twice
        before = flaws.get(image)
        if before is not None and not before.kind == flaw.kind == COPY:
            raise BadInput(
                f"{where}: '{printable.shown(image, 80)}' stands in line {before.line}, too;"
                " leave one of them"
            )
        flaws.setdefault(image, flaw)
    if not flaws:
        raise BadInput(
            f"--list {file}: names no image; a line is image, tab, copy or wrong"
        )
    digest = hashlib.sha256(content).hexdigest()
    return CleanList(file=file, sha256=digest, flaws=flaws, by_place=by_place)


def _own(line: str, number: int, where: str) -> tuple[str, Flaw]:
    """Read a line of our own format: the image and what is wrong with it."""
    image, *rest = line.split("\t")
    word = rest[0].strip() if rest else ""
    label = rest[1].strip() if len(rest) > 1 else ""
    if word not in _WORDS:
        raise BadInput(
            f"{where}: '{printable.shown(line, 80)}' is not image, tab, copy | wrong | label, tab,"
            " right label"
        )
    kind = _WORDS[word]
    if kind == RELABELLED and not label:
        raise BadInput(
            f"{where}: no right label behind 'label'; add a tab and the class, or write 'wrong'"
        )
    return image, Flaw(number, kind, label if kind == RELABELLED else "")


def _cifair(line: str, number: int) -> tuple[str, Flaw]:
    """Read a line of ciFAIR's csv: the image as CIFAR's own files are listed."""
    place = line.partition(",")[0].strip()
    # What is no number is named later, as an image that is not in the test set
    image = f"test/{int(place):05}" if place.isdecimal() else place
    return image, Flaw(number, COPY)


# ---- what it says of the images of a test list


class TestImages(NamedTuple):
    """A test list, as `RUN/manifests` has it."""

    manifest: str  # its digest
    paths: Sequence[str]
    labels: np.ndarray

    @classmethod
    def of(cls, manifest: str, content: bytes) -> "TestImages":
        """Read 'path<TAB>label' lines."""
        lines = content.decode(errors="replace").removesuffix("\n").split("\n")
        pairs = [line.rpartition("\t") for line in lines]
        labels = np.array([int(label) for _, _, label in pairs], dtype=np.int64)
        return cls(manifest, [path for path, _, _ in pairs], labels)


def place(clean: CleanList, images: TestImages, of: str) -> dict[str, np.ndarray]:
    """Return `flaw` (N,) and `right` (N,), the right labels, for the images of a test list.

    BadInput where the list does not fit these images; `of` names them."""
    places = {path: index for index, path in enumerate(images.paths)}
    numbers = _class_numbers(images)
    flaw = np.zeros(len(images.paths), dtype=np.uint8)
    right = images.labels.copy()
    for image, said in clean.flaws.items():
        where = f"--list {clean.file}:{said.line}"
        index = places.get(image)
        if index is None:
            raise BadInput(f"{where}: {_absent(image, clean, images, of)}")
        flaw[index] = said.kind
        if said.kind == RELABELLED:
            label = numbers.get(said.label)
            if label is None:
                raise BadInput(
                    f"{where}: '{printable.shown(said.label, 60)}' is no class of {of};"
                    f" {nearest(said.label, numbers)}"
                )
            if label == right[index]:
                raise BadInput(
                    f"{where}: '{printable.shown(said.label, 60)}' is the label that"
                    f" {printable.shown(image, 80)} has; remove the line"
                )
            right[index] = label
    if not ((flaw != COPY) & (flaw != WRONG)).any():
        raise BadInput(f"--list {clean.file}: leaves no test image of {of}; shorten it")
    return {"flaw": flaw, "right": right}


def _absent(image: str, clean: CleanList, images: TestImages, of: str) -> str:
    """Say that an image is not in the test list, and what to write."""
    shown = printable.shown(image, 80)
    if clean.by_place:
        return (
            f"'{shown}' is not in the test set of {of}; ciFAIR's numbers are places in CIFAR's own"
            " files: name the images by their paths instead"
        )
    return (
        f"'{shown}' is not in the test set of {of}; write paths as in RUN/manifests, such as"
        f" '{printable.shown(images.paths[0], 80)}'"
    )


def _class_numbers(images: TestImages) -> dict[str, int]:
    """Return a class's name or number -> its number. A folder that holds one class names it."""
    numbers = {str(label): int(label) for label in np.unique(images.labels)}
    of_folder: dict[str, set[int]] = {}
    for path, label in zip(images.paths, images.labels):
        folder, slash, _ = path.rpartition("/")
        if slash:
            of_folder.setdefault(folder.rpartition("/")[2], set()).add(int(label))
    for folder, labels in of_folder.items():
        if len(labels) == 1:
            # A folder called 3 is the class of that name, whatever its number is
            numbers[folder] = min(labels)
    return numbers


# ---- scores


def digest(manifest: str, said: Mapping[str, np.ndarray]) -> str:
    """Return a digest of what a list says of a test list: equal if the same images are left out,
    and the others scored by the same labels."""
    flaw = said["flaw"]
    text = [manifest]
    for index in np.flatnonzero(flaw):
        right = said["right"][index] if flaw[index] == RELABELLED else "out"
        text.append(f"{index}\t{right}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def metric_name(kind: str, metric: str, of_list: str) -> str:
    """Return the metric of a row: `clean` or `change`, the metric of the full set, the list."""
    return f"{kind}_{metric}_{of_list[:_DIGITS]}"


def full_metric(metric: str) -> tuple[str, str, str]:
    """Split such a name into its kind, the metric of the full set, and the list's digits."""
    kind, _, rest = metric.partition("_")
    full, _, of_list = rest.rpartition("_")
    return kind, full, of_list


def file_stem(of_list: str, stem: str) -> str:
    """Return the name of the file of predictions and flaws, from that of the predictions."""
    return f"{SCORE}-{of_list[:_DIGITS]}-{stem}"


def counts(said: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return how many images a list leaves out or scores by another label, and of how many."""
    number = np.bincount(said["flaw"], minlength=RELABELLED + 1)
    return {
        "copies": int(number[COPY]),
        "wrong": int(number[WRONG]),
        "relabelled": int(number[RELABELLED]),
        "of": len(said["flaw"]),
    }


def unscored(x: Arrays, metric: str) -> str:
    """Say why a metric cannot be scored on the clean set; "" where it can."""
    if hits(x, metric) is None:
        return "its predictions of each image were not kept; measure it again"
    if metric.startswith("top5") and (x["flaw"] == RELABELLED).any():
        return (
            "whether another label is among the five best was not kept; write 'wrong' in place of"
            " 'label' to have it"
        )
    if metric.startswith("mean_per_class"):
        kept = _kept(x)
        gone = np.setdiff1d(x["label"], x["right"][kept])
        if gone.size:
            return f"the list leaves class {gone[0]} without a test image"
    return ""


def value(x: Arrays, metric: str) -> tuple[float, Interval | None]:
    """Return the value of a metric of these names and its interval, in percent.

    A change that too few images decide has no interval."""
    kind, full, _ = full_metric(metric)
    kept = _kept(x)
    of_all = np.atleast_2d(_hits(x, full))
    of_clean = of_all
    if not full.startswith("top5"):
        of_clean = np.atleast_2d(x["prediction"]) == x["right"]
    by_class = full.startswith("mean_per_class")
    label = x["label"] if by_class else None
    right = x["right"] if by_class else None
    if kind == CHANGE:
        flawed = x["flaw"] != 0
        return left_out.change(
            of_all, of_clean, kept, flawed, classes=label, clean_classes=right
        )
    scored = of_clean[:, kept]
    classes = None if right is None else right[kept]
    weight = confidence.weights(scored.shape[1], classes)
    share = float((scored @ weight).mean())
    return 100 * share, confidence.of_draws(scored, classes)


def _hits(x: Arrays, metric: str) -> np.ndarray:
    found = hits(x, metric)
    if found is None:
        raise ValueError(f"no predictions of {metric}")
    return found


def _kept(x: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which images are scored."""
    kept: np.ndarray = (x["flaw"] != COPY) & (x["flaw"] != WRONG)
    return kept


def fault(x: Arrays, r: Result) -> str:
    """Say what in a file of predictions and flaws does not fit the row; "" where all does."""
    kind, full, of_list = full_metric(r.metric)
    if kind not in KINDS:
        return f"'{printable.shown(r.metric, 60)}' is no metric of {TASK}"
    for name in ("flaw", "right", "label"):
        array = x.get(name)
        if array is None or array.dtype.kind not in "iu" or array.ndim != 1:
            return f"its file says no '{name}' of the images"
    per_image = {len(x[name]) for name in ("flaw", "right", "label")}
    if len(per_image) > 1 or x["flaw"].max() > RELABELLED or x["flaw"].min() < 0:
        return "what its file says of the images is no list"
    same = x["right"] == x["label"]
    if not same[x["flaw"] != RELABELLED].all() or not _kept(x).any():
        return "its file changes labels that its list does not"
    if digest(str(x["manifest"]), x)[:_DIGITS] != of_list:
        return f"its images are not those that list {of_list} leaves"
    stated = r.provenance.get("left_out")
    if not isinstance(stated, dict) or counts(x) != {
        key: stated.get(key) for key in counts(x)
    }:
        return "it says another number of images that are left out than its file"
    return unscored(x, full)
