"""Makes a recipe for pictures of one's own of a method's name and a folder.

`backbench pretrain lorac --images FOLDER` trains on pictures that no paper had, at a size, a batch and
a length that no paper used. What a form takes over from its paper and what it changes is said before
the first step, and stands in RUN/recipe.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from backbench.datasets import catalog
from backbench.datasets.boxes import box_folders
from backbench.errors import BadInput, nearest, no_folder
from backbench.images.image_list import ImageList, scan_folder
from backbench.pretrain.recipe import PretrainConfig
from backbench.recipes import config as recipes
from backbench.requests.bounds import MOST_EPOCHS
from backbench.requests.pretrain import PretrainRequest
from backbench.runs.folder import RECIPE_FILE

SMALL = 96  # pixels; larger pictures take the forms of the papers' ImageNet
USUAL = 224
FEWEST = 16  # pictures that make a batch of four
LOOKED_AT = 64  # pictures whose sides decide the size, where nobody says it
# A trunk of this many epochs has learnt most of what its form reaches on a few thousand pictures
ENOUGH_EPOCHS = 40
# Of small pictures, the widest trunk that makes so many is taken
WIDTHS = (0.25, 0.5, 1.0)
# The rest of a budget of time goes to the random trunk and the table
FOR_TRAINING = 0.8
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class OwnForm:
    """The recipes of a method: for small pictures, and the paper's for its own."""

    small: str
    paper: str


FORMS: Mapping[str, OwnForm] = {
    "lorac": OwnForm("own/lorac", "lorac/lorac_imagenet"),
    "moco_m": OwnForm("own/moco_m", "lorac/moco_m_imagenet"),
    "moco_v2": OwnForm("own/moco_v2", "lorac/moco_v2_imagenet"),
    "simclr": OwnForm("own/simclr", "lorac/simclr_imagenet"),
    "byol": OwnForm("own/byol", "lorac/byol_imagenet"),
    "barlow_twins": OwnForm(
        "arb/barlow_twins_cifar10_256", "lorac/barlow_twins_imagenet"
    ),
    "arb": OwnForm("arb/arb_cifar10_256", "arb/arb_imagenet_2048"),
    "mio": OwnForm("mio/mio_d_cifar10", "mio/mio_d_stl10"),
    "cllr": OwnForm(
        "cllr/cllr_nuclear_dcl_cifar10", "cllr/cllr_nuclear_dcl_imagenet100"
    ),
    "supervised": OwnForm("own/supervised", "lorac/supervised_imagenet"),
}


@dataclass(frozen=True)
class Budget:
    """How long a training may be: seconds, or epochs; both None for the form's own length."""

    seconds: float | None = None
    epochs: int | None = None


def parse_budget(text: str) -> Budget:
    """Read 10min, 2h, 90s, 1d or epochs=20. An empty text is no budget."""
    if not text:
        return Budget()
    if counted := re.fullmatch(r"epochs=(\d{1,9})", text):
        epochs = int(counted[1])
        if not 1 <= epochs <= MOST_EPOCHS:
            raise BadInput(f"--budget {text}: from 1 to {MOST_EPOCHS} epochs")
        return Budget(epochs=epochs)
    timed = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|min|h|d)", text)
    if timed is None or float(timed[1]) == 0:
        raise BadInput(
            f"--budget {text[:40]}: a time as 10min, 2h or 1d, or a length as epochs=20"
        )
    return Budget(seconds=float(timed[1]) * UNITS[timed[2]])


def form_of(method: str) -> OwnForm:
    """Return the recipes of a method by its name. BadInput names the nearest."""
    if method not in FORMS:
        raise BadInput(
            f"--images trains by the name of a method, and '{method[:60]}' is none;"
            f" {nearest(method, FORMS)}"
        )
    return FORMS[method]


def check(request: PretrainRequest) -> None:
    """Raise BadInput, before torch is imported, for options that do not go together, an unknown method and
    a folder that is not there."""
    assert request.images is not None
    if request.data is not None:
        raise BadInput(
            "--images FOLDER and --data ROOT: give one of them; --data is for a recipe's dataset"
        )
    form_of(request.recipe)
    budget = parse_budget(request.budget)
    lengths = [text for text in request.overrides if text.startswith("epochs=")]
    if request.budget and lengths:
        raise BadInput(
            f"--budget {request.budget} and {lengths[0]}: both say how long; give one of them"
        )
    if request.out.exists() and not request.out.is_dir():
        raise BadInput(f"{request.out}: is a file; --out needs a folder")
    if not request.images.is_dir():
        raise BadInput(
            f"--images {request.images}: {no_folder(request.images)}; give a folder of pictures"
        )
    _refuse_boxes(request.images)
    inside = request.out.resolve()
    if request.images.resolve() in (inside, *inside.parents):
        raise BadInput(
            f"--out {request.out}: lies among the pictures of {request.images}; choose another"
        )
    if budget.seconds is not None and request.devices * request.nodes > 1:
        raise BadInput(
            f"--budget {request.budget}: several processes would each measure another length; give"
            " --budget epochs=N"
        )


def _refuse_boxes(folder: Path) -> None:
    """Raise BadInput for a folder of boxes, or of their splits: its pictures lie deeper."""
    for base in (folder, folder.parent):
        pictures = box_folders.pictures_of(base)
        if pictures is not None and folder in (base, pictures.parent):
            raise BadInput(
                f"--images {folder}: holds boxes and their pictures; give the folder with the"
                f" pictures alone, as {pictures}"
            )


