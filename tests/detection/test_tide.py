"""What each kind of error costs equals TIDE's rules, written out as loops, and hotcoco's numbers; rows
follow from kept detections, and are verified."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask
from support import own_boxes

from backbench.cli import errors as errors_verb
from backbench.cli.program import main
from backbench.detection import evaluate, tide
from backbench.detection.data import own
from backbench.detection.task_rows import FASTER_RCNN
from backbench.errors import EXIT_FAILED, BadInput
from backbench.records import ap_errors as kept_errors
from backbench.records import predictions, store
from backbench.stats import ap_errors
from backbench.tasks import TASKS

HEIGHT, WIDTH = 100, 120


def scene(seed, *, crowds=False):
    """Return COCO's dataset and results: boxes, and detections that err in every way."""
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(1, 4))
    images = [
        {"id": i, "height": HEIGHT, "width": WIDTH}
        for i in range(1, int(rng.integers(2, 8)))
    ]
    truth = {
        "images": images,
        "categories": [{"id": c, "name": f"c{c}"} for c in range(1, classes + 1)],
        "annotations": [],
    }
    rows = []
    for image in images:
        for _ in range(int(rng.integers(0, 4))):
            box = [*rng.uniform(0, 60, 2), *rng.uniform(10, 40, 2)]
            category = int(rng.integers(1, classes + 1))
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image["id"],
                    "category_id": category,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(crowds and rng.random() < 0.2),
                }
            )
            for _ in range(int(rng.integers(0, 4))):
                near = np.array(box) + rng.normal(0, rng.choice([2, 6, 12]), 4)
                near[2:] = near[2:].clip(3)
                said = category
                if rng.random() < 0.3:
                    said = int(rng.integers(1, classes + 1))
                rows.append(detection(image["id"], said, rng.random(), near))
        for _ in range(int(rng.integers(0, 3))):
            anywhere = [*rng.uniform(0, 60, 2), *rng.uniform(10, 40, 2)]
            said = int(rng.integers(1, classes + 1))
            rows.append(detection(image["id"], said, rng.random(), anywhere))
    return truth, rows


def detection(image, category, score, box):
    return {
        "image_id": image,
        "category_id": category,
        "score": float(score),
        "bbox": [float(side) for side in box],
    }


# ---- TIDE's rules as loops


def overlap(a, b, *, crowd=False):
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    common = max(width, 0) * max(height, 0)
    whole = a[2] * a[3] if crowd else a[2] * a[3] + b[2] * b[3] - common
    return common / whole


def loop_errors(truth, rows):
    """Give each detection its `what`, the object that it finds when mended as `mends`, and each
    object whether it is `missed`."""
    for image in truth["images"]:
        there = [a for a in truth["annotations"] if a["image_id"] == image["id"]]
        objects = [a for a in there if not a["iscrowd"]]
        found = [row for row in rows if row["image_id"] == image["id"]]
        found.sort(key=lambda row: -row["score"])
        taken = set()
        for row in found:
            row["what"] = row["mends"] = None
            same = [a for a in objects if a["category_id"] == row["category_id"]]
            free = [a for a in same if a["id"] not in taken]
            best = max(
                free, key=lambda a: overlap(row["bbox"], a["bbox"]), default=None
            )
            if best and overlap(row["bbox"], best["bbox"]) >= 0.5:
                row["what"] = "hit"
                taken.add(best["id"])
                continue
            for a in there:
                own_crowd = a["iscrowd"] and a["category_id"] == row["category_id"]
                if own_crowd and overlap(row["bbox"], a["bbox"], crowd=True) >= 0.5:
                    row["what"] = "ignored"
        reachable = set(taken)
        for row in found:
            if row["what"]:
                continue
            own_most, own_object = 0.0, None
            other_most, other_object = 0.0, None
            for a in objects:
                share = overlap(row["bbox"], a["bbox"])
                if a["category_id"] == row["category_id"] and share > own_most:
                    own_most, own_object = share, a
                if a["category_id"] != row["category_id"] and share > other_most:
                    other_most, other_object = share, a
            target = None
            if 0.1 <= own_most <= 0.5:
                row["what"], target = "location", own_object
            elif other_most >= 0.5:
                row["what"], target = "class", other_object
            elif own_most >= 0.5:
                row["what"] = "duplicate"
            elif max(own_most, other_most) <= 0.1:
                row["what"] = "background"
            else:
                row["what"] = "both"
            if target and target["id"] not in reachable:
                reachable.add(target["id"])
                row["mends"] = target
        for a in objects:
            a["missed"] = a["id"] not in reachable


