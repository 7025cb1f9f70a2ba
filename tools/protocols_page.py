"""Write docs/protocols.md from configs/transfer: `python tools/protocols_page.py`.

A protocol's entry has the keys that it states, and names the protocol that it takes the others from,
if there is one. The sources of the values are in the files of configs/transfer. A test holds the
page current.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.published import judging_rules, published  # noqa: E402
from backbench.recipes import config  # noqa: E402
from backbench.records import protocol_fingerprints  # noqa: E402
from backbench.runs import atomic  # noqa: E402

PAGE = ROOT / "docs" / "protocols.md"
NOT_SHOWN = ("kind", "protocol", "base", "variants", "sha256")
NO_NUMBER = ("feature_batch", "chunk", "save_minutes")  # defaults that change no number

HEAD = """# Protocols, one by one

A protocol says how a number is measured: which images, which head, which rates. `backbench linear X --protocol NAME`
measures by it, and `k=5` after NAME changes a key. [detection.md](detection.md) has the detectors' protocols, and
[choices.md](choices.md) says what was chosen where a paper leaves something open.

Each entry below has

- the name for `--protocol` and, in brackets, the name in its rows;
- the printed tables and figures that it scores;
- "Over `NAME`" if it shares all other keys with another protocol;
- its keys, as a command takes them. C is an author's released code.

Keys that an entry does not name are at their defaults. Images are resized to 256 pixels (shorter side, bilinear) and
cropped to 224. Augmented views are crops of 224 pixels (bilinear) with scale 0.08 to 1, ratio 3/4 to 4/3 and flip 0.5.
All is computed in fp32. What is trained has batch_size and reference_batch 256, init_std 0.01, momentum 0.9,
weight_decay 0, a cosine schedule without warm-up, and select val. Defaults of one kind stand below its heading.

`python tools/protocols_page.py` makes this page from `configs/transfer`, whose files have the source of each value, and
the demo's protocols.
"""
# The defaults that HEAD tells
COMMON = {
    "geometry.crop": 224,
    "geometry.interpolation": "bilinear",
    "geometry.resize": 256,
    "geometry.square": False,
    "augment.flip": 0.5,
    "augment.interpolation": "bilinear",
    "augment.ratio": [0.75, 1.3333333333333333],
    "augment.scale": [0.08, 1],
    "augment.size": 224,
    "precision": "fp32",
    "batch_size": 256,
    "reference_batch": 256,
    "init_std": 0.01,
    "momentum": 0.9,
    "weight_decay": 0,
    "schedule.name": "cosine",
    "schedule.warmup": 0,
    "select": "val",
    "train_score": False,
}
# kind -> its heading, and a sentence below it
KINDS = {
    "sgd": (
        "Linear probes by SGD",
        "Each method is probed by its own recipe, or all of them by one grid: their best"
        " rates differ by three orders of magnitude.",
    ),
    "logreg": (
        "Logistic regression",
        "The optimum is unique; only the penalty is chosen.",
    ),
    "knn": ("Nearest neighbours", "Nothing is trained or chosen."),
    "fewshot": ("Few labels", "The interval is over draws of labels and test images."),
    "label_curve": (
        "Label curves",
        "Few labels at several numbers of them; each number is a column. Intervals are over"
        " draws and test images.",
    ),
    "layers": (
        "The best layer",
        "Logistic regression on each layer and pooling; val chooses one. The usual reading stands"
        " beside it.",
    ),
    "multilabel": (
        "Several labels an image",
        "Each class against all others; val chooses one penalty for all. Metrics are the mean AP"
        " by area and by 11 points.",
    ),
    "svm": (
        "Several labels an image by SVM",
        "Each class against all others by LIBLINEAR; folds of train + val choose a cost for each.",
    ),
    "loaders": (
        "Loaders",
        "Nearest neighbours of one trunk by several loaders; each is a column, and none is chosen.",
    ),
    "class_retrieval": (
        "Retrieval within classes",
        "It needs test images alone; nothing is chosen.",
    ),
    "cluster": (
        "Clustering",
        "It needs test images alone; labels are used for the score only.",
    ),
    "attentive": ("Attentive probes", "A head pools the patch tokens."),
    "seg": ("Linear segmentation", "One layer reads a frozen map."),
    "seg_knn": (
        "Segmentation by neighbours",
        "Nothing is trained: a patch gets the labels of similar patches.",
    ),
    "ood": (
        "ImageNet's heads elsewhere",
        "Nothing is trained or chosen; each rule is a column.",
    ),
    "finetune": ("Finetuning and semi-supervised", "All layers are trained."),
    "analyze": (
        "Feature analysis",
        "It measures what the papers' figures draw, and is not ranked. `crops` are MoCo"
        " v2's.",
    ),
}


def text() -> str:
    """Return the whole page. SystemExit where a recipe's kind has no heading."""
    recipes = dict(_recipes(ROOT / "configs" / "transfer"))
    kind_of = {}
    for name in recipes:
        path = config.find_recipe(name, "transfer")
        kind_of[name] = config.read_recipe(path).get("kind", "analyze")
        if kind_of[name] not in KINDS:
            raise SystemExit(
                f"{path}: kind '{kind_of[name]}' has no heading; give it one in KINDS"
                " (tools/protocols_page.py)"
            )
    lines = [HEAD]
    for kind, (title, why) in KINDS.items():
        lines += [f"## {title}", "", f"{why}{_defaults(kind)}", ""]
        for name, (own, base) in recipes.items():
            path = config.find_recipe(name, "transfer")
            of_kind = kind_of[name] == kind
            of_the_demo = re.search(r"^(demo|tiny)_|_(demo|tiny)$", name)
            if of_kind and not of_the_demo:
                lines.append(_entry(name, path, own, base, kind))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _recipes(folder: Path) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yield (name, (own keys, name of the recipe below it)), a file's variants after the file."""
    for file in sorted(folder.glob("*.yaml")):
        data = config.read_yaml(file)
        variants = data.pop("variants", {})
        yield file.stem, (data, "")
        for name, own in variants.items():
            yield name, (own, str(own.get("base", file.stem)))