def open_images(folder: Path) -> ImageList:
    """List what is trained on: the train split of a class folder, without what `evaluate` draws from
    it for its test; or all pictures of a folder without classes."""
    catalog.refuse_taken_name(folder, f"--images {folder}")
    if not catalog.is_class_folder(folder):
        found = scan_folder(folder)
    elif "train" in catalog.splits_of(folder):
        found = catalog.open_split(folder.parent, folder.name, "train")
    else:
        found = catalog.load(folder.name, folder.parent).both()
    if len(found) < FEWEST:
        raise BadInput(
            f"--images {folder}: {len(found)} pictures to train on; {FEWEST} are needed, and hundreds"
            " before anything is learnt"
        )
    return found


def usual_size(found: ImageList) -> int:
    """Return the size at which pictures are trained on where nobody says it: that of small ones,
    else 224 pixels."""
    step = max(1, len(found) // LOOKED_AT)
    sides = [min(found.open(i).size) for i in range(0, len(found), step)]
    side = int(median(sides))
    return max(1, side) if side <= SMALL else USUAL


def widths(size: int) -> tuple[float, ...]:
    """Return the widths among which a budget of time chooses: large pictures have the paper's alone."""
    return WIDTHS if size <= SMALL else (1.0,)


def request_for(
    request: PretrainRequest, found: ImageList, size: int, *, width: float, epochs: int
) -> PretrainRequest:
    """Return the request that trains by the method's form for this size, width and length."""
    assert request.images is not None
    form = form_of(request.recipe)
    recipe = form.small if size <= SMALL else form.paper
    plain = recipes.read_recipe(recipes.find_recipe(recipe, "pretrain"))
    name = request.name or f"{request.recipe.replace('_', '-')}-{request.images.name}"
    changes = [
        f"name={json.dumps(name)}",
        f"data.dataset={json.dumps(request.images.name)}",
        "data.split=train",
        "expected=[]",
    ]
    # A batch is a power of two of at most a fourth of the pictures
    batch = 1 << (max(len(found) // 4, 1).bit_length() - 1)
    batch = min(plain["batch_size"], batch, 256)
    changes.append(f"batch_size={batch}")
    queue = plain["method"].get("queue")
    if isinstance(queue, int):
        # A queue of more entries than there are pictures would hold each of them several times.
        # It holds half of them at most, in whole batches.
        batches = max(len(found) // 2 // batch, 1)
        changes.append(f"method.queue={min(queue, batches * batch)}")
    groups = plain["method"].get("groups")
    if isinstance(groups, int):
        # Eight images for each group at least, as far as the batch has so many
        most = max(batch // 8, 1)
        changes.append(f"method.groups={min(groups, most)}")
    if width != 1.0:
        arch = f"{plain['arch']},width={width:g}"
        changes.append(f"arch={json.dumps(arch)}")
    if epochs:
        changes.append(f"epochs={epochs}")
        changes.append("stop_after_epochs=null")
        warmup = plain["optim"].get("warmup_epochs", 0)
        changes.append(f"optim.warmup_epochs={min(warmup, epochs / 10):g}")
    changes += _crops(plain, size)
    return replace(request, recipe=recipe, overrides=(*changes, *request.overrides))


def _crops(plain: Mapping[str, Any], size: int) -> list[str]:
    """Return the override that brings a recipe's crops to `size` pixels, if they have another.

    The largest crops get this size, and the smaller ones shrink in proportion."""
    crops = plain["views"]["crops"]
    largest = max(group["size"] for group in crops)
    if largest == size:
        return []
    groups = []
    for group in crops:
        scaled = max(1, round(group["size"] * size / largest))
        groups.append({**group, "size": scaled})
    return [f"views.crops={json.dumps(groups)}"]


def changed(config: PretrainConfig, method: str) -> list[str]:
    """List what a recipe changes of its method's paper: "optim.lr 1.8 -> 0.001"."""
    paper = recipes.load(PretrainConfig, form_of(method).paper, kind="pretrain")
    before = recipes.flat(recipes.to_dict(paper))
    after = recipes.flat(recipes.to_dict(config))
    out = []
    for key in (*before, *(key for key in after if key not in before)):
        top = key.partition(".")[0]
        if top in ("name", "data", "probe", "expected", "log_every", "save_minutes"):
            continue
        old, new = before.get(key), after.get(key)
        if old == new or key == "views.crops":
            continue
        out.append(f"{key} {_short(old)} -> {_short(new)}")
    sizes = [group.size for group in config.views.per_view]
    papers = [group.size for group in paper.views.per_view]
    if sizes != papers:
        out.append(f"views of {_listed(papers)} -> {_listed(sizes)} pixels")
    return out


def _short(value: object) -> str:
    return "none" if value is None else str(value)[:40]


def _listed(sizes: list[int]) -> str:
    counts = {size: sizes.count(size) for size in sizes}
    return " + ".join(f"{count}x{size}" for size, count in counts.items())


def kept_form(out: Path) -> tuple[float, int] | None:
    """Return the width and the epochs of a run that has begun, or None: they are measured once."""
    file = out / RECIPE_FILE
    if not file.exists():
        return None
    kept = recipes.read_yaml(file)
    _, _, width = str(kept.get("arch")).partition(",width=")
    return float(width or 1.0), int(kept["epochs"])


def untrained(config: PretrainConfig) -> tuple[str, ...]:
    """Return the overrides of `own/random` that draw the trunk with which `config` begins."""
    return (
        f"name={json.dumps('random-' + config.name)}",
        f"arch={json.dumps(config.arch)}",
        f"stem={config.stem}",
        f"zero_init_residual={str(config.zero_init_residual).lower()}",
        f"seed={config.seed}",
        f"data.dataset={json.dumps(config.data.dataset)}",
        f"batch_size={config.batch_size}",
        f"views={json.dumps(recipes.to_dict(config)['views'])}",
    )