def loop_ap50(truth, rows, mended=None):
    """Mend one kind of error, and add up precisions at 101 recalls, class by class."""
    aps = []
    for category in truth["categories"]:
        mine = [
            a
            for a in truth["annotations"]
            if a["category_id"] == category["id"] and not a["iscrowd"]
        ]
        if not mine:
            continue
        if mended == "missed":
            mine = [a for a in mine if not a["missed"]]
        points = []
        for row in rows:
            said, hit = row["category_id"], row["what"] == "hit"
            if row["what"] == "ignored":
                continue
            if row["what"] == mended:
                if row["mends"] is None:
                    continue
                said, hit = row["mends"]["category_id"], True
            if said == category["id"]:
                points.append((row["score"], hit))
        points.sort(key=lambda point: -point[0])
        curve = []
        for n in range(1, len(points) + 1):
            hits = sum(hit for _, hit in points[:n])
            curve.append((hits / max(len(mine), 1), hits / n))
        total = 0.0
        for recall in np.linspace(0, 1, 101):
            if mine:
                total += max((p for r, p in curve if r >= recall), default=0.0)
        aps.append(total / 101)
    return 100 * sum(aps) / len(aps)


@pytest.mark.parametrize("crowds", [False, True])
def test_costs_are_those_of_loops(crowds):
    seen = dict.fromkeys(ap_errors.ERRORS, 0)
    for seed in range(60):
        truth, rows = scene(seed, crowds=crowds)
        if not any(not a["iscrowd"] for a in truth["annotations"]):
            continue
        outcomes = tide.of_rows(truth, rows, "bbox")
        costs = ap_errors.costs(outcomes, np.ones((1, outcomes.images)))
        loop_errors(truth, rows)
        before = loop_ap50(truth, rows)
        assert ap_errors.ap50(outcomes) == pytest.approx(before, abs=1e-9)
        for error, cost in costs.items():
            gain = max(loop_ap50(truth, rows, error) - before, 0)
            assert cost[0] == pytest.approx(gain, abs=1e-9), (seed, error)
            seen[error] += cost[0] > 0
    assert min(seen.values()) > 5


def test_a_resample_is_the_list_with_images_as_often_as_drawn():
    truth, rows = scene(8)
    outcomes = tide.of_rows(truth, rows, "bbox")
    counts = np.array([[n % 3 for n in range(1, outcomes.images + 1)]])
    drawn = ap_errors.costs(outcomes, counts)
    copied = {**truth, "images": [], "annotations": []}
    copies = []
    for image, times in zip(truth["images"], counts[0], strict=True):
        for _ in range(times):
            new = len(copied["images"]) + 1
            copied["images"].append({**image, "id": new})
            for kind, into in (("annotations", copied["annotations"]), ("", copies)):
                for row in truth[kind] if kind else rows:
                    if row["image_id"] == image["id"]:
                        into.append({**row, "image_id": new})
    again = tide.of_rows(copied, copies, "bbox")
    whole = ap_errors.costs(again, np.ones((1, again.images)))
    assert {error: cost[0] for error, cost in drawn.items()} == pytest.approx(
        {error: cost[0] for error, cost in whole.items()}, abs=1e-9
    )
    assert sum(cost[0] for cost in drawn.values()) > 10


class FileOfBoxes:
    file = "boxes.json"


@pytest.mark.parametrize("seed", range(30))
def test_hotcoco_finds_the_same(seed):
    truth, rows = scene(seed, crowds=True)
    if rows and any(not a["iscrowd"] for a in truth["annotations"]):
        tide.check_with_hotcoco(FileOfBoxes, truth, rows, "bbox")