def _entry(name: str, path: Path, own: Mapping[str, Any], base: str, kind: str) -> str:
    """Return the line of one protocol."""
    column = judging_rules.protocol_name(name)
    told = []
    if base:
        told.append(f"Over `{base}`.")
    about = config.first_sentence(path)
    if about:
        told.append(f"{about}.")
    keys = _keys(own, base, kind)
    if keys:
        told.append(keys)
    return f"- `{name}` (`{column}`){_used_by(name)}. {' '.join(told)}"


def _used_by(name: str) -> str:
    """Return the printed tables that a recipe scores."""
    tables: dict[str, None] = {}  # a set that keeps its order
    for number in published.rows():
        if judging_rules.recipe(number) == name:
            tables[published.grid_name(number.paper, number.table)] = None
    return f"; scores {', '.join(tables)}" if tables else ""


# ---- keys, as a command takes them


def _keys(own: Mapping[str, Any], base: str, kind: str) -> str:
    """Return the keys that are not at their defaults. A recipe over another one has no defaults:
    what it states differs from the other."""
    defaults = {} if base else protocol_fingerprints.shipped()["defaults"].get(kind, {})
    left = _without_defaults(own, "", defaults)
    return _code(_flat(left)) if isinstance(left, Mapping) else ""


def _defaults(kind: str) -> str:
    """Return the keys that every protocol of a kind has unless it states another value."""
    found = protocol_fingerprints.shipped()["defaults"].get(kind, {})
    shown = []
    for key, value in found.items():
        told = COMMON.get(key) == value or key == "protocol" or key.startswith("crops.")
        empty = value in (None, [], {}, "")
        if not told and not empty and key not in NO_NUMBER and "*" not in key:
            shown.append((key, value))
    return f" Defaults: {_code(shown)}." if shown else ""


def _without_defaults(
    value: object, path: str, defaults: Mapping[str, object]
) -> object:
    """Return the value without its parts that are at their defaults; None if nothing is left."""
    if isinstance(value, Mapping):
        above = f"{path}." if path else ""
        left = {}
        for key, inner in value.items():
            kept = _without_defaults(inner, f"{above}{key}", defaults)
            if kept is not None:
                left[key] = kept
        return left or None
    is_default = path in defaults and defaults[path] == value
    return None if is_default else value


def _flat(keys: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) as a command line has them: geometry.crop, 32."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif key not in NOT_SHOWN:
            yield f"{above}{key}", value


def _code(keys: Iterable[tuple[str, object]]) -> str:
    words = " ".join(f"{key}={_shown(value)}" for key, value in keys)
    return f"`{words}`" if words else ""


def _shown(value: object) -> str:
    """Return a value as a command line has it."""
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return str(value) or '""'


if __name__ == "__main__":
    atomic.write_text(PAGE, text())
    print(PAGE)
