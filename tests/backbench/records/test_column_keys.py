"""What may stand in one column: single changes to real rows, each of which must show or must not."""

import copy
import json
import re
from dataclasses import replace as changed
from pathlib import Path

import pytest
from support.records import a_result, digest_of, recipe_of

from backbench.board.board import Measurement, fill
from backbench.published.board_rows import add_published
from backbench.recipes import config
from backbench.records import data_manifests
from backbench.records.protocol_fingerprints import of_recipe

_BASES = {  # task, dataset, metric, protocol
    "sgd": ("linear", "cifar10", "top1", "linear-lorac-v1"),
    "demo": ("linear", "digits", "top1", "linear-demo-v1"),
    "logreg": ("logreg", "dtd", "top1", "logreg-v1"),
    "testsel": ("linear", "cifar10", "top1", "linear-lorac-testsel-v1"),
    "lphi": ("linear", "cifar10", "top1", "linear-cllr-cifar-v1-lphi"),
    "analyze": ("analyze", "cifar10", "rankme", "analyze-trunk-32px-v1"),
    "bare": ("fewshot", "pets", "top1", "fewshot-v1"),
    "knn": ("knn", "digits", "top1_k20", "knn-demo-v1"),
    "fewshot": ("fewshot", "pets", "top1", "fewshot-v1"),
    "semisup": ("semi_1pct", "imagenet", "top1", "semisup-v1"),
    "finetune": ("finetune", "cars", "top1", "finetune-v1"),
    "detect": ("mask_rcnn", "coco2017", "segm_AP", "detection-1x-v1"),
    "amp": ("mask_rcnn", "coco2017", "segm_AP", "detection-1x-bf16-v1"),
}
BASES = {
    k: dict(zip(("task", "dataset", "metric", "protocol"), v))
    for k, v in _BASES.items()
}
for _detector in ("detect", "amp"):
    BASES[_detector] |= {"engine": "torchvision", "split": "val"}
MORE = {  # what a row of this kind holds beside its recipe and its lists
    "sgd": {"trunk_unchanged": True},
    # Without a recipe
    "bare": {"draws": [70.0, 71.0, 72.0], "shots": 2, "labelled_from": "train+val"},
    "knn": {"k": 20, "temperature": 0.07, "bank": "train+val"},
    "fewshot": {"shots": 2, "labelled_from": "train+val", "draws": [70.0, 71.0]},
    "detect": {"evaluator": "hotcoco", "config": "mask_rcnn_R_50_FPN_1x"},
}
CHOSEN = {"lr": 1.0, "on": "val", "scores": {"0.1": 60.0, "1": 70.0}}


def base(name):
    chosen = {"sgd": CHOSEN, "semisup": CHOSEN, "testsel": {**CHOSEN, "on": "test"}}
    row = a_result(**BASES[name], chosen=chosen.get(name))
    held = {} if name == "bare" else row.provenance
    provenance = copy.deepcopy({**held, **MORE.get(name, {})})
    provenance["predictions"] = f"predictions/{row.checkpoint[:6]}.npz"
    if name == "amp":
        recipe = dict(recipe_of("detection-1x-v1", row.task))
        mixed = {"SOLVER.AMP.ENABLED": True, "SOLVER.AMP.PRECISION": "bf16"}
        provenance["recipe"] = recipe | mixed
    return changed(row, provenance=provenance)


def mutated(row, where, value):
    """The row with one thing changed: a field, or a path below provenance, chosen or origin."""
    top, *path = where.split("/")
    if not path:
        return changed(row, **{top: value})
    data = copy.deepcopy(getattr(row, top) or {})
    node = data
    for key in path[:-1]:
        node = node[key]
    assert path[-1] not in node or node[path[-1]] != value, (
        "a change that changes nothing"
    )
    node[path[-1]] = value
    return changed(row, **{top: data})


