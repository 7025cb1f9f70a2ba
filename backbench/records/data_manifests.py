"""The lists of images that a row was trained and scored on, as its manifests tell them.

No committed file says what a lab's lists must be. Two rows have one kind of data if all that does
not depend on the seed is equal (the test list, official splits, numbers of images), and all that
does (a hold-out, a choice of images) is equal for equal seeds.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from backbench.containers.provenance import CONTAINER_KEY
from backbench.datasets.catalog import DATASETS
from backbench.images import contents
from backbench.recipes import fast
from backbench.records.protocol_fingerprints import digest
from backbench.records.result_line import Result
from backbench.tasks import TASKS

# Images that detectors train on and are scored on. COCO: cocodataset.org, 2017 train and val. VOC:
# trainval of 2007 and 2012 together, and test of 2007 (host.robots.ox.ac.uk/pascal/VOC).
DETECTION_SIZES = {"coco2017": (118287, 5000), "voc2007": (16551, 4952)}
# Keys of provenance that name lists, and those that say how a number was made beside its recipe
LISTS = ("manifests", "manifest", "images", "val", "train", "labelled")
MANNER = ("bank", "labelled_from", "temperature", "shots", "evaluator")
# What `labelled_from` says where the seed chose the images that have a label
OF_THE_SEED = "the seed's draw of train"
# In a row's provenance: the digests of its lists, and of what the scored images hold, with the images
# in the order of their paths. The copies of one dataset list the same images in orders of their own
PATH_ORDER = "in_path_order"
# Keys of provenance and of `chosen` that are outcomes of one run, never a way of measuring
_OUTCOMES = {
    "predictions",
    "scores",
    "per_class",
    "per_category",
    "errors",
    "confusion",
    "notes",
    "size",
    "draws",
    "command",
    "trunk_sha256",
    "trunk_unchanged",
    "checkpoint",
    "published",
    "about",
    "space",
    "head_sha256",
    "temperature_from",
    fast.PRETRAINING,
    contents.KEY,
    CONTAINER_KEY,
    PATH_ORDER,
}
_CHOSEN = {
    "lr",
    "lr_used",
    "trunk_lr_used",
    "l2",
    "weight_decay",
    "k",
    "distance",
    "at_edge",
    "converged",
    "gradient",
    "scores",
    "choice_noise",
}


class Lists(NamedTuple):
    """The lists of one row; digests and counts as one hashable value each."""

    fixed: str  # digest of everything that is equal for all seeds
    drawn: str = (
        ""  # digest of everything that a seed decides; empty where it draws nothing
    )
    labelled: str = ""  # digest of all labelled images, drawn or not
    size: str = ""  # numbers of images, where the dataset has others
    contents: str = ""  # digest of what the scored images hold, where the row says it


# (dataset, digest of a list or of its contents) -> the digest that stands for all orders of it
OneOrder = Mapping[tuple[str, str], str]


def one_order(rows: Iterable[Result]) -> OneOrder:
    """Find the digests that name the same images in several orders, as the rows tell.

    A digest of which two rows tell unlike things is left as it is: one of them is wrong."""
    told: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        manifests = row.facts.get("manifests") or {}
        for part, in_path_order in (row.facts.get("in_path_order") or {}).items():
            own = manifests.get(part)
            if part == contents.KEY:
                own = row.facts.get("image_contents")
            if own:
                told[row.dataset, own].add(in_path_order)
    orders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (dataset, own), sorted_digests in told.items():
        if len(sorted_digests) == 1:
            orders[dataset, min(sorted_digests)].append(own)
    out = {}
    for (dataset, _), same in orders.items():
        for own in same:
            out[dataset, own] = min(same)
    return out


def of_row(
    row: Result, *, has_recipe: bool, orders: OneOrder | None = None
) -> Lists | None:
    """Return the row's lists; None where it names none. `orders` is what `one_order` returns."""
    orders = orders or {}
    facts = row.facts
    manner: dict[str, object] = {
        key: row.provenance[key] for key in MANNER if key in row.provenance
    }
    if not has_recipe:
        manner |= _everything_but_outcomes(row)
    manifests = facts.get("manifests")
    images = facts.get("images")
    held = facts.get("image_contents") or ""
    held = orders.get((row.dataset, held), held)
    # 1. A probe: `manifests` and `images` of its splits.
    if manifests is not None and isinstance(images, dict):
        manifests = {
            split: orders.get((row.dataset, own or ""), own)
            for split, own in manifests.items()
        }
        return _of_probe(row, manifests, images, manner)._replace(contents=held)
    # 2. A detector: the annotation files.
    if "train" in facts and "val" in facts:
        of_detector = _of_detector(row.dataset, facts["train"], facts["val"], manner)
        return of_detector._replace(contents=held)
    # 3. `analyze`: a recipe with a number of images draws them by the seed.
    if "manifest" in facts:
        if (facts.get("recipe") or {}).get("images") is None:
            return Lists(digest([facts["manifest"], images, manner]))
        return Lists(digest([images, manner]), facts["manifest"])
    return Lists(digest(manner)) if manner else None