@pytest.mark.parametrize("seed", [1, 6, 13, 17])
def test_hotcoco_finds_the_same_where_scores_are_equal(seed):
    """Each ranks equal scores in its own order, and other errors follow from another order."""
    truth, rows = scene(seed, crowds=True)
    for row in rows:
        row["score"] = round(2 * row["score"]) / 2
    tide.check_with_hotcoco(FileOfBoxes, truth, rows, "bbox")


def test_a_hotcoco_that_counts_otherwise_is_refused(monkeypatch):
    truth, rows = scene(1)
    monkeypatch.setattr(tide, "BESIDE", 0.4)
    with pytest.raises(BadInput, match=r"are 'class' and cost .*; hotcoco has 0"):
        tide.check_with_hotcoco(FileOfBoxes, truth, rows, "bbox")


def test_outlines_overlap_by_their_masks():
    """Two triangles in one box do not overlap: the detection is on background, not a hit."""
    box = [10.0, 10.0, 40.0, 40.0]
    upper = [[10, 10, 50, 10, 10, 50]]
    lower = [[50, 12, 50, 50, 12, 50]]
    (code,) = mask.frPyObjects(lower, HEIGHT, WIDTH)
    truth = {
        "images": [{"id": 1, "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": 1, "name": "c"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "area": 800}
            | {"iscrowd": 0, "segmentation": upper}
        ],
    }
    row = detection(1, 1, 0.5, box) | {"segmentation": code}
    of_boxes = tide.of_rows(truth, [row], "bbox")
    of_masks = tide.of_rows(truth, [row], "segm")
    assert list(of_boxes.fault) == [ap_errors.HIT]
    assert list(of_masks.fault) == [ap_errors.BACKGROUND]
    assert list(of_masks.object_missed) == [1]
    kept = {"segm_fault": of_masks.fault, "segm_object_missed": of_masks.object_missed}
    for error in ap_errors.ERRORS:
        times = int(error in ("background", "missed"))
        assert kept_errors.count(kept, f"segm_{error}") == times


@pytest.mark.parametrize("form", ["polygons", "plain", "compressed"])
def test_outlines_may_be_written_in_three_forms(form):
    """Of two parts, at the right edge of an image that is wider than high."""
    parts = [[90, 10, 118, 10, 118, 40, 90, 40], [90, 60, 118, 60, 118, 95, 90, 95]]
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
    pixels[10:40, 90:118] = pixels[60:95, 90:118] = 1
    code = mask.encode(np.asfortranarray(pixels))
    flat = pixels.T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat)) + 1
    plain = {
        "size": [HEIGHT, WIDTH],
        "counts": np.diff([0, *edges, flat.size]).tolist(),
    }
    outline = {"polygons": parts, "plain": plain, "compressed": code}[form]
    about = {"image_id": 1, "category_id": 1, "bbox": [90.0, 10.0, 28.0, 85.0]}
    truth = {
        "images": [{"id": 1, "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": 1, "name": "c"}],
        "annotations": [
            about | {"id": 1, "area": 1820, "iscrowd": 0, "segmentation": outline}
        ],
    }
    upper = mask.frPyObjects(parts[:1], HEIGHT, WIDTH)[0]
    for found, fault in ((code, ap_errors.HIT), (upper, ap_errors.LOCATION)):
        row = about | {"score": 0.5, "segmentation": found}
        assert list(tide.of_rows(truth, [row], "segm").fault) == [fault]


# ---- rows