R, P = "provenance/recipe/", "provenance/"
OTHER = digest_of("other")
UNLIKE = [
    # geometry
    ("sgd", R + "geometry/crop", 192),
    ("sgd", R + "geometry/resize", 232),
    ("demo", R + "geometry/resize", 12),
    ("knn", R + "geometry", {"resize": 12, "crop": 8, "interpolation": "bilinear"}),
    ("sgd", R + "augment", None),
    ("sgd", R + "augment/scale", [0.2, 1.0]),
    (
        "demo",
        R + "augment",
        {"size": 32, "scale": [0.08, 1.0], "ratio": [0.75, 1.33], "flip": 0},
    ),
    # recipe
    ("sgd", R + "length/default/iterations", 3000),
    ("sgd", R + "length/dtd/iterations", 50000),
    ("sgd", R + "lr", [0.1, 1.0, 10.0]),
    ("sgd", R + "batch_size", 1024),
    ("sgd", R + "schedule/name", "constant"),
    ("sgd", R + "patience", 5),
    ("sgd", R + "precision", "bf16"),
    ("sgd", R + "a_key_of_tomorrow", 1),
    ("logreg", R + "l2", [1e-6, 1e5, 9]),
    ("knn", R + "temperature", 0.2),
    ("fewshot", R + "shots", 16),
    ("fewshot", R + "draws", 2),
    ("semisup", R + "head_lr", [0.1]),
    ("semisup", R + "parts/1/length/epochs", 300.0),
    ("finetune", R + "parts/100/length/iterations", 100000),
    ("finetune", R + "kind", "sgd"),
    # selection
    ("sgd", R + "select", "test"),
    ("sgd", "chosen/on", "test"),
    ("semisup", "chosen/on", "test"),
    ("testsel", "chosen/on", "val"),
    ("testsel", R + "select", "val"),
    # another head, or its name alone
    ("lphi", R + "head", None),
    ("lphi", R + "optimizer", "sgd"),
    ("lphi", "protocol", "linear-cllr-cifar-v1"),
    ("sgd", R + "head", "lphi"),
    # what a row says beside its recipe, and without one
    ("knn", P + "temperature", 0.2),
    ("fewshot", P + "shots", 16),
    ("bare", P + "shots", 16),
    ("bare", P + "draws", [70.0, 72.0]),
    ("bare", P + "images", {"train": 20, "val": 0, "test": 20}),
    # analysis
    ("analyze", R + "crops/blur_p", 0.5),
    ("analyze", R + "images", 500),
    ("analyze", P + "images", 500),
    ("analyze", P + "manifest", OTHER),
    ("analyze", "split", "train"),
    # data
    ("sgd", P + "manifests/test", OTHER),
    ("sgd", P + "manifests/train", OTHER),
    ("sgd", P + "labelled", OTHER),
    ("sgd", P + "images/train", 500),
    ("sgd", P + "images/test", 50),
    ("sgd", P + "val", "official"),
    ("fewshot", P + "labelled_from", "train"),
    ("semisup", P + "images/train", 128116),
    ("knn", P + "bank", "train"),
    ("sgd", "split", "val"),
    ("sgd", "provenance", {}),
    ("sgd", P + "recipe", {}),
    ("sgd", P + "manifests", {}),
    # engine, detection
    ("detect", "engine", "detectron2"),
    ("detect", "split", "test"),
    ("detect", P + "val", "coco_2017_val:0123456789abcdef:5000"),
    ("detect", P + "train", "coco_2017_train:0123456789abcdef:1000"),
    ("detect", P + "evaluator", "pycocotools"),
    ("detect", P + "recipe", {}),
    ("detect", R + "SOLVER.MAX_ITER", 180000),
    ("detect", R + "TEST.PRECISE_BN.NUM_ITER", 20),
    ("detect", R + "SOLVER.AMP.ENABLED", True),
    ("amp", R + "SOLVER.AMP.PRECISION", "fp16"),
    ("amp", R + "SOLVER.AMP.ENABLED", False),
    ("semisup", R + "parts/1/list/sha256", OTHER),
]
HARMLESS = [
    ("sgd", "seed", 3),
    ("sgd", "name", "renamed"),
    ("sgd", "value", 12.0),
    ("sgd", "origin/hardware", "8 x H200"),
    ("sgd", "origin/code", "0123abcd"),
    ("sgd", "origin/command", "backbench linear x --workers 7 --out elsewhere"),
    ("sgd", "origin/cwd", "/elsewhere"),
    ("sgd", P + "predictions", "predictions/other.npz"),
    ("sgd", P + "notes", ["read from an archive"]),
    ("sgd", R + "save_minutes", 60.0),
    ("sgd", R + "feature_batch", 32),
    ("sgd", R + "momentum", 0.90),
    ("logreg", R + "chunk", 1024),
    ("semisup", "chosen/lr", 0.1),
    ("fewshot", P + "draws", [12.0]),
    ("detect", P + "per_category", "elsewhere.json"),
    ("knn", P + "confusion", "confusion/other.png"),
    ("bare", P + "draws", [60.0, 61.0, 62.0]),
    ("analyze", R + "batch", 1),
    ("analyze", R + "save_minutes", 60.0),
    ("analyze", P + "space", "trunk, 512 dimensions"),
]
assert len(UNLIKE) >= 60


