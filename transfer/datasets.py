"""The datasets: one row each, and how each is read from disk. `backbench data` lists and checks them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backbench.errors import BadInput
from backbench.images import ImageList, scan_folder
from transfer import splits
from transfer.splits import Splits

Metric = Literal["top1", "mean_per_class"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    name: str
    classes: int
    sizes: tuple[int | None, int | None, int | None]  # train, val, test; None where val is held out of train
    metric: Metric
    read: Callable[[Path, int], Splits]  # (ROOT, seed of the hold-out)
    top5: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, "top5") if self.top5 else (self.metric,)


def class_folder(name: str) -> Dataset:
    """The row of a class folder ROOT/<name>/{train,val,test}/<class>/<image>; val is optional."""

    def read(root: Path, seed: int) -> Splits:
        return _read_class_folder(name, root, seed)

    return Dataset(name=name, classes=0, sizes=(None, None, None), metric="top1", read=read)


def _read_class_folder(name: str, root: Path, seed: int) -> Splits:
    base = root / name
    if not base.is_dir():
        known = ", ".join(sorted(DATASETS))
        raise BadInput(f"{base}: no such folder; expected {base}/train/<class>/<image>, or one of: {known}")
    parts: dict[str, ImageList] = {}
    for split in ("train", "val", "test"):
        if (base / split).is_dir():
            parts[split] = scan_folder(base / split)
        elif split != "val":
            raise BadInput(f"{base}: no folder '{split}'; expected {base}/{{train,val,test}}/<class>/<image>")
    return splits.with_hold_out(parts["train"], parts["test"], parts.get("val"), seed=seed)


TWELVE: tuple[str, ...] = ()
DATASETS: dict[str, Dataset] = {}


def names(text: str) -> list[str]:
    """`all` (the 12 of LORAC's Table 2) or a comma-separated list."""
    out = list(TWELVE) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not out:
        raise BadInput(f"--datasets '{text}': give names, or `all`")
    return list(dict.fromkeys(out))


def find(name: str) -> Dataset:
    """A row of DATASETS, or that of a class folder of this name."""
    return DATASETS.get(name) or class_folder(name)


def load(name: str, root: Path, *, seed: int = 0) -> Splits:
    """Read and check a dataset: sizes, labels, and that no test image is in training data."""
    dataset = find(name)
    found = dataset.read(root, seed)
    splits.check(name, found)
    if name not in DATASETS:  # official splits may hold known duplicates; `data check` reports them
        splits.check_content(name, found)
    return found


def run(args: argparse.Namespace) -> int:
    raise BadInput("not here yet")