def detector(root, name, *, spread, seed, task=FASTER_RCNN):
    """Write the run of a detector of the boxes in ROOT/mine that errs by `spread` pixels."""
    rng = np.random.default_rng(seed)
    _, split = own.read(root / "mine", task)
    found = []
    for record in split.records:
        for a in record["annotations"]:
            for _ in range(3):
                near = np.array(a["bbox"]) + rng.normal(0, spread, 4)
                near[2:] = near[2:].clip(3)
                said = a["category_id"]
                if rng.random() < 0.3:
                    said = 1 - said
                row = detection(record["image_id"], 0, rng.random(), near)
                row["category_id"] = split.ids[said]
                found.append(row)
    manifest = hashlib.sha256(split.fingerprint.encode()).hexdigest()
    scores = evaluate.score(split, found, "bbox", (), manifest=manifest)
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "predictions.json").write_text(json.dumps(found))
    digest = f"{seed:064x}"
    stem = f"{task.name}_torchvision-s0-{digest[:12]}"
    file = predictions.keep(
        run,
        stem,
        manifest=manifest,
        images=len(split.records),
        **{f"bootstrap_bbox_{k}": v for k, v in scores.samples.items()},
    )
    rows = []
    for metric in ("AP", "AP50"):
        row = store.Result(
            checkpoint=digest,
            name=name,
            method="mine",
            arch="resnet18",
            epochs=1,
            task=task.name,
            dataset="mine",
            split="test",
            metric=f"bbox_{metric}",
            value=scores.values[metric],
            ci95=scores.ci95[metric],
            protocol="detect-own-v1",
            engine="torchvision",
            seed=0,
            provenance={"val": split.fingerprint, "train": "t", "predictions": file},
        )
        rows.append(row)
    store.append(run, rows)
    return run


@pytest.fixture(scope="module")
def two_detectors(tmp_path_factory):
    """Two detectors of one folder of boxes; tests write to copies."""
    root = tmp_path_factory.mktemp("two")
    own_boxes.coco(root / "mine")
    detector(root, "good", spread=2, seed=1)
    detector(root, "weak", spread=6, seed=2)
    return root


@pytest.fixture
def boxes(two_detectors, tmp_path):
    return shutil.copytree(two_detectors, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def two_explained(two_detectors, tmp_path_factory):
    """The same with the rows of what errors cost."""
    root = tmp_path_factory.mktemp("explained")
    shutil.copytree(two_detectors, root, dirs_exist_ok=True)
    assert errors(root) == 0
    return root


@pytest.fixture
def explained(two_explained, tmp_path):
    return shutil.copytree(two_explained, tmp_path, dirs_exist_ok=True)


def costs_below(root):
    found, _ = store.read(root)
    return [r for r in found if TASKS[r.task].explains]


def errors(root, *more):
    return main(["errors", str(root / "runs"), "--data", str(root), *more])


def test_rows_of_kept_detections_are_verified(boxes, capsys):
    assert errors(boxes) == 0
    said = capsys.readouterr().out
    rows = costs_below(boxes)
    assert len(rows) == 2 * len(ap_errors.ERRORS)
    for r in rows:
        _, _, error = r.metric.rpartition("_")
        run = boxes / "runs" / r.name
        _, split = own.read(boxes / "mine", FASTER_RCNN)
        kept = json.loads((run / "predictions.json").read_text())
        outcomes = tide.outcomes(split, kept, "bbox")
        whole = ap_errors.costs(outcomes, np.ones((1, outcomes.images)))
        assert r.value == pytest.approx(whole[error][0], abs=1e-9)
        times = (outcomes.fault == ap_errors.ERRORS[error]).sum()
        if error == "missed":
            times = outcomes.object_missed.sum()
        assert r.provenance["errors"] == times
        assert r.task == "faster_rcnn_errors" and r.ci95 is None
        assert f"{r.value:.2f} ({r.provenance['errors']})" in said
    # Rows are added once, and none is left behind
    assert errors(boxes) == 0
    assert len(costs_below(boxes)) == len(rows)
    capsys.readouterr()
    assert main(["verify", str(boxes / "runs")]) == 0
    assert f"{len(rows) + 4} level 2" in capsys.readouterr().out
    # Beside the AP, in columns of their own
    table = boxes / "board.csv"
    assert main(["leaderboard", str(boxes / "runs"), "--csv", str(table)]) == 0
    heads = [
        name for name in table.read_text().split("\n")[0].split(",") if "/" in name
    ]
    assert [name.split("@")[0].rpartition("/")[2] for name in heads] == [
        "bbox_AP",
        "bbox_AP50",
        *(f"bbox_{error}" for error in ap_errors.ERRORS),
    ]


def test_an_ap_at_other_overlaps_is_not_what_errors_cost(boxes):
    """The AP50 may stand before the mean over all overlaps."""
    for results in (boxes / "runs").rglob("results.jsonl"):
        lines = results.read_text().splitlines()
        results.write_text("".join(f"{line}\n" for line in reversed(lines)))
    assert errors(boxes) == 0
    assert len(costs_below(boxes)) == 2 * len(ap_errors.ERRORS)


def test_merged_records_need_no_boxes(explained, capsys):
    merged = explained / "merged"
    assert main(["merge", f"lab={explained / 'runs'}", "--out", str(merged)]) == 0
    capsys.readouterr()
    assert main(["verify", str(merged)]) == 0
    assert "16 level 2" in capsys.readouterr().out


def forged(run: Path, change):
    """Change the arrays of a run's outcomes."""
    (file,) = (run / "predictions").glob("errors-*.npz")
    with np.load(file) as kept:
        arrays = dict(kept)
    change(arrays)
    np.savez_compressed(file, **arrays)


def mended(arrays):
    arrays["bbox_fault"] = np.zeros_like(arrays["bbox_fault"])


def less_often(arrays):
    arrays["bootstrap_bbox_location"] = arrays["bootstrap_bbox_location"] / 2


def elsewhere(arrays):
    arrays["bbox_image"] = arrays["bbox_image"] + 1


def shorter(arrays):
    arrays["bbox_mended"] = arrays["bbox_mended"][:-1]


def without_objects(arrays):
    for name in ("image", "category", "missed"):
        arrays[f"bbox_object_{name}"] = arrays[f"bbox_object_{name}"][:0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (mended, "has more hits than objects"),
        (less_often, "resamples are not those of its detections"),
        (elsewhere, "names images that are not among its 3"),
        (shorter, "does not say what became of each bbox"),
        (without_objects, "has no object"),
    ],
)
def test_a_forged_file_is_named(explained, capsys, change, why):
    forged(explained / "runs" / "good", change)
    predictions._latest.held.clear()
    capsys.readouterr()
    assert main(["verify", str(explained / "runs")]) == EXIT_FAILED
    assert why in capsys.readouterr().out