def board_of(*rows):
    return fill([Measurement(row, Path(f"run{n}")) for n, row in enumerate(rows)])


def columns_of(*rows):
    """The column of each row, beside one another on one board."""
    board = board_of(*rows)
    found = []
    for row in rows:
        held = [
            c
            for (checkpoint, c), _ in board.cells.items()
            if checkpoint == row.checkpoint
        ]
        found.append(held[0])
    return found


def test_other_images_under_the_same_names_are_a_column_apart():
    """Most checkpoints' images are unmarked; unknown images are marked only beside known ones."""
    rows = []
    for n, held in enumerate(("1a2b" * 4, "1a2b" * 4, "9f" * 8, None)):
        row = changed(base("sgd"), checkpoint=str(n) * 64)
        rows.append(mutated(row, P + "image_contents", held) if held else row)
    names = [column.name for column in columns_of(*rows)]
    plain = names[0]
    assert names[1] == plain and "~" not in plain
    dataset = base("sgd").dataset
    assert names[2] == plain.replace(f"/{dataset}/", f"/{dataset}:test~images-9f9f/")
    assert names[3] == plain.replace(f"/{dataset}/", f"/{dataset}:test~images-unknown/")
    assert columns_of(rows[3])[0].name == plain


def test_copies_that_list_the_same_images_in_other_orders_share_a_column():
    """A row tells the digests of its lists in the order of paths; older rows tell none."""
    parts = ("train", "val", "test")

    def listed(checkpoint, order, held, **told):
        row = changed(base("sgd"), checkpoint=checkpoint * 64)
        row = mutated(row, P + "manifests", dict.fromkeys(parts, order * 64))
        row = mutated(row, P + "image_contents", held * 16)
        return mutated(row, P + "in_path_order", told) if told else row

    same = {**dict.fromkeys(parts, "5" * 64), "image_contents": "6" * 16}
    archive = listed("1", "a", "1", **same)
    old = listed("2", "a", "1")
    hub = listed("3", "b", "2", **same)
    encoded = listed("4", "b", "3", **{**same, "image_contents": "7" * 16})
    names = [c.name for c in columns_of(archive, old, hub, encoded)]
    assert names[0] == names[1] == names[2] != names[3]
    assert "~images-" in names[3] and "~" not in names[0]
    # Without what it tells, the copy has a column of its own
    alone = [c.name for c in columns_of(archive, old, listed("3", "b", "2"))]
    assert alone[0] == alone[1] != alone[2]
    # Two rows that tell unlike things of one list prove nothing
    liar = listed("5", "a", "1", **dict.fromkeys((*parts, "image_contents"), "8" * 16))
    apart = [c.name for c in columns_of(archive, old, hub, liar)]
    assert apart[0] == apart[1] != apart[2]


@pytest.mark.parametrize(("name", "where", "value"), UNLIKE)
def test_unlike_rows_never_share_a_column(name, where, value):
    row = base(name)
    other = mutated(changed(row, checkpoint="b" * 64), where, value)
    mine, its = columns_of(row, other)
    assert mine != its and mine.name != its.name
    assert columns_of(other, row) == [its, mine], "whichever was found first"
    # and no average over seeds: the same checkpoint's own numbers stay apart too
    same = mutated(row, where, value)
    assert len(board_of(row, same).cells) == 2


@pytest.mark.parametrize(("name", "where", "value"), HARMLESS)
def test_what_decides_nothing_shares_the_column(name, where, value):
    row = base(name)
    if where.endswith("momentum"):
        assert row.provenance["recipe"].pop("momentum") == value, (
            "a row may lack it at its default"
        )
        where = "name"
    other = mutated(
        changed(row, checkpoint="b" * 64), where, value if where != "name" else "x2"
    )
    mine, its = columns_of(row, other)
    assert mine == its
    assert "~" not in mine.name.replace("~unknown", "")


