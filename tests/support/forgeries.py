"""Forges docs/demo/records: each forgery edits a line or a file of predictions in a copy of a run."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backbench.stats import confidence
from support.records import edit_lines

RECORDS = Path(__file__).parents[2] / "docs" / "demo" / "records"
# Kind of run -> its folder
RUNS = {
    "knn": "knn",
    "linear": "linear",
    "semisup": "semisup/lorac",
    "fewshot": "fewshot",
    "box": "detection/lorac/faster",
}
AP = "bootstrap_bbox_AP"
PROBES = ("knn", "linear", "semisup", "fewshot")
Arrays = dict[str, np.ndarray]


@dataclass
class Record:
    """The first line of a copied run, and where its run lies."""

    run: Path
    line: dict

    def save(self) -> None:
        file = self.run / "results.jsonl"
        lines = file.read_text().splitlines()
        lines[0] = json.dumps(self.line)
        file.write_text("".join(line + "\n" for line in lines))

    def edit_arrays(self, edit: Callable[[Arrays], None]) -> Arrays:
        file = self.run / self.line["provenance"]["predictions"]
        with np.load(file) as kept:
            arrays = dict(kept)
        edit(arrays)
        np.savez(file, **arrays)
        return arrays

    def drop_predictions(self) -> None:
        """Leave nothing from which any number of this run could be computed again."""
        edit_lines(self.run, lambda line: line["provenance"].pop("predictions"))
        del self.line["provenance"]["predictions"]


def copied(kind: str, root: Path) -> Record:
    """Copy one of the demo's runs into a corpus of its own, with the lists of images."""
    below = Path("backbench") / RUNS[kind]
    shutil.copytree(RECORDS / below, root / below)
    if not (root / "lists").exists():
        shutil.copytree(RECORDS / "lists", root / "lists")
    first = (root / below / "results.jsonl").read_text().splitlines()[0]
    return Record(root / below, json.loads(first))


def put(*path: str, to: object) -> Callable[[Record], None]:
    """Set line[path[0]][path[1]]... to a value, or to what a function makes of the present one."""

    def edit(record: Record) -> None:
        place = record.line
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to(place[path[-1]]) if callable(to) else to

    return edit


def arrays(edit: Callable[[Arrays], object]) -> Callable[[Record], None]:
    """Replace arrays of the predictions by those that a function makes of them."""
    return lambda record: record.edit_arrays(lambda kept: kept.update(edit(kept)))


def some_images(kept: Arrays) -> dict:
    """Keep only the images that the first draw has right."""
    right = np.atleast_2d(kept["prediction"])[0] == kept["label"]
    return {
        key: kept[key][..., right]
        for key in ("prediction", "label", "hits5")
        if key in kept
    }


def right_alone(record: Record) -> None:
    """Keep only the right images, with a value, an interval and a number of images that fit them."""
    kept = record.edit_arrays(lambda kept: kept.update(some_images(kept)))
    images = len(kept["label"])
    perfect(record, images)
    record.line["provenance"]["images"]["test"] = images


def labels_of_predictions(record: Record) -> None:
    """Take the predictions for the labels, so that every one is right, with a row that fits them."""
    kept = record.edit_arrays(lambda kept: kept.update(label=kept["prediction"]))
    perfect(record, len(kept["label"]))


def perfect(record: Record, images: int) -> None:
    """Let the row say that all images are right."""
    interval = confidence.of_hits(np.ones(images, bool))
    record.line.update(value=100.0, ci95=interval)
    if record.line["chosen"]:
        record.line["chosen"] = None


def another_row(**changes: object) -> Callable[[Record], None]:
    """Add the line once more, as another number with the same predictions."""

    def edit(record: Record) -> None:
        row = json.dumps({**record.line, **changes})
        with (record.run / "results.jsonl").open("a") as file:
            file.write(row + "\n")

    return edit


