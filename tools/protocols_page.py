"""python tools/protocols_page.py writes docs/protocols.md from configs/transfer and configs/detection.

Each protocol is a row: the keys that it states, each with its source, over another protocol where it
shares the rest with that. A test holds the page current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.papers import judging_rules, published  # noqa: E402
from backbench.recipes import config, own_probe  # noqa: E402
from backbench.results import protocol_fingerprints  # noqa: E402
from backbench.runs import atomic  # noqa: E402

PAGE = ROOT / "docs" / "protocols.md"
NOT_SHOWN = ("kind", "protocol", "base", "_BASE_", "variants", "VERSION", "sha256")
NO_NUMBER = ("feature_batch", "chunk", "save_minutes")  # defaults that change no number
DETECTOR_BASE = "_base_rcnn_fpn"

HEAD = """# Protocols, one by one

Made by `python tools/protocols_page.py` from `configs/transfer` and `configs/detection`; a test holds it current.

`backbench linear --protocol NAME` reads a recipe of `configs/transfer`. Its own `protocol:` names the column of the
leaderboard, and a row whose recipe is not the shipped one of that name stands apart ([results.md](results.md)). What
the papers leave open is in [choices.md](choices.md), the sets and how a rate is chosen in [datasets.md](datasets.md),
the detectors in [detection.md](detection.md).

A row has the keys that its file states, each with the sentence or line that it comes from in brackets (P: the paper, C:
its released code). "Over" names the protocol whose other keys it shares; a key that no row states is at its default.
What the demo measures the embedded digits by (`*_demo`, `*_tiny`, `demo_*`, `tiny_*`) is of no paper and stands in the
files alone.
"""
KINDS = {  # kind -> heading, and why there is one
    "sgd": (
        "Linear probes by SGD",
        "The linear structure of the frozen features, as each paper measures it. Rates differ by"
        " three orders of magnitude between methods: a method is probed by its own recipe, or all of them by one grid.",
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
    "finetune": (
        "Finetuning and semi-supervised",
        "All layers move: this measures an initialisation.",
    ),
    "analyze": ("Feature analysis", "What the papers' figures draw; nothing is ranked by it."),
}


@dataclass
class Stated:
    """A recipe's own lines: its comment, its base and its keys with their sources."""

    about: str
    base: str
    keys: dict[str, tuple[Any, str]]  # key -> value, the comment beside it


def text() -> str:
    """Return the whole page."""
    lines = [HEAD]
    rows = dict(_stated_in(ROOT / "configs" / "transfer"))
    for kind, (title, why) in KINDS.items():
        lines += [
            f"## {title}",
            "",
            why,
            "",
            *_defaults(kind),
            "| protocol | states |",
            "|---|---|",
        ]
        for name, stated in rows.items():
            data = config.read_recipe(config.find_recipe(name, "transfer"))
            if data.get("kind", "analyze") == kind and not _of_the_demo(name):
                column = judging_rules.protocol_name(name)
                lines.append(f"| `{name}`, in rows `{column}`{_used_by(name)} | {_cell(stated)} |")
        lines.append("")
    base = (ROOT / "configs" / "detection" / f"{DETECTOR_BASE}.yaml").read_text().rstrip()
    lines += [
        "## Detection",
        "",
        "Faster, Mask and Keypoint R-CNN, all layers trained; AP on val2017. Most configs stand on this one:",
        "",
        f'```yaml title="configs/detection/{DETECTOR_BASE}.yaml"\n{base}\n```',
        "",
        "| config | states |",
        "|---|---|",
    ]
    for name, stated in _stated_in(ROOT / "configs" / "detection"):
        if name != DETECTOR_BASE and not _of_the_demo(name):
            column = re.match(r"protocol: (\S+) ?", stated.about)
            in_rows = f", in rows `{column[1]}`" if column else ""
            stated.about = stated.about[column.end() if column else 0 :]
            lines.append(f"| `{name}`{in_rows} | {_cell(stated)} |")
    return "\n".join(lines).rstrip() + "\n"


def _of_the_demo(name: str) -> bool:
    return name.startswith(("demo_", "tiny_")) or name.endswith(("_demo", "_tiny"))


def _stated_in(folder: Path) -> Iterator[tuple[str, Stated]]:
    """Yield the recipes of a folder, variants after the file that they stand in."""
    for file in sorted(folder.glob("*.yaml")):
        own, _, family = file.read_text().partition("\nvariants:\n")
        data = config.read_yaml(file)
        variants = data.pop("variants", {})
        yield file.stem, _stated(own, data, "")
        # A variant's comment stands above its name, its keys below
        for part in re.findall(r"(?:  #.*\n)*  \w+:.*\n(?:(?:    .*)?\n)*", family + "\n"):
            name = re.search(r"(?m)^  (\w+):", part)[1]  # type: ignore[index]
            yield name, _stated(part, variants[name], file.stem)


def _stated(lines: str, data: Mapping[str, Any], family: str) -> Stated:
    """Read these lines of YAML, whose values are `data`."""
    above = re.match(r"(?:\s*#.*\n?)*", lines)[0]  # type: ignore[index]
    about = re.sub(r"\s+", " ", re.sub(r"(?m)^\s*#", " ", above)).strip()
    bases = data.get("base", data.get("_BASE_", family))
    base = str(bases).removesuffix(".yaml")
    # The comments beside a group's keys are the group's
    sources: dict[str, list[str]] = {}
    key = ""
    margin = "    " if family else ""
    for line in lines[len(above) :].splitlines():
        if top := re.match(rf'{margin}"?([\w.]+)"?:', line):
            key = top[1]
        if comment := re.search(r"\s#\s+(.*)$", line):
            sources.setdefault(key, []).append(comment[1])
    keys = {k: (v, "; ".join(sources.get(k, ()))) for k, v in data.items() if k not in NOT_SHOWN}
    return Stated(about, base, keys)


def _cell(stated: Stated) -> str:
    keys = []
    for key, (value, source) in stated.keys.items():
        keys.append(f"{key} {_shown(value)}" + (f" [{source}]" if source else ""))
    parts = [f"Over `{stated.base}`." if stated.base else "", stated.about, "; ".join(keys)]
    return " ".join(part for part in parts if part).replace("|", "\\|")


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


def _defaults(kind: str) -> list[str]:
    """The keys that every protocol of a kind has where it states nothing else."""
    found = protocol_fingerprints.shipped()["defaults"].get(kind, {})
    shown = []
    for key, value in found.items():
        if value not in (None, [], {}, "") and key not in NO_NUMBER and "*" not in key:
            shown.append(f"{key} {_shown(value)}")
    return [f"Defaults: {'; '.join(shown)}.", ""] if shown else []


def _used_by(name: str) -> str:
    """The printed tables that a recipe scores, and the methods whose own probe it is."""
    tables = {}
    for number in published.rows():
        if judging_rules.recipe(number) == name:
            tables[f"{number.paper} Table {number.table}".replace("Table Fig.", "Fig. ")] = True
    methods = [m for m, by_dataset in own_probe.BY_METHOD.items() if name in by_dataset.values()]
    scores = f"; scores {', '.join(tables)}" if tables else ""
    return scores + (f"; `--protocol own` of {', '.join(methods)}" if methods else "")


if __name__ == "__main__":
    atomic.write_text(PAGE, text())
    print(PAGE)