def test_a_copy_of_a_shipped_recipe_meets_no_published_number():
    other = mutated(base("sgd"), R + "geometry/crop", 8)
    board = board_of(other)
    add_published(board)
    (column,) = board.measured_columns()
    assert re.fullmatch(r"linear/cifar10/top1@linear-lorac-v1~[0-9a-f]{4}", column.name)
    assert not [
        row
        for row in board.rows
        if row.source == "published" and board.cell(row, column)
    ]
    board = board_of(base("sgd"))
    add_published(board)
    (column,) = board.measured_columns()
    assert [
        row
        for row in board.rows
        if row.source == "published" and board.cell(row, column)
    ]


def test_names_say_what_is_another():
    def name(where, value, of="sgd"):
        other = changed(base(of), checkpoint="b" * 64)
        return columns_of(base(of), mutated(other, where, value))[1].name

    lorac = "linear/cifar10{}/top1@linear-lorac-v1{}"
    assert name(P + "images/test", 50) == lorac.format(":test~n50000+50", "")
    marked = r"linear/cifar10:test~[0-9a-f]{4}/top1@linear-lorac-v1"
    assert re.fullmatch(marked, name(P + "manifests/test", OTHER))
    assert name("provenance", {}) == lorac.format("", "~unknown")
    assert name("split", "val") == lorac.format(":val", "")
    detected = "mask_rcnn/coco2017:val/segm_AP@detection-1x-v1+torchvision"
    assert columns_of(base("detect"))[0].name == detected


def test_a_protocol_without_a_dataset_keeps_its_name_on_each():
    def mark(protocol, dataset):
        recipe = {**recipe_of(protocol, "semi_1pct"), "dataset": dataset}
        return of_recipe("semi_1pct", protocol, recipe, None)

    assert mark("semisup-own-v1", "cells") is None
    assert mark("semisup-v1", "imagenet") is None
    assert mark("semisup-v1", "cells"), "its list of labels is ImageNet's"


def test_seeds_that_hold_out_other_images_share_a_column():
    def row(checkpoint, seed, drawn):
        of_seed = base("sgd")
        provenance = copy.deepcopy(of_seed.provenance)
        provenance["manifests"]["train"] = digest_of(drawn)
        provenance["manifests"]["val"] = digest_of(drawn + "v")
        return changed(
            of_seed, checkpoint=checkpoint * 64, seed=seed, provenance=provenance
        )

    rows = [row(c, seed, f"seed {seed}") for c in "ab" for seed in range(3)]
    assert len(set(columns_of(*rows))) == 1
    # One seed that drew two lists
    columns = columns_of(*rows, row("c", 1, "other images"))
    assert columns[-1] not in columns[:-1]


def test_rows_of_unknown_protocol_are_compared_by_all_that_they_hold():
    bare = [changed(base("sgd"), checkpoint=c * 64, provenance={}) for c in "ab"]
    assert len({c.name for c in columns_of(*bare)}) == 1
    more = changed(bare[0], checkpoint="c" * 64, provenance={"k": 5})
    grid = changed(
        bare[0], checkpoint="d" * 64, chosen={**CHOSEN, "scores": {"7": 1.0}}
    )
    names = [c.name for c in columns_of(*bare, more, grid)]
    assert len(set(names)) == 3 and all(
        "@linear-lorac-v1~unknown" in name for name in names
    )


def test_a_config_that_is_its_own_name_is_not_marked_twice():
    recipe = dict(recipe_of("detection-1x-v1", "mask_rcnn")) | {"SOLVER.MAX_ITER": 7}
    own = f"detection-{config.fingerprint(recipe)}"
    row = mutated(base("detect"), P + "recipe", json.loads(json.dumps(recipe)))
    assert columns_of(changed(row, protocol=own))[0].protocol == own
    assert columns_of(row)[0].protocol.startswith("detection-1x-v1~")


@pytest.mark.parametrize("task", ["linear", "mask_rcnn", "analyze"])
def test_the_scored_list_is_the_one_that_makes_the_column(task):
    """A list that the column does not tell apart is none that predictions may be of."""
    row = a_result(task=task)
    facts = {"manifest": "b" * 64, "manifests": {"test": "c" * 64}}
    for more in ({"manifest": "b" * 64}, {"manifests": {"test": "c" * 64}}, facts):
        other = changed(row, provenance={**row.provenance, **more})
        same_column = [data_manifests.of_row(r, has_recipe=True) for r in (row, other)]
        same_list = [data_manifests.scored_list(r) for r in (row, other)]
        assert (same_column[0] == same_column[1]) == (same_list[0] == same_list[1])