def scored_list(row: Result) -> str | None:
    """Return the digest of the test list that `of_row` takes, and no other that the row may
    name."""
    facts = row.facts
    manifests = facts.get("manifests")
    if manifests is not None and isinstance(facts.get("images"), dict):
        return manifests.get("test")
    if "train" in facts and "val" in facts:
        return hashlib.sha256(facts["val"].encode()).hexdigest()
    return facts.get("manifest")


def _everything_but_outcomes(row: Result) -> dict[str, object]:
    """Whatever may tell two ways of measuring apart, for a row that does not hold its recipe."""
    held: dict[str, object] = {
        key: value for key, value in row.provenance.items() if key not in _OUTCOMES
    }
    draws = row.provenance.get("draws")
    if isinstance(draws, list):
        held["number of draws"] = len(draws)
    chosen = row.chosen or {}
    settings = {key: value for key, value in chosen.items() if key not in _CHOSEN}
    scores = chosen.get("scores")
    if isinstance(scores, dict):
        settings["grid"] = sorted(scores)
    if settings:
        held["chosen"] = settings
    return held


def _of_probe(
    row: Result,
    manifests: Mapping[str, str | None],
    images: Mapping[str, int | None],
    manner: Mapping[str, object],
) -> Lists:
    """Train, val and test list. The seed may have held val out of train, and may have chosen the
    images that are labelled at all."""
    val = row.facts.get("val")
    counts = [images.get(split) for split in ("train", "val", "test")]
    size = _unusual_size(row, counts, val == "official")
    test = manifests.get("test")
    training = [manifests.get("train"), manifests.get("val")]
    if row.provenance.get("labelled_from") == OF_THE_SEED:
        of_val = manifests.get("val") if val == "official" else ""
        fixed = [test, val, of_val, counts, manner]
        return Lists(digest(fixed), digest(training), size=size)
    if val == "official":
        return Lists(digest([test, val, training, counts, manner]), size=size)
    labelled = row.facts.get("labelled") or ""
    return Lists(digest([test, val, counts, manner]), digest(training), labelled, size)


def _of_detector(
    dataset: str, train: str, val: str, manner: Mapping[str, object]
) -> Lists:
    """Return the annotation files: "coco_2017_val:<sha256>:5000"."""
    counts = [file.rpartition(":")[2] for file in (train, val)]
    usual = DETECTION_SIZES.get(dataset)
    size = ""
    if usual is not None and counts != [str(count) for count in usual]:
        size = "n" + "+".join(counts)
    return Lists(digest([train, val, manner]), size=size)


def _unusual_size(row: Result, counts: Sequence[int | None], official_val: bool) -> str:
    """Return "n40000+10000" (labelled, test images) if the dataset has other numbers, else ""."""
    dataset = DATASETS.get(row.dataset)
    train, val, test = counts
    if dataset is None or train is None or val is None or test is None:
        return ""
    labelled = train if official_val else train + val
    of_train, of_val, of_test = dataset.sizes
    # (right number, actual number); nobody knows the right one where it is None.
    pairs: list[tuple[int | None, int]] = [(of_test, test)]
    percent = TASKS[row.task].percent
    if percent is not None:
        pairs.append((_labels_in_list(row, percent), labelled))
    else:
        pairs.append((of_train, labelled))
        if official_val:
            pairs.append((of_val, val))
    if all(right is None or right == actual for right, actual in pairs):
        return ""
    return f"n{labelled}+{test}"


def _labels_in_list(row: Result, percent: int) -> int | None:
    """Return how many labels the published list of a semi-supervised protocol has."""
    node: object = row.facts.get("recipe")
    for key in ("parts", str(percent), "list", "lines"):
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, int) else None


def digests(rows: Iterable[tuple[Lists, int]]) -> dict[tuple[Lists, int], str]:
    """Return (lists of a row, its seed) -> a digest that is equal exactly for rows of one kind of
    data."""
    groups: dict[tuple[str, str], set[tuple[Lists, int]]] = defaultdict(set)
    for lists, seed in rows:
        groups[lists.fixed, lists.labelled].add((lists, seed))
    out: dict[tuple[Lists, int], str] = {}
    for (fixed, labelled), members in groups.items():
        # Where one seed drew two lists, nothing tells which of them another seed's belong to: each
        # list is then a kind of its own.
        drawn: dict[int, set[str]] = defaultdict(set)
        for lists, seed in members:
            drawn[seed].add(lists.drawn)
        ambiguous = any(len(of_seed) > 1 for of_seed in drawn.values())
        for lists, seed in members:
            out[lists, seed] = digest(
                [fixed, labelled, lists.drawn if ambiguous else ""]
            )
    return out