def test_a_row_with_another_value_is_named(explained, capsys):
    file = explained / "runs" / "good" / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["metric"] == "bbox_location":
            line["value"] += 0.5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main(["verify", str(explained / "runs")]) == EXIT_FAILED
    assert "its detections give" in capsys.readouterr().out


def refused(root, capsys):
    """Return the line that refuses; no row may have been added."""
    before = len(costs_below(root))
    assert errors(root) == 2
    assert len(costs_below(root)) == before
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_other_boxes_are_refused(boxes, capsys):
    file = boxes / "mine" / "annotations" / "instances_test.json"
    about = json.loads(file.read_text())
    about["annotations"][0]["bbox"][2] -= 4
    file.write_text(json.dumps(about))
    said = refused(boxes, capsys)
    assert "these boxes are own_mine_test:" in said
    assert said.endswith(f"or leave out {boxes}/runs/good")


def test_other_detections_than_those_of_the_row_are_refused(boxes, capsys):
    file = boxes / "runs" / "weak" / "predictions.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept[: len(kept) // 2]))
    assert "its kept detections have bbox_AP50" in refused(boxes, capsys)


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_the_same_boxes_with_other_ids_are_refused(boxes, capsys, key):
    """As they have in another layout, whose lists have the same digest."""
    file = boxes / "mine" / "annotations" / "instances_test.json"
    about = json.loads(file.read_text())
    rows = {"image_id": "images", "category_id": "categories"}[key]
    for row in about[rows]:
        row["id"] += 50
    for row in about["annotations"]:
        row[key] += 50
    file.write_text(json.dumps(about))
    said = refused(boxes, capsys)
    assert re.search(
        rf"predictions.json: no {key} \d is in .*/instances_test.json", said
    )
    assert "measure it again" in said


@pytest.mark.parametrize("text", ["[1]", "{}", "[{", '[{"score": 1}]'])
def test_damaged_detections_are_refused(boxes, capsys, text):
    (boxes / "runs" / "weak" / "predictions.json").write_text(text)
    assert "weak/predictions.json" in refused(boxes, capsys)


