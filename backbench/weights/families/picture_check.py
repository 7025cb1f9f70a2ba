"""Scores pictures of known classes under each network whose tensors a file holds.

Networks that differ in eps, padding or pixels have the same tensors, and only one of them gives the
file's classifier the features on which it was trained. On pictures of known classes that one is
right most often.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backbench.errors import BadInput, no_folder
from backbench.images.image_list import ImageList, is_image, scan_folder
from backbench.weights.families import lookalikes
from backbench.weights.families.lookalikes import Lookalikes
from backbench.weights.families.timm_model_names import PREFIX
from backbench.weights.family import Tables
from backbench.weights.tensor_names import is_counter, without_wrapped_parts
from backbench.weights.undrawn import Undrawn

MOST = 500  # pictures, spread evenly over the folder
MOST_NETWORKS = 6
_BATCH = 25
_SURE = 0.01  # the largest p of a paired test that names one network and not another
_SYNSET = re.compile(r"n\d{8}")


class Score(NamedTuple):
    """Holds what a network makes of the pictures."""

    name: str  # timm's
    right: tuple[bool, ...]  # of each picture

    @property
    def percent(self) -> float:
        return 100 * sum(self.right) / len(self.right)


class PictureCheck(NamedTuple):
    """The network that the pictures have shown, and all scores, the best first."""

    arch: str
    rename: str | None
    scores: list[Score]

    def told(self) -> list[str]:
        """Return a line for each network."""
        count = len(self.scores[0].right)
        return [
            f"{PREFIX}{score.name}: {score.percent:.1f}% of {count} pictures"
            for score in self.scores
        ]


def check(tables: Tables, folder: Path, arch: str) -> PictureCheck:
    """Score the pictures of a folder under each network that the file may be, and choose `arch`, or
    the best where that is empty. BadInput where the pictures cannot tell, or tell another."""
    # 1. The networks, each with its own pixels
    found = lookalikes.find(tables)
    if found is None or not found.names:
        raise BadInput("--check: the file holds the tensors of none of timm's networks")
    if not found.beside:
        raise BadInput(
            "--check: the file has no classifier that could name a picture; leave out --check"
        )
    tensors = tables[found.table]
    classes = tensors[found.beside[0]].shape[0]
    images = pictures(folder, classes)
    names = [group.names[0] for group in lookalikes.groups(found.names)]
    # The user's own name stands for its group
    own = arch.removeprefix(PREFIX).partition(",")[0]
    if own and own not in found.names:
        raise BadInput(
            f"--check: the file does not hold the tensors of {arch}, but those of"
            f" {', '.join(names[:3])}"
        )
    groups = lookalikes.groups(found.names)[:MOST_NETWORKS]
    if own and not any(own in group.names for group in groups):
        raise BadInput(
            f"--check: {arch} is none of the {len(groups)} networks that are scored"
            f" ({', '.join(group.names[0] for group in groups)}); leave out --arch or --check"
        )
    # 2. What each makes of the pictures
    scores = []
    for group in groups:
        name = own if own in group.names else group.names[0]
        scores.append(Score(name, _right(name, found, tensors, classes, images)))
    scores.sort(key=lambda score: -sum(score.right))
    # 3. Which it is
    rename = None if found.by_names else lookalikes.BY_ORDER
    checked = PictureCheck(PREFIX + (own or scores[0].name), rename, scores)
    _refuse_unless_shown(checked, own, classes)
    return checked


def _refuse_unless_shown(checked: PictureCheck, own: str, classes: int) -> None:
    """Raise BadInput where no network is better than chance, where the user's own is worse than
    another, or where nobody has named one and two are alike."""
    best, *others = checked.scores
    all_told = "; ".join(checked.told())
    right = sum(best.right)
    if _tail(len(best.right), right, 1 / classes) > _SURE:
        raise BadInput(
            f"--check: no network is better than chance ({all_told}): other classes, or another order"
            " of classes, than the folder's names say"
        )
    if own:
        mine = next(score for score in checked.scores if score.name == own)
        if mine is not best and _better(best, mine):
            raise BadInput(
                f"--check: {PREFIX}{own} is not the network of this file ({all_told}); take --arch"
                f" {PREFIX}{best.name}"
            )
        return
    alike = [score.name for score in others if not _better(best, score)]
    if alike:
        raise BadInput(
            f"--check: the pictures do not tell {best.name} from {', '.join(alike)} ({all_told}); give"
            f" more pictures, or choose one with --arch {PREFIX}NAME"
        )


def _better(one: Score, other: Score) -> bool:
    """Return True where the exact sign test on the pictures that only one of them names right is
    sure."""
    won = sum(a and not b for a, b in zip(one.right, other.right))
    lost = sum(b and not a for a, b in zip(one.right, other.right))
    return 2 * _tail(won + lost, won, 0.5) <= _SURE


def _tail(count: int, right: int, chance: float) -> float:
    """Return the probability of `right` or more of `count` by chance."""
    return sum(
        math.comb(count, k) * chance**k * (1 - chance) ** (count - k)
        for k in range(right, count + 1)
    )


# --- pictures ---


def pictures(folder: Path, classes: int) -> ImageList:
    """List pictures whose labels are places in the classifier, spread evenly over the folder.

    Their classes are the names of the folders: ImageNet's ids, the places themselves, or as many
    names as there are classes, in their order. Files without folders may begin with ImageNet's ids.
    """
    if not folder.is_dir():
        raise BadInput(
            f"--check {folder}: {no_folder(folder)}; give one of pictures in class folders"
        )
    if not any(path.is_dir() for path in folder.iterdir()):
        images = _by_file_names(folder)
    else:
        images = scan_folder(folder)
    places = _places(images.classes, classes, folder)
    step = max(len(images) / MOST, 1)
    chosen = [int(i * step) for i in range(min(len(images), MOST))]
    labels = tuple(places[label] for label in images.labels)
    listed = ImageList(images.root, images.paths, labels, images.classes)
    return listed.subset(chosen)


def _by_file_names(folder: Path) -> ImageList:
    paths = sorted(path.name for path in folder.iterdir() if is_image(path.name))
    synsets = [_SYNSET.match(path) for path in paths]
    if not paths or not all(synsets):
        raise BadInput(
            f"--check {folder}: expected {folder}/<class>/<picture>, or pictures whose names begin with"
            " ImageNet's ids (n01440764_1.JPEG)"
        )
    names = [match[0] for match in synsets if match is not None]
    classes = sorted(set(names))
    return ImageList(folder, paths, tuple(map(classes.index, names)), tuple(classes))


def _places(names: Sequence[str], classes: int, folder: Path) -> list[int]:
    """Return the place of each class in the classifier."""
    from backbench.datasets.readers import class_list

    if all(_SYNSET.fullmatch(name) for name in names) and classes == 1000:
        place = {synset: i for i, synset in enumerate(class_list("imagenet"))}
        unknown = [name for name in names if name not in place]
        if not unknown:
            return [place[name] for name in names]
    if all(name.isdecimal() and int(name) < classes for name in names):
        return [int(name) for name in names]
    if len(names) == classes:
        return list(range(classes))
    raise BadInput(
        f"--check {folder}: nothing tells which of the classifier's {classes} classes its"
        f" {len(names)} folders are ('{names[0]}'); name them by ImageNet's ids or by their places, 0"
        f" to {classes - 1}"
    )


# --- networks ---


def _right(
    name: str,
    found: Lookalikes,
    tensors: Mapping[str, Tensor],
    classes: int,
    images: ImageList,
) -> tuple[bool, ...]:
    """Return for each picture whether timm's network of that name, with the file's tensors, names
    its class."""
    import timm
    from timm.data import create_transform, resolve_data_config

    # 1. The network with the file's tensors, all of them
    with Undrawn():
        model: Any = timm.create_model(name, pretrained=False, num_classes=classes)
    model.eval()
    keys = [*found.keys, *found.beside]
    if found.by_names:
        plain = {without_wrapped_parts(own): own for own in model.state_dict()}
        own_names = {key: key[len(found.prefix) :] for key in keys}
        named = {key: plain.get(own, own) for key, own in own_names.items()}
    else:
        named = lookalikes.in_order(found, tensors, name)
    state = {}
    for key, tensor in model.state_dict().items():
        # Counters change nothing, and files leave them out.
        if is_counter(key):
            state[key] = tensor
    for key in keys:
        state[named.get(key, key)] = tensors[key].float()
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        raise BadInput(
            f"--check: the file does not fit {PREFIX}{name}: {said}"
        ) from None
    # 2. Its own pixels
    about = resolve_data_config({}, pretrained_cfg=model.pretrained_cfg)
    transform: Any = create_transform(**about, is_training=False)
    right = []
    with torch.inference_mode():
        for begin in range(0, len(images), _BATCH):
            indices = range(begin, min(begin + _BATCH, len(images)))
            batch = torch.stack([transform(images.open(i)) for i in indices])
            answers = model(batch).argmax(1).tolist()
            right += [images.labels[i] == answers[i - begin] for i in indices]
    return tuple(right)
