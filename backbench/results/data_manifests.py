"""The data of a row as its manifests tell it: which lists of images it was trained and scored on.

The lists are the lab's own: no committed file says what they must be. Rows are of one kind of data
where what does not depend on the seed is equal (the test list, official splits, numbers of images),
and what does (a hold-out, a choice of images) is equal wherever the seeds are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from backbench.datasets.catalog import DATASETS
from backbench.recipes import fast
from backbench.results import protocol_fingerprints
from backbench.results.store import Result
from backbench.tasks import TASKS

# Images that detectors train on and are scored on. COCO: cocodataset.org, 2017 train and val. VOC:
# trainval of 2007 and 2012 together, and test of 2007 (host.robots.ox.ac.uk/pascal/VOC).
DETECTION_SIZES = {"coco2017": (118287, 5000), "voc2007": (16551, 4952)}
# What else a row holds of how its number came about, beside the recipe
MANNER = ("bank", "labelled_from", "temperature", "shots", "evaluator")
# What a row holds that is its own: files, and what was found
_OWN = {"predictions", "per_class", "per_category", "confusion", "notes", "draws", "command"}
_OWN |= {"trunk_sha256", "trunk_unchanged", "checkpoint", "published", "about", "space"}
_OWN |= {fast.PRETRAINING}
_FOUND = {"lr", "lr_used", "trunk_lr_used", "l2", "at_edge", "converged", "scores"}


class Lists(NamedTuple):
    """What one row was trained and scored on; digests and counts as one hashable value each."""

    fixed: str  # what is equal for all seeds
    drawn: str = ""  # what a seed decides; nothing where nothing is drawn
    labelled: str = ""  # all labelled images, drawn or not, where the row says it
    size: str = ""  # how many images, where they are not as many as the dataset has


def of_row(row: Result, print_: str | None) -> Lists | None:
    """The row's lists; None where it names none. `print_` is its protocol's (prints.of_recipe)."""
    p = row.provenance
    recipe = p.get("recipe")
    manner: dict[str, Any] = {key: p[key] for key in MANNER if key in p}
    if print_ == protocol_fingerprints.UNKNOWN:
        manner |= _all_that_is_held(row)
    manifests, images, val = p.get("manifests"), p.get("images"), p.get("val")
    if isinstance(manifests, Mapping) and isinstance(images, Mapping):
        return _of_manifests(row, manifests, images, manner)
    # A detector's: "coco_2017_val:<sha256>:5000" of the files that it trained and was scored on
    train, manifest = p.get("train"), p.get("manifest")
    if isinstance(train, str) and isinstance(val, str):
        return _of_files(row.dataset, train, val, manner)
    if isinstance(manifest, str):
        chosen = recipe.get("images") if isinstance(recipe, Mapping) else None
        if chosen is None:
            return Lists(protocol_fingerprints.digest([manifest, images, manner]))
        return Lists(protocol_fingerprints.digest([images, manner]), manifest)
    return Lists(protocol_fingerprints.digest(manner)) if manner else None


def _all_that_is_held(row: Result) -> dict[str, object]:
    """Of a row without recipe: whatever may tell two ways of measuring apart."""
    chosen = row.chosen or {}
    scores = chosen.get("scores")
    held: dict[str, object] = {k: v for k, v in row.provenance.items() if k not in _OWN}
    draws = row.provenance.get("draws")
    if isinstance(draws, list):
        held["number of draws"] = len(draws)  # what was found in them is the row's own
    settings = {k: v for k, v in chosen.items() if k not in _FOUND}
    if isinstance(scores, Mapping):
        settings["grid"] = sorted(scores)
    if settings:
        held["chosen"] = settings
    return held


def _of_manifests(
    row: Result,
    manifests: Mapping[str, Any],
    images: Mapping[str, Any],
    manner: Mapping[str, Any],
) -> Lists:
    """A probe's lists: train, val, test, and whether val was held out of train."""
    val = row.provenance.get("val")
    counts = [images.get(split) for split in ("train", "val", "test")]
    size = _other_size(row, counts, val == "official")
    test = manifests.get("test")
    training = [manifests.get("train"), manifests.get("val")]
    if val == "official":
        return Lists(protocol_fingerprints.digest([test, val, training, counts, manner]), size=size)
    labelled = str(row.provenance.get("labelled") or "")
    fixed = protocol_fingerprints.digest([test, val, counts, manner])
    return Lists(fixed, protocol_fingerprints.digest(training), labelled, size)


def _of_files(dataset: str, train: str, val: str, manner: Mapping[str, Any]) -> Lists:
    counts = tuple(text.rpartition(":")[2] for text in (train, val))
    wanted = DETECTION_SIZES.get(dataset)
    other = wanted is not None and counts != tuple(map(str, wanted))
    return Lists(
        protocol_fingerprints.digest([train, val, manner]),
        size="n" + "+".join(counts) if other else "",
    )


def _other_size(row: Result, counts: Sequence[Any], official: bool) -> str:
    """ "n40000+10000" (labelled images, test images) where the dataset, or the list of labels, has
    other numbers; nothing where it has these, or says none."""
    known = DATASETS.get(row.dataset)
    if known is None or not all(isinstance(count, int) for count in counts):
        return ""
    train, val, test = counts
    labelled = train if official else train + val
    wanted: list[tuple[int | None, int]] = [(known.sizes[2], test)]
    percent = TASKS[row.task].percent
    if percent is None:
        wanted.append((known.sizes[0], labelled))
        if official:
            wanted.append((known.sizes[1], val))
    else:
        wanted.append((_lines(row.provenance.get("recipe"), str(percent)), labelled))
    if all(right in (None, found) for right, found in wanted):
        return ""
    return f"n{labelled}+{test}"


def _lines(recipe: object, percent: str) -> int | None:
    """How many labels the published list of a semi-supervised protocol has."""
    found = recipe
    for key in ("parts", percent, "list", "lines"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None


def kinds(rows: Iterable[tuple[Lists, int]]) -> dict[tuple[Lists, int], str]:
    """(lists of a row, its seed) -> what is equal exactly for rows of one kind of data."""
    by_fixed: dict[str, set[tuple[Lists, int]]] = defaultdict(set)
    for lists, seed in rows:
        by_fixed[lists.fixed].add((lists, seed))
    out: dict[tuple[Lists, int], str] = {}
    for fixed, entries in by_fixed.items():
        # 1. By all labelled images. Older rows do not say them: they are those of a row that was
        #    drawn alike by the same seed.
        said = {(seed, lists.drawn): lists.labelled for lists, seed in entries if lists.labelled}
        silent = [entry for entry in entries if not entry[0].labelled]
        found = {said.get((seed, lists.drawn), "") for lists, seed in silent} - {""}
        joined = "" if _conflict(silent) or len(found) != 1 else found.pop()
        groups: dict[str, list[tuple[Lists, int]]] = defaultdict(list)
        for lists, seed in entries:
            labelled = lists.labelled or said.get((seed, lists.drawn), joined)
            groups[labelled].append((lists, seed))
        # 2. Where one seed drew two lists, nothing tells which of them another seed's belong to.
        for labelled, group in groups.items():
            apart = _conflict(group)
            for lists, seed in group:
                key = [fixed, labelled, lists.drawn if apart else ""]
                out[lists, seed] = protocol_fingerprints.digest(key)
    return out


def _conflict(entries: Iterable[tuple[Lists, int]]) -> bool:
    """Whether one seed drew two lists."""
    drawn: dict[int, str] = {}
    return any(drawn.setdefault(seed, lists.drawn) != lists.drawn for lists, seed in entries)
