"""python tools/protocols_page.py writes docs/protocols.md from configs/transfer.

Each protocol is a row: the keys that it states, over another protocol where it shares the rest with
that. Their sources stand in the files, beside the values. A test holds the page current.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.papers import judging_rules, published  # noqa: E402
from backbench.recipes import config, own_probe  # noqa: E402
from backbench.results import protocol_fingerprints  # noqa: E402
from backbench.runs import atomic  # noqa: E402

PAGE = ROOT / "docs" / "protocols.md"
NOT_SHOWN = ("kind", "protocol", "base", "variants", "sha256")
NO_NUMBER = ("feature_batch", "chunk", "save_minutes")  # defaults that change no number

HEAD = """# Protocols, one by one

Made by `python tools/protocols_page.py` from `configs/transfer`; a test holds it current.

An entry gives the name for `--protocol`, in parentheses the name in its rows, what it scores, and its keys. The file
holds, beside each value, the sentence or line that it comes from (P: the paper, C: its released code). "Over" names the
protocol whose other keys it shares; every other key is at its default. The demo's protocols stand in the files
alone. What the papers leave open is in [choices.md](choices.md); [detection.md](detection.md) has the detectors.

Defaults everywhere: images resized to 256 (bilinear, shorter side), cropped to 224; where views are drawn, crops of 224
with scale 0.08 to 1, ratio 3/4 to 4/3 and flip 0.5; fp32.
"""
COMMON = {  # the defaults that HEAD tells
    "geometry.crop": 224,
    "geometry.interpolation": "bilinear",
    "geometry.resize": 256,
    "geometry.square": False,
    "augment.flip": 0.5,
    "augment.ratio": [0.75, 1.3333333333333333],
    "augment.scale": [0.08, 1],
    "augment.size": 224,
    "precision": "fp32",
}
KINDS = {  # kind -> heading, and why there is one
    "sgd": (
        "Linear probes by SGD",
        "Rates differ by three orders of magnitude between methods: a method is probed by its own"
        " recipe, or all by one grid.",
    ),
    "logreg": (
        "Logistic regression",
        "No learning rate: the optimum is unique, only the penalty is chosen.",
    ),
    "knn": ("Nearest neighbours", "Nothing is trained or chosen: cheap, and it repeats exactly."),
    "fewshot": (
        "Few labels",
        "Draws of labels and test images both vary, and the interval says so.",
    ),
    "class_retrieval": (
        "Retrieval within classes",
        "Test images alone: neither labels of train nor a choice.",
    ),
    "cluster": ("Clustering", "Test images alone; labels are looked at when all is clustered."),
    "attentive": (
        "Attentive probes",
        "The order of trunks depends on the head: this one may look where it likes.",
    ),
    "seg": (
        "Linear segmentation",
        "A frozen map read by one layer; the official val is scored once, and a tenth of train chooses.",
    ),
    "seg_knn": (
        "Segmentation by neighbours",
        "Nothing is trained: which patches look alike, and what their labels say.",
    ),
    "ood": ("ImageNet's heads elsewhere", "Nothing is trained or chosen; a rule is a column."),
    "finetune": (
        "Finetuning and semi-supervised",
        "All layers move: this measures an initialisation.",
    ),
    "analyze": ("Feature analysis", "What the papers' figures draw; nothing is ranked by it."),
}


def text() -> str:
    """Return the whole page."""
    lines = [HEAD]
    rows = dict(_recipes(ROOT / "configs" / "transfer"))
    for kind, (title, why) in KINDS.items():
        lines += [f"## {title}", "", f"{why}{_defaults(kind)}", ""]
        for name, (own, base) in rows.items():
            path = config.find_recipe(name, "transfer")
            if config.read_recipe(path).get("kind", "analyze") == kind and not _of_the_demo(name):
                column, about = judging_rules.protocol_name(name), config.first_sentence(path)
                parts = [f"Over `{base}`." if base else "", f"{about}." if about else ""]
                told = " ".join(filter(None, [*parts, _keys(own, base, kind)]))
                lines.append(f"- `{name}` (`{column}`){_used_by(name)}. {told}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _of_the_demo(name: str) -> bool:
    return name.startswith(("demo_", "tiny_")) or name.endswith(("_demo", "_tiny"))


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
    keys = []
    for key, value in own.items():
        left = _without_defaults(value, key, defaults)
        if left is not None and key not in NOT_SHOWN:
            keys.append(f"{key} {_shown(left)}")
    return "; ".join(keys)


def _without_defaults(value: object, path: str, defaults: Mapping[str, object]) -> object:
    """Return the value without its parts that are at their defaults; None if nothing is left."""
    if isinstance(value, Mapping):
        left = {k: _without_defaults(v, f"{path}.{k}", defaults) for k, v in value.items()}
        return {k: v for k, v in left.items() if v is not None} or None
    return None if path in defaults and defaults[path] == value else value


def _shown(value: object) -> str:
    """A value in a few words: groups in braces, long lists by their ends."""
    if isinstance(value, Mapping):
        inside = (f"{k} {_shown(v)}" for k, v in value.items() if k not in NOT_SHOWN)
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list) and len(value) > 4 and not isinstance(value[0], list):
        return f"{value[0]} ... {value[-1]} ({len(value)} values)"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return '""' if value == "" else str(value)


def _defaults(kind: str) -> str:
    """The keys that every protocol of a kind has where it states nothing else."""
    found = protocol_fingerprints.shipped()["defaults"].get(kind, {})
    shown = []
    for key, value in found.items():
        told = COMMON.get(key) == value or key == "protocol"
        if value not in (None, [], {}, "") and key not in NO_NUMBER and "*" not in key and not told:
            shown.append(f"{key} {_shown(value)}")
    return f" Defaults: {'; '.join(shown)}." if shown else ""


def _used_by(name: str) -> str:
    """The printed tables that a recipe scores, and the methods whose own probe it is."""
    tables: dict[str, dict[str, None]] = {}  # paper -> its tables, each once
    for number in published.rows():
        if judging_rules.recipe(number) == name:
            tables.setdefault(number.paper, {})[published.place_in_paper(number.table)] = None
    scores = ", ".join(f"{paper} {', '.join(places)}" for paper, places in tables.items())
    methods = [m for m, by_dataset in own_probe.BY_METHOD.items() if name in by_dataset.values()]
    used = f"; scores {scores}" if scores else ""
    return used + (f"; own probe of {', '.join(methods)}" if methods else "")


if __name__ == "__main__":
    atomic.write_text(PAGE, text())
    print(PAGE)