def of_another_engine(record: Record) -> None:
    """Add the line as another engine's, whose file of predictions is the same by another path."""
    provenance = dict(record.line["provenance"])
    provenance["predictions"] = "./" + provenance["predictions"]
    add = another_row(engine="detectron2", provenance=provenance)
    add(record)


def other_classes(record: Record) -> None:
    """Write a table of classes with one right image more than the predictions have."""
    with np.load(record.run / record.line["provenance"]["predictions"]) as kept:
        label = kept["label"]
        right = kept["prediction"] == label
    lines = ["class,images,right,accuracy"]
    for c in range(10):
        of_class = label == c
        right_images = (right & of_class).sum()
        if c == 0:
            right_images += 1
        lines.append(f"{c},{of_class.sum()},{right_images},")
    file = record.run / record.line["provenance"]["per_class"]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def raised(low: float, high: float) -> Callable[[list[float]], list[float]]:
    """Move the ends of an interval."""
    return lambda ends: [ends[0] + low, ends[1] + high]


def slightly_raised(value: float) -> float:
    """Move a value by less than an image; below 40 (an AP), by more."""
    return value + 3e-4 + (4 if value < 40 else 0)


def best_of(place: int) -> Callable[[dict], dict]:
    """Choose the learning rate at this place of the scores, from the worst on."""

    def change(chosen: dict) -> dict:
        order = sorted(chosen["scores"], key=chosen["scores"].__getitem__)
        lr = float(order[place])
        used = lr * chosen["batch_size"] / chosen["reference_batch"]
        return {**chosen, "lr": lr, "lr_used": used}

    return change


def scores(change: Callable[[dict, str], dict]) -> Callable[[dict], dict]:
    """Change the scores of a choice, by a function of them and of the key of the best."""

    def edit(chosen: dict) -> dict:
        best = f"{chosen['lr']:g}"
        return {**chosen, "scores": change(chosen["scores"], best)}

    return edit


def _other_than(best: str, of: dict) -> str:
    return next(key for key in of if key != best)


def both_of(*edits: Callable[[Record], None]) -> Callable[[Record], None]:
    """Make one edit after the other."""

    def edit(record: Record) -> None:
        for each in edits:
            each(record)

    return edit


CHOSEN = ("semisup", "linear")
OTHER = "f" * 64
of_other = arrays(lambda a: {"manifest": np.array(OTHER)})
# (kinds, name, edit): each is a forgery of every kind
_OF_KINDS = (
    (RUNS, "value", put("value", to=lambda v: v + 100 / 719)),
    (RUNS, "value a little", put("value", to=slightly_raised)),
    (RUNS, "interval narrower", put("ci95", to=raised(0.4, -0.4))),
    (RUNS, "interval higher", put("ci95", to=raised(0.2, 0.2))),
    (RUNS, "no interval", put("ci95", to=None)),
    (RUNS, "date", put("origin", "recorded", to=time.time() + 86400)),
    (PROBES, "seed", put("seed", to=1)),
    (PROBES, "list", put("provenance", "manifests", "test", to="e" * 64)),
    (PROBES, "images", put("provenance", "images", "test", to=720)),
    (PROBES, "hit", arrays(lambda a: {"prediction": a["label"] + 0 * a["prediction"]})),
    (PROBES, "one label", arrays(lambda a: {"label": np.roll(a["label"], 1)})),
    (PROBES, "right images", arrays(some_images)),
    (PROBES, "another list's", of_other),
    (("knn", *CHOSEN), "right images, all fitting", right_alone),
    (("knn", *CHOSEN), "labels are predictions, all fitting", labels_of_predictions),
    (
        ("knn", *CHOSEN),
        "beside its list another, all fitting",
        both_of(
            labels_of_predictions, put("provenance", "manifest", to=OTHER), of_other
        ),
    ),
    (CHOSEN, "choice of the worst", put("chosen", to=best_of(0))),
    (CHOSEN, "choice off the grid", put("chosen", "lr", to=0.12345)),
    (CHOSEN, "noise of 500 points", put("chosen", "choice_noise", to=500)),
    (CHOSEN, "noise that is no number", put("chosen", "choice_noise", to="x")),
    (CHOSEN, "rate as used", put("chosen", "lr_used", to=lambda lr: 2 * lr)),
    (
        CHOSEN,
        "score above the best",
        put("chosen", to=scores(lambda s, best: {**s, _other_than(best, s): 99.9})),
    ),
    (CHOSEN, "a score less", put("chosen", to=scores(lambda s, best: {best: s[best]}))),
    (
        CHOSEN,
        "score of the best",
        put("chosen", to=scores(lambda s, best: {**s, best: 101.0})),
    ),
)
# Name -> (kind, edit)
FORGERIES = {}
for _kinds, _name, _edit in _OF_KINDS:
    for _kind in _kinds:
        FORGERIES[f"{_kind} {_name}"] = (_kind, _edit)
