"""Reasons why a number stands on the board but is not ranked, each by its row alone."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbench.records.result_line import Result
from backbench.untrusted import yamls

# Datasets whose test images are those of imagenet, with other labels or of some classes
_IMAGENETS = (
    "imagenet100",
    "imagenet-real",
    "imagenet-val",
    "imagenet-val-a",
    "imagenet-val-r",
)


def flaw(result: Result) -> str:
    """Return the reason in words, or "" if there is none."""
    # 1. An erratum: the row lacks what every row has since the fault was mended.
    for entry in errata().get(result.task, ()):
        part, _, key = entry["lacks"].partition(".")
        if key not in (getattr(result, part) or {}):
            return f"{entry['id']}: {entry['what']}; measure it again"
    # 2. A fit that has not converged.
    chosen = result.chosen or {}
    if chosen.get("converged") is False:
        gradient = chosen.get("gradient")
        left = ""
        if isinstance(gradient, float):
            left = f": its gradient is {gradient:.1e}"
        if chosen.get("scores"):
            # Of several fits any may be the one that stopped, and it may not be the chosen one
            return (
                f"a fit has not converged{left}, and more iterations may move this number or choose"
                " another fit"
            )
        return f"the fit has not converged{left}, and more iterations would move this number"
    # 3. A trunk that was trained on the very test images, perhaps under another dataset's name.
    datasets = [result.dataset]
    if result.dataset in _IMAGENETS:
        datasets.append("imagenet")
    for name in _trained_on(result):
        dataset, _, split = name.partition(":")
        if dataset in datasets and split == (result.split or "test"):
            return f"its trunk was trained on {name}: it has seen the test images"
    return ""


def in_short(why: str) -> str:
    """Return a flaw without its details: `a fit has not converged`."""
    return re.split(": |, ", why, maxsplit=1)[0]


def remark(result: Result) -> str:
    """Note a trunk trained on a collection that this dataset's images came from (related.yaml)."""
    related = _related().get(result.dataset, {})
    for name in _trained_on(result):
        source = related.get(name.partition(":")[0])
        if source:
            return f"its trunk was trained on {name}, which may hold these test images ({source})"
    return ""


@functools.cache
def errata() -> Mapping[str, list[dict[str, Any]]]:
    """Return the entries of errata.yaml by task."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for entry in yamls.read(Path(__file__).with_name("errata.yaml")):
        for task in entry["tasks"]:
            by_task.setdefault(task, []).append(entry)
    return by_task


@functools.cache
def _related() -> Mapping[str, Mapping[str, str]]:
    return dict(yamls.read(Path(__file__).with_name("related.yaml")))


def _trained_on(result: Result) -> list[str]:
    return list(result.facts.get("trained_on") or ())
