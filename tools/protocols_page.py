"""python tools/protocols_page.py writes docs/protocols.md from configs/transfer. A protocol's row
has the keys that it states, over another protocol if it shares the rest. Their sources stand in the
files. A test holds the page current."""

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
COMMON = {  # the defaults that HEAD tells
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
KINDS = {  # kind -> heading, and why there is one
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
    """Return the whole page."""
    lines = [HEAD]
    rows = dict(_recipes(ROOT / "configs" / "transfer"))
    for kind, (title, why) in KINDS.items():
        lines += [f"## {title}", "", f"{why}{_defaults(kind)}", ""]
        for name, (own, base) in rows.items():
            path = config.find_recipe(name, "transfer")
            of_the_demo = re.search(r"^(demo|tiny)_|_(demo|tiny)$", name)
            if (
                config.read_recipe(path).get("kind", "analyze") == kind
                and not of_the_demo
            ):
                column, about = (
                    judging_rules.protocol_name(name),
                    config.first_sentence(path),
                )
                parts = [
                    f"Over `{base}`." if base else "",
                    f"{about}." if about else "",
                ]
                told = " ".join(filter(None, [*parts, _keys(own, base, kind)]))
                lines.append(f"- `{name}` (`{column}`){_used_by(name)}. {told}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _recipes(folder: Path) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yield each recipe's own keys and the recipe below it, variants after their file."""
    for file in sorted(folder.glob("*.yaml")):
        data = config.read_yaml(file)
        variants = data.pop("variants", {})
        yield file.stem, (data, "")
        for name, own in variants.items():
            yield name, (own, str(own.get("base", file.stem)))


def _keys(own: Mapping[str, Any], base: str, kind: str) -> str:
    """The keys that are not at their defaults."""
    defaults = {} if base else protocol_fingerprints.shipped()["defaults"].get(kind, {})
    left = _without_defaults(own, "", defaults)
    return _code(_flat(left)) if isinstance(left, Mapping) else ""


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


def _without_defaults(
    value: object, path: str, defaults: Mapping[str, object]
) -> object:
    """Return the value without its parts that are at their defaults; None if nothing is left."""
    if isinstance(value, Mapping):
        above = f"{path}." if path else ""
        left = {
            k: _without_defaults(v, f"{above}{k}", defaults) for k, v in value.items()
        }
        return {k: v for k, v in left.items() if v is not None} or None
    return None if path in defaults and defaults[path] == value else value


def _shown(value: object) -> str:
    """A value as a command line has it."""
    return (
        ",".join(map(_shown, value)) if isinstance(value, list) else str(value) or '""'
    )


def _defaults(kind: str) -> str:
    """The keys that every protocol of a kind has where it states nothing else."""
    found = protocol_fingerprints.shipped()["defaults"].get(kind, {})
    shown = []
    for key, value in found.items():
        told = COMMON.get(key) == value or key == "protocol" or key.startswith("crops.")
        if (
            value not in (None, [], {}, "")
            and key not in NO_NUMBER
            and "*" not in key
            and not told
        ):
            shown.append((key, value))
    return f" Defaults: {_code(shown)}." if shown else ""


def _used_by(name: str) -> str:
    """The printed tables that a recipe scores."""
    scored = [
        number for number in published.rows() if judging_rules.recipe(number) == name
    ]
    tables = dict.fromkeys(
        published.grid_name(number.paper, number.table) for number in scored
    )
    return f"; scores {', '.join(tables)}" if tables else ""


if __name__ == "__main__":
    atomic.write_text(PAGE, text())
    print(PAGE)