FORGERIES |= {
    "digest that is none": ("knn", put("checkpoint", to="abc")),
    "digest of no hex": ("knn", put("checkpoint", to="g" * 64)),
    "another digest": ("knn", put("checkpoint", to="0" * 64)),
    "date before all": ("knn", put("origin", "recorded", to=-5.0)),
    "chosen on test by another score": ("linear", put("chosen", "on", to="test")),
    "3 of 20 draws": ("fewshot", put("provenance", "draws", to=lambda d: d[:3])),
    "draws": ("fewshot", put("provenance", "draws", to=lambda d: [d[1], d[0], *d[2:]])),
    "draws kept": ("fewshot", arrays(lambda a: {"values": a["values"] + 1})),
    "predictions of 3 draws": (
        "fewshot",
        arrays(lambda a: {"prediction": a["prediction"][:3]}),
    ),
    "all five best": (
        "semisup",
        arrays(lambda a: {"hits5": np.zeros(len(a["label"]), bool)}),
    ),
    "classes": ("linear", other_classes),
    "duplicate of another seed": ("box", another_row(seed=1)),
    "duplicate of another engine": ("box", of_another_engine),
    "duplicate of another trunk": ("box", another_row(checkpoint="1" * 64)),
    "resamples higher": ("box", arrays(lambda a: {AP: a[AP] + 5})),
    "resamples that agree": ("box", arrays(lambda a: {AP: 0.1 * a[AP] + 14})),
    "fewer resamples": ("box", arrays(lambda a: {AP: a[AP][:99]})),
    "resamples of other images": ("box", arrays(lambda a: {"images": np.array(4000)})),
    "annotations": (
        "box",
        put("provenance", "val", to="scenes_val:0123456789abcdef:40"),
    ),
}


def unbacked(edit: Callable[[Record], None]) -> Callable[[Record], None]:
    """Make the edit where no predictions are left that could speak against it."""

    def both(record: Record) -> None:
        record.drop_predictions()
        edit(record)

    return both


no_interval = put("ci95", to=None)
IMPOSSIBLE = {
    name: (kind, unbacked(edit))
    for name, kind, edit in (
        ("250", "linear", both_of(put("value", to=250.0), no_interval)),
        ("-5", "linear", both_of(put("value", to=-5.0), no_interval)),
        ("no share of 719", "linear", both_of(put("value", to=90.0), no_interval)),
        (
            "no share of 20 x 719",
            "fewshot",
            both_of(put("value", to=50.0), no_interval),
        ),
        ("outside of its interval", "knn", put("ci95", to=[10.0, 20.0])),
        ("interval above 100", "knn", put("ci95", to=lambda ends: [ends[0], 100.5])),
        ("interval of nothing", "knn", put("value", to=None)),
        (
            "top-1 above top-5",
            "semisup",
            another_row(metric="top5", value=0.0, ci95=None),
        ),
        ("AP above AP50", "box", both_of(put("value", to=88.0), no_interval)),
        ("3 draws", "fewshot", put("provenance", "draws", to=lambda d: d[:3])),
    )
}
