"""A result to write, and many of them."""

import dataclasses
import functools
import hashlib
import json

from backbench.datasets.catalog import DATASETS
from backbench.recipes import config
from backbench.records import store
from backbench.records.data_manifests import DETECTION_SIZES
from backbench.records.store import Result
from backbench.tasks import TASKS


def a_result(**changes):
    """A row of a linear probe on the demo's digits; its interval and what it holds follow."""
    row = {
        "checkpoint": "a" * 64,
        "name": "x",
        "method": "simclr",
        "arch": "resnet18",
        "epochs": 2,
        "task": "linear",
        "dataset": "digits",
        "split": "test",
        "metric": "top1",
        "value": 91.25,
        "ci95": (90.0, 92.5),
        "protocol": "linear-demo-v1",
        **changes,
    }
    if "ci95" not in changes:
        value = row["value"]
        row["ci95"] = None
        if value is not None:
            row["ci95"] = (max(value - 1.25, 0), min(value + 1.25, 100))
    if "provenance" not in row:
        row["provenance"] = held(row["task"], row["dataset"], row["protocol"])
        # 91.25% is a share of so many images, or of a number that the row does not say.
        images = row["provenance"].get("images")
        if isinstance(images, dict) and images["test"] % 400:
            row["provenance"]["images"] = dict.fromkeys(images)
    return Result(**row)


def held(task, dataset, protocol):
    """What a real row holds of its recipe and lists: the shipped one of that name, or a lab's."""
    recipe = recipe_of(protocol, task)
    if TASKS[task].detects:
        counts = DETECTION_SIZES.get(dataset, (40, 20))
        files = [f"{dataset}:{digest_of(dataset)[:16]}:{count}" for count in counts]
        return {"recipe": recipe, "train": files[0], "val": files[1]}
    known = DATASETS.get(dataset)
    train, val, test = known.sizes if known else (400, 100, 200)
    if task == "analyze":
        return {
            "recipe": recipe,
            "manifest": digest_of(f"{dataset} test"),
            "images": test or 200,
        }
    if TASKS[task].percent and recipe.get("parts"):
        labelled = recipe["parts"][str(TASKS[task].percent)]["list"] or {}
        train = labelled.get("lines")
    images = {
        "train": 1000 if train is None else train,
        "val": val or 0,
        "test": test or 200,
    }
    return {
        "recipe": recipe,
        "manifests": {split: digest_of(f"{dataset} {split}") for split in images},
        "images": images,
        "image_contents": None,
        "val": "official" if val else "held out of train",
        "pixels": {},
        "labelled": digest_of(f"{dataset} train val"),
    }


def rows_of(folder):
    return [row for file in store.files_below(folder) for row in store.read_file(file)]


def edit_lines(folder, edit):
    """Every line of the results below `folder`, as `edit` leaves it."""
    for file in store.files_below(folder):
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        for line in lines:
            edit(line)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def checkpoint_header(path, digest, **provenance):
    """A checkpoint file, as far as the judge reads it."""
    about = {"digest": digest, "provenance": provenance}
    meta = {"format": "backbench-checkpoint", "about": json.dumps(about)}
    header = json.dumps({"__metadata__": meta}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def recipe_of(protocol, task):
    kind = TASKS[task].kind
    shipped = shipped_recipes().get((protocol, kind or task))
    return shipped or {"kind": kind, "protocol": protocol}


@functools.cache
def shipped_recipes():
    """(name, what it measures) -> resolved recipe, as a row of it holds it."""
    from backbench.detection import dialect as detection
    from backbench.detection import protocol, task_rows
    from backbench.transfer.analysis.protocol import AnalyzeConfig
    from backbench.transfer.probes.ood import RULES
    from backbench.transfer.protocols import all_kinds, load_protocol

    found = {}
    for name in config.recipe_names("transfer"):
        if name.startswith("analyze"):
            analysis = config.load(AnalyzeConfig, name, kind="transfer")
            for space in ("trunk", "projector"):
                found[analysis.name(space), "analyze"] = config.to_dict(analysis)
            continue
        recipe = load_protocol(name, all_kinds())
        recipes = [recipe]
        if recipe.kind == "ood":
            recipes = [dataclasses.replace(recipe, rule=rule) for rule in RULES]
        for each in recipes:
            found[each.name, each.kind] = config.to_dict(each)
    for path in (config.configs_dir() / detection.KIND).glob("[!_]*.yaml"):
        given = detection.shipped(path)
        task = task_rows.task_of(given).name
        found[protocol.protocol(given), task] = protocol.decisive(given)
    return found


def append_many(run, number, count, together):
    """Append so many long rows, one at a time, with the seeds from 1000 times `number` on; begin when
    all writers are `together`, a barrier."""
    together.wait(timeout=300)
    for i in range(count):
        seed = 1000 * number + i
        row = a_result(seed=seed, chosen={"text": "x" * 2000}, provenance={})
        store.append(run, [row])
