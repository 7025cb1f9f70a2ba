"""python tools/protocols_page.py: writes docs/protocols.md from configs/transfer and configs/detection.

Each protocol as it stands there, with the sentence or line that each number comes from; before them
what tells those of a kind apart. A test holds the page current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.papers import judging_rules, published  # noqa: E402
from backbench.recipes import config, own_probe  # noqa: E402
from backbench.runs import atomic  # noqa: E402

PAGE = ROOT / "docs" / "protocols.md"
NOT_COMPARED = ("kind", "protocol", "bootstrap", "workers", "save_minutes")
WIDEST = 60  # characters of a value in a table

HEAD = """# Protocols, one by one

Made by `python tools/protocols_page.py` from `configs/transfer` and `configs/detection`; a test holds it current.

A protocol is one yaml: `backbench linear --protocol NAME` reads it, its own `protocol:` names the column of the
leaderboard, and a row whose recipe is not the shipped one of that name stands apart ([results.md](results.md)). Unlike
numbers never share a column. What the papers leave open is in [choices.md](choices.md), the sets and how a rate is
chosen in [datasets.md](datasets.md), the detectors in [detection.md](detection.md).

Before the protocols of a kind stands in which keys they differ; an empty cell is the default.
"""
# Kind -> heading and why there is one
KINDS = {
    "sgd": (
        "Linear probes by SGD",
        "What linear structure the frozen features have, as each paper measures it. Rates differ by three"
        " orders of magnitude between methods, so a method is probed by its own recipe, or all of them by"
        " one grid.",
    ),
    "logreg": (
        "Logistic regression",
        "The probe without a learning rate: its optimum is unique, and only the penalty is chosen.",
    ),
    "knn": (
        "Nearest neighbours",
        "Nothing is trained and nothing chosen, so it is cheap and repeats exactly.",
    ),
    "fewshot": (
        "Few labels",
        "What is left when labels are few. Draws of labels and test images both vary, and the interval"
        " says so.",
    ),
    "finetune": (
        "Finetuning and semi-supervised",
        "All layers move, so this measures an initialisation rather than features.",
    ),
    "analyze": (
        "Feature analysis",
        "What the papers' figures draw of the features; nothing is ranked by it.",
    ),
}


def text() -> str:
    lines = [HEAD]
    names = sorted(config.recipe_names("transfer"))
    resolved = {name: config.read_recipe(config.find_recipe(name, "transfer")) for name in names}
    for kind, (title, why) in KINDS.items():
        own = {name: data for name, data in resolved.items() if data.get("kind", "analyze") == kind}
        lines += [f"## {title}", "", why, "", *_apart(own), ""]
        for name, data in own.items():
            lines += [*_one(name, config.find_recipe(name, "transfer"), data), ""]
    lines += [
        "## Detection",
        "",
        "Faster, Mask and Keypoint R-CNN, all layers trained; AP on val2017.",
        "",
    ]
    detectors = sorted((ROOT / "configs" / "detection").glob("[!_]*.yaml"))
    lines += [*_apart({path.stem: config.read_detector(path) for path in detectors}), ""]
    for path in sorted((ROOT / "configs" / "detection").glob("*.yaml")):
        lines += [f"### {path.stem}", "", *_yaml(path), ""]
    return "\n".join(lines).rstrip() + "\n"


def _apart(own: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table of the keys in which the protocols of a kind differ."""
    keys = dict.fromkeys(key for data in own.values() for key in data)
    told = [
        k for k in keys if k not in NOT_COMPARED and len({_said(d, k) for d in own.values()}) > 1
    ]
    if len(own) < 2 or not told:
        return
    few = told if len(told) <= 8 else told[:8]
    yield "| | " + " | ".join(f"`{key}`" for key in few) + " |"
    yield "|---" * (len(few) + 1) + "|"
    for name, data in own.items():
        yield f"| `{name}` | " + " | ".join(_said(data, key) for key in few) + " |"


def _said(data: Mapping[str, Any], key: str) -> str:
    found = _plain(data[key]).replace("|", "\\|") if key in data else ""
    return found if len(found) <= WIDEST else f"{found[: WIDEST - 3]}..."


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list) and len(value) > 8:
        return f"{value[0]} to {value[-1]}, {len(value)} of them"
    if isinstance(value, list):
        return " ".join(map(_plain, value))
    return str(value)


def _one(name: str, path: Path, data: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield f"In rows: `{data['protocol']}`.{_scores(name)}{_own(name)}"
    yield ""
    yield from _yaml(path)


def _scores(name: str) -> str:
    """Which printed tables it scores."""
    found = {}
    for number in published.rows():
        if judging_rules.recipe(number) == name:
            found[f"{number.paper} Table {number.table}".replace("Table Fig.", "Fig. ")] = True
    return f" Scores {', '.join(found)}." if found else ""


def _own(name: str) -> str:
    """Which methods are probed by it under `--protocol own`."""
    methods = [m for m, of_set in own_probe.BY_METHOD.items() if name in of_set.values()]
    return f" `--protocol own` of {', '.join(methods)}." if methods else ""


def _yaml(path: Path) -> Iterator[str]:
    yield f'```yaml title="{path.relative_to(ROOT).as_posix()}"'
    yield path.read_text().rstrip()
    yield "```"


if __name__ == "__main__":
    atomic.write_text(PAGE, text())
    print(PAGE)
