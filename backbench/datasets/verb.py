"""`backbench data`: what is there, whether it is right, and SimCLR's lists."""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backbench import config
from backbench.datasets import catalog, splits
from backbench.errors import BadInput
from backbench.images.files import ArrayList, ImageList
from backbench.runs import atomic


def run(args: argparse.Namespace) -> int:
    """The verb `data`."""
    if args.action == "list":
        _list(args.data)
        return 0
    if args.action == "fetch-splits":
        _fetch(args.out)
        return 0
    return _check(args.name, args.data, args.record)


def _list(root: Path) -> None:
    line = "{:<12} {:>7} {:>9} {:>6} {:>6}  {:<14} {:<8} {}"
    print(line.format("name", "classes", "train", "val", "test", "metric", "on disk", "licence"))
    for row in catalog.DATASETS.values():
        try:
            row.base(root)
            where = "found"
        except BadInput:
            where = "missing"
        train, val, test = ("-" if n is None else n for n in row.sizes)
        val = "held" if row.sizes[1] is None else val
        print(line.format(row.name, row.classes, train, val, test, row.metric, where, row.licence))
        if where == "missing":
            print(f"{'':<12} get {row.get}; it belongs in {root / row.name}")
    print("Any other name is a class folder: ROOT/NAME/{train,val,test}/<class>/<image>.")


def _check(name: str, root: Path, record: bool) -> int:
    """Print what is there and everything that is wrong; 1 when something is."""
    dataset = catalog.find(name)
    found = dataset.read(dataset.base(root), 0)
    splits.check(name, found)
    catalog.all_there(found)
    if not record:
        catalog.compare_record(name, root, found, 0)
    problems = catalog.odd_sizes(dataset, found)
    print(
        f"{name}: {len(found.train.classes)} classes, {found.train.classes[0]} .. {found.train.classes[-1]}"
    )
    for note in found.notes:
        print(f"{name}: {note}")
    by_content: dict[str, dict[str, str]] = {}
    for which, images in found.items():
        print(f"{name} {which}: {len(images)} images, sha256 of the list {splits.digest(images)}")
        empty = [
            images.classes[label]
            for label in range(len(images.classes))
            if label not in set(images.labels)
        ]
        if empty:
            problems.append(f"{which} has no image of {len(empty)} classes, '{empty[0]}' first")
        twice = [path for path, count in Counter(images.paths).items() if count > 1]
        if twice:
            problems.append(f"{which} lists {len(twice)} images twice, {twice[0]} first")
        contents, unreadable = _read_all(images)
        problems += [f"{which}: unreadable {line}" for line in unreadable[:5]]
        if len(unreadable) > 5:
            problems.append(f"{which}: {len(unreadable) - 5} more unreadable images")
        groups = Counter(contents.values())
        copies = sum(count - 1 for count in groups.values() if count > 1)
        if copies:
            problems.append(f"{which} holds {copies} copies of other images of it")
        by_content[which] = {content: path for path, content in contents.items()}
    for a, b in (("train", "test"), ("val", "test"), ("train", "val")):
        shared = sorted(by_content[a].keys() & by_content[b].keys())
        if shared:
            problems.append(
                f"{a} and {b} share {len(shared)} images: {by_content[a][shared[0]]} is {by_content[b][shared[0]]}"
            )
    for line in problems:
        print(f"{name}: PROBLEM: {line}")
    if record:
        atomic.write_json(
            catalog.record_file(name, root), {"seed": 0, "splits": catalog.digests(found)}
        )
        print(f"{name}: recorded in {catalog.record_file(name, root)}")
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: all right")
    return 1 if problems else 0


def _read_all(images: ImageList) -> tuple[dict[str, str], list[str]]:
    """Path -> sha256 of the content, and a line per image that cannot be decoded."""

    def read(index: int) -> tuple[str, str, str | None]:
        path = images.paths[index]
        if isinstance(images, ArrayList):
            return path, hashlib.sha256(images.pixels[index].tobytes()).hexdigest(), None
        try:
            images.open(index)
        except BadInput as error:
            return path, splits.file_digest(images.file(index)), str(error)
        return path, splits.file_digest(images.file(index)), None

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(read, range(len(images))))
    return {path: content for path, content, _ in rows}, [error for _, _, error in rows if error]


LISTS_URL = "https://raw.githubusercontent.com/google-research/simclr/master/imagenet_subsets/{percent}percent.txt"


def _fetch(out: Path) -> None:
    """SimCLR's lists, verified before they are written."""
    import urllib.error
    import urllib.request

    parts = config.read_recipe(config.find_recipe("semisup", "transfer"))["parts"]
    for percent, part in parts.items():
        wanted = part["list"]
        url, file = LISTS_URL.format(percent=percent), out / f"{percent}percent.txt"
        if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == wanted["sha256"]:
            print(f"{file}: there already, {wanted['lines']} lines")
            continue
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise BadInput(
                f"{url}: cannot be fetched ({error}); copy the file to {file} by other means"
            ) from None
        if hashlib.sha256(data).hexdigest() != wanted["sha256"]:
            raise BadInput(
                f"{url}: not the published list (its sha256 differs); nothing was written"
            )
        atomic.write_bytes(file, data)
        print(f"{file}: {wanted['lines']} lines")
