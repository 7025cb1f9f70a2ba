"""Reasons why a number stands on the board but is not ranked, each by its row alone."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbench.records.result_line import Result
from backbench.untrusted import yamls

# Their test images are those of imagenet, by other labels or of some classes
_IMAGENETS = (
    "imagenet100",
    *(f"imagenet-{name}" for name in ("real", "val", "val-a", "val-r")),
)


def flaw(result: Result) -> str:
    """The reason in words, or "": an erratum, a fit that has not converged, or a trunk that was
    trained on the very test images."""
    for entry in errata().get(result.task, ()):
        part, _, key = entry["lacks"].partition(".")
        if key not in (getattr(result, part) or {}):
            return f"{entry['id']}: {entry['what']}; measure it again"
    chosen = result.chosen or {}
    if chosen.get("converged") is False:
        gradient = chosen.get("gradient")
        left = (
            f": its gradient is {gradient:.1e}" if isinstance(gradient, float) else ""
        )
        return f"the fit has not converged{left}, and more iterations would move this number"
    pictures = "imagenet" if result.dataset in _IMAGENETS else result.dataset
    for name in _trained_on(result):
        dataset, _, split = name.partition(":")
        if dataset in (pictures, result.dataset) and split == (result.split or "test"):
            return f"its trunk was trained on {name}: it has seen the test images"
    return ""


def remark(result: Result) -> str:
    """Note a trunk trained on a collection that this dataset's images came from (related.yaml)."""
    related = _related().get(result.dataset, {})
    for name in _trained_on(result):
        if source := related.get(name.partition(":")[0]):
            return f"its trunk was trained on {name}, which may hold these test images ({source})"
    return ""


@functools.cache
def errata() -> Mapping[str, list[dict[str, Any]]]:
    """The entries of errata.yaml by task."""
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