def test_runs_without_detections_are_left_out(boxes, capsys, caplog):
    (boxes / "runs" / "weak" / "predictions.json").unlink()
    assert errors(boxes) == 0
    assert "weak: left out: its detections were not kept" in caplog.text
    assert {r.name for r in costs_below(boxes)} == {"good"}
    (boxes / "runs" / "good" / "predictions.json").unlink()
    capsys.readouterr()
    assert errors(boxes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in ("weak", "good"):
        assert f"{name}: left out: its detections were not kept; measure it" in line


def test_tables_and_columns_are_told_apart(boxes, capsys):
    """By protocol, if there are several; by run, where two checkpoints share a name."""
    assert errors(boxes) == 0
    assert capsys.readouterr().out.startswith("Faster R-CNN on mine, bbox:\n")
    results = boxes / "runs" / "weak" / "results.jsonl"
    lines = results.read_text().splitlines()
    results.write_text("".join(f"{line}\n" for line in lines if "_errors" not in line))
    first = results.read_text()
    results.write_text(first.replace("detect-own-v1", "detect-own-v1~ab12"))
    assert errors(boxes) == 0
    said = capsys.readouterr().out
    for protocol in ("detect-own-v1", "detect-own-v1~ab12"):
        assert f"Faster R-CNN on mine, bbox, {protocol}, torchvision:\n" in said
    results.write_text(first.replace('"name": "weak"', '"name": "good"'))
    assert errors(boxes) == 0
    said = capsys.readouterr().out
    assert f"(1) {boxes}/runs/good\n(2) {boxes}/runs/weak\n" in said
    assert re.search(r"points of AP50 +\(1\) good +\(2\) good +difference", said)


def test_a_detector_that_found_nothing_has_no_errors(boxes, capsys, caplog):
    (boxes / "runs" / "weak" / "predictions.json").write_text("[]")
    assert errors(boxes) == 0
    assert "weak: left out: it detected nothing" in caplog.text


def test_without_data_the_boxes_that_are_needed_are_named(boxes, capsys, monkeypatch):
    monkeypatch.delenv("DETECTRON2_DATASETS", raising=False)
    assert main(["errors", str(boxes / "runs")]) == 2
    assert "give --data ROOT with ROOT/mine (or" in capsys.readouterr().err


def test_a_folder_without_detectors_is_refused(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert main(["errors", str(tmp_path / "runs")]) == 2
    assert "measure one by `backbench detect`" in capsys.readouterr().err


# ---- overlaps exactly at the limits


def one_image(objects, found):
    """Return the outcomes in one image of objects (class, box) or (class, box, crowd), and of
    detections (class, score, box)."""
    rows = []
    for number, (category, box, *crowd) in enumerate(objects, 1):
        about = {"id": number, "image_id": 1, "category_id": category}
        rows.append(about | {"bbox": box, "area": 1, "iscrowd": int(any(crowd))})
    truth = {
        "images": [{"id": 1, "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": c, "name": f"c{c}"} for c in (1, 2)],
        "annotations": rows,
    }
    detections = [detection(1, c, score, box) for c, score, box in found]
    return tide.of_rows(truth, detections, "bbox")


WHOLE, HALF, TENTH = [0, 0, 10, 20], [0, 0, 10, 10], [0, 0, 10, 2]


@pytest.mark.parametrize(
    ("category", "box", "fault", "mended"),
    [
        (1, HALF, ap_errors.HIT, ap_errors.NO_CLASS),
        (1, [0, 0, 10, 9.9], ap_errors.LOCATION, 0),
        (1, TENTH, ap_errors.LOCATION, 0),
        (1, [0, 0, 10, 1.9], ap_errors.BACKGROUND, ap_errors.NO_CLASS),
        (2, HALF, ap_errors.CLASS, 0),
        (2, [0, 0, 10, 9.9], ap_errors.BOTH, ap_errors.NO_CLASS),
        (2, TENTH, ap_errors.BACKGROUND, ap_errors.NO_CLASS),
        (2, [0, 0, 10, 2.1], ap_errors.BOTH, ap_errors.NO_CLASS),
    ],
)
def test_a_half_finds_and_a_tenth_is_beside(category, box, fault, mended):
    outcomes = one_image([(1, WHOLE)], [(category, 0.7, box)])
    assert (list(outcomes.fault), list(outcomes.mended)) == ([fault], [mended])
    assert list(outcomes.category) == [category - 1]
    found = fault in (ap_errors.HIT, ap_errors.LOCATION, ap_errors.CLASS)
    assert list(outcomes.object_missed) == [int(not found)]
    assert list(outcomes.object_category) == [0]


def test_a_second_find_of_a_half_is_a_fault_of_location():
    found = [(1, 0.9, WHOLE), (1, 0.8, HALF), (1, 0.7, [0, 0, 10, 11])]
    outcomes = one_image([(1, WHOLE)], found)
    assert list(outcomes.fault) == [
        ap_errors.HIT,
        ap_errors.LOCATION,
        ap_errors.DUPLICATE,
    ]
    assert set(outcomes.mended) == {ap_errors.NO_CLASS}


def test_half_of_a_detection_in_a_crowd_of_its_class_is_ignored():
    crowd = (1, [0, 0, 5, 20], True)
    outcomes = one_image([crowd, (1, [60, 60, 9, 9])], [(1, 0.9, HALF), (2, 0.8, HALF)])
    assert list(outcomes.fault) == [ap_errors.IGNORED, ap_errors.BACKGROUND]
    assert list(outcomes.object_missed) == [1]
    outcomes = one_image([crowd], [(1, 0.9, [0, 0, 10.1, 10])])
    assert list(outcomes.fault) == [ap_errors.BACKGROUND]


def test_of_equal_objects_the_last_is_found():
    outcomes = one_image([(1, WHOLE), (1, WHOLE), (2, WHOLE)], [(1, 0.9, WHOLE)])
    assert list(outcomes.object_missed) == [1, 0, 1]
    assert list(outcomes.object_category) == [0, 0, 1]


def test_the_hundred_surest_of_each_class_are_looked_at():
    """As COCO does. The one that finds the object is the least sure of its class."""
    others = [(1, 0.5 + n / 1000, [60, 60, 9, 9]) for n in range(99)]
    sure = [(2, 0.1, WHOLE)]
    outcomes = one_image([(1, WHOLE)], [(1, 0.2, WHOLE), *others, *sure])
    assert len(outcomes.fault) == 101
    assert (outcomes.fault == ap_errors.HIT).sum() == 1
    outcomes = one_image(
        [(1, WHOLE)], [(1, 0.2, WHOLE), *others, (1, 0.3, [60, 60, 9, 9]), *sure]
    )
    assert len(outcomes.fault) == 101
    assert (outcomes.fault == ap_errors.CLASS).sum() == 1
    assert not (outcomes.fault == ap_errors.HIT).any()


def test_equal_scores_are_in_the_order_of_images():
    truth, _ = scene(1)
    truth["images"] = [{"id": n, "height": HEIGHT, "width": WIDTH} for n in (1, 2, 3)]
    truth["annotations"] = []
    rows = [
        detection(n, 1, score, WHOLE) for n, score in ((3, 0.5), (2, 0.9), (1, 0.5))
    ]
    outcomes = tide.of_rows(truth, rows, "bbox")
    assert list(outcomes.image) == [1, 0, 2]
    assert outcomes.images == 3


def test_a_run_without_objects_is_left_out_with_a_word(boxes):
    """Its AP50 is undefined, so no error costs any of it."""
    measured = errors_verb._measured([boxes / "runs"])
    undefined, *others = sorted(measured)
    for kind, one in measured[undefined].items():
        nothing = dataclasses.replace(one.result, value=None, ci95=None)
        measured[undefined][kind] = one._replace(result=nothing)
    explained, left_out = errors_verb.explain(measured, boxes)
    assert [one.run for one in explained] == others
    (said,) = left_out
    assert said.startswith(f"{undefined}: left out: its AP50 is undefined")


def test_the_folder_of_boxes_may_be_the_one_one_stands_in(boxes, monkeypatch):
    monkeypatch.chdir(boxes / "mine")
    assert main(["errors", "../runs", "--data", "."]) == 0
