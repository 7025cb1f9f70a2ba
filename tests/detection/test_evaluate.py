"""Compares AP with pycocotools' on random detections: in total, per category and of weighted draws."""

import contextlib
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from backbench.detection import evaluate
from backbench.detection.data import reading
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput
from backbench.stats.resampling import AP_COUNT

TASKS = {"bbox": FASTER_RCNN, "segm": MASK_RCNN, "keypoints": KEYPOINT_RCNN}
SIGMAS = [0.107, 0.05, 0.2, 0.107, 0.079]


SIZE = 260  # pixels of an image's side


def rectangle(x, y, w, h):
    """Return the polygon of a box."""
    return [x, y, x + w, y, x + w, y + h, x, y + h]


def run_lengths(x, y, w, h):
    """Return the compressed mask of a box."""
    (code,) = mask.frPyObjects([rectangle(x, y, w, h)], SIZE, SIZE)
    return {"size": [SIZE, SIZE], "counts": code["counts"].decode()}


def make(root, task, *, images=25, empty=(), seed=0):
    """Write a COCO layout with crowds, small and large objects and empty images.

    Returns its split and noisy detections of its objects.
    """
    rng = np.random.default_rng(seed)
    folder = root / "coco"
    (folder / "val2017").mkdir(parents=True)
    (folder / "annotations").mkdir()
    if task.keypoints:
        kind, name = "person_keypoints", "keypoints_coco_2017_val"
        categories = [{"id": 1, "name": "p", "keypoints": list("abcde")}]
    else:
        kind, name = "instances", "coco_2017_val"
        categories = [{"id": i, "name": f"c{i}"} for i in (2, 5, 9)]
    data = {"images": [], "annotations": [], "categories": categories}
    found = []
    for image in range(1, images + 1):
        (folder / "val2017" / f"{image}.jpg").touch()
        data["images"].append(
            {"id": image, "file_name": f"{image}.jpg", "height": SIZE, "width": SIZE}
        )
        if image in empty:
            continue
        for _ in range(int(rng.integers(1, 5))):
            # 1. An object
            x, y = rng.uniform(0, 100, 2)
            w, h = rng.uniform(5, 150, 2)
            category = categories[int(rng.integers(len(categories)))]["id"]
            crowd = int(rng.random() < 0.1)
            points_x = rng.uniform(x, x + w, 5)
            points_y = rng.uniform(y, y + h, 5)
            visibility = rng.integers(0, 3, 5)
            points = np.stack((points_x, points_y, visibility), 1)
            points[points[:, 2] == 0] = 0
            outline = [rectangle(x, y, w, h)]
            if crowd:
                outline = run_lengths(x, y, w, h)
            data["annotations"].append(
                {
                    "id": len(data["annotations"]) + 1,
                    "image_id": image,
                    "category_id": category,
                    "bbox": [x, y, w, h],
                    "area": w * h * 0.8,
                    "iscrowd": crowd,
                    "segmentation": outline,
                    "keypoints": points.flatten().tolist(),
                    "num_keypoints": int((points[:, 2] > 0).sum()),
                }
            )
            # 2. Detections of it, some of another category
            for _ in range(int(rng.integers(0, 4))):
                box = np.array([x, y, w, h]) + rng.normal(0, 3, 4)
                box[2:] = box[2:].clip(2)
                moved = points.copy()
                moved[:, :2] += rng.normal(0, 3, (5, 2))
                said = category if rng.random() < 0.8 else categories[0]["id"]
                found.append(
                    {
                        "image_id": image,
                        "category_id": said,
                        "bbox": box.tolist(),
                        "score": float(np.round(rng.random(), 2)),  # ties on purpose
                        "segmentation": run_lengths(*box),
                        "keypoints": moved.flatten().tolist(),
                    }
                )
    file = folder / "annotations" / f"{kind}_val2017.json"
    file.write_text(json.dumps(data))
    return reading.read(reading.find(name, root), task), found


def oracle(split, found, kind, ids=None):
    """Return pycocotools' evaluation of all images, or of those with these ids."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(split.file))
        keys = ("image_id", "category_id", "score", evaluate.AP_KINDS[kind].shape)
        rows = [{key: d[key] for key in keys} for d in found]
        ev = COCOeval(truth, truth.loadRes(rows), kind)
        ev.params.imgIds = sorted(ids or [r["image_id"] for r in split.records])
        if kind == "keypoints":
            ev.params.kpt_oks_sigmas = np.array(SIGMAS)
        ev.evaluate()
        ev.accumulate()
        ev.summarize()
    return ev


@pytest.mark.parametrize("kind", TASKS)
def test_equals_pycocotools(tmp_path, kind):
    split, found = make(tmp_path, TASKS[kind], empty=(3, 7))
    scores = evaluate.score(split, found, kind, SIGMAS, manifest="m")
    ev = oracle(split, found, kind)
    # In the order of COCOeval.summarize, where keypoints have no small objects
    sizes = ["APm", "APl"] if kind == "keypoints" else ["APs", "APm", "APl"]
    stats = evaluate.AP_KINDS[kind].stats
    names = enumerate(["AP", "AP50", "AP75", *sizes])
    assert stats == {name: place for place, name in names}
    for name, i in evaluate.AP_KINDS[kind].stats.items():
        assert scores.values[name] == pytest.approx(100 * ev.stats[i], abs=1e-9), name
    assert 5 < scores.values["AP"] < 95
    for k, name in enumerate(split.categories):
        precision = ev.eval["precision"][:, :, k, 0, -1]
        reference = 100 * precision[precision > -1].mean()
        assert scores.per_category[name] == pytest.approx(reference, abs=1e-9)


def wrong_about(monkeypatch, image):
    """Let hotcoco lose the detections of an image, as another release might."""
    real = evaluate.matched

    def losing(truth, rows, kind, sigmas):
        kept = [row for row in rows if row["image_id"] != image]
        return real(truth, kept, kind, sigmas)

    monkeypatch.setattr(evaluate, "matched", losing)


@pytest.mark.parametrize("kind", TASKS)
def test_a_hotcoco_that_counts_otherwise_than_pycocotools_is_refused(
    tmp_path, monkeypatch, kind
):
    """In what is scored, and in the rehearsal before a training."""
    split, found = make(tmp_path, TASKS[kind])
    evaluate.rehearse(split, kind, SIGMAS)
    right = evaluate.score(split, found, kind, SIGMAS, manifest="m")
    wrong_about(monkeypatch, 4)
    said = rf"{kind}_AP of its first 100 images is [\d.]+ by hotcoco 1[\d.]+ and"
    with pytest.raises(BadInput, match=said) as caught:
        evaluate.score(split, found, kind, SIGMAS, manifest="m")
    line = str(caught.value)
    assert line.startswith(f"{split.file}: ") and "\n" not in line
    assert f" and {right.values['AP']:.4f} by pycocotools; install another" in line
    if kind != "segm":  # whose rehearsal has empty masks, which find nothing
        with pytest.raises(BadInput, match=said):
            evaluate.rehearse(split, kind, SIGMAS)


def test_pycocotools_scores_the_first_hundred_images_alone(tmp_path, monkeypatch):
    split, found = make(tmp_path, FASTER_RCNN, images=103, empty=(1,))
    wrong_about(monkeypatch, 101)
    late = [d for d in found if d["image_id"] > 100]
    for detections in (found, late):
        assert evaluate.score(split, detections, "bbox", [], manifest=None).values
    wrong_about(monkeypatch, 100)
    with pytest.raises(BadInput, match="by pycocotools"):
        evaluate.score(split, found, "bbox", [], manifest=None)
    # Nor are the objects of others rehearsed
    tried = []

    def matched(truth, rows, kind, sigmas):
        tried.extend(row["image_id"] for row in rows)
        return SimpleNamespace(accumulate=lambda: None)

    monkeypatch.setattr(evaluate, "matched", matched)
    monkeypatch.setattr(evaluate, "check_with_pycocotools", lambda *_: None)
    evaluate.rehearse(split, "bbox", [])
    assert tried == list(range(2, 101))


@pytest.mark.parametrize("kind", TASKS)
def test_interval_is_of_the_same_ap(tmp_path, monkeypatch, kind):
    """A draw's AP is pycocotools' AP of its images, also where they repeat or have no objects."""
    split, found = make(tmp_path, TASKS[kind], images=60, empty=(3,))
    rng = np.random.default_rng(2)
    # More detections than COCOeval takes of an image, in the empty one and in another
    for image in (3, 11):
        for score in rng.random(130):
            found.append({**found[0], "image_id": image, "score": float(score)})
    # 1. Draws: all images, ten halves, one image alone, the empty one alone, repeated images
    drawn = torch.zeros(14, 60, dtype=torch.float64)
    drawn[0] = 1
    drawn[1:11] = torch.from_numpy(rng.random((10, 60)) < 0.5)
    drawn[11, 3] = 1
    drawn[12, 2] = 1
    drawn[13, :12] = torch.tensor([1.0, 0, 2, 0, 1, 3, 1, 0, 2, 1, 1, 0])
    monkeypatch.setattr(evaluate, "drawn", lambda images, manifest: drawn)
    samples = evaluate.score(split, found, kind, SIGMAS, manifest="m").samples
    aps = np.stack([samples[name] for name in ("AP", "AP50", "AP75")], 1) / 100
    # 2. Without repeated images, pycocotools scores some of the images.
    for weights, ours in zip(drawn[:12], aps):
        ids = (1 + weights.nonzero()[:, 0]).tolist()
        reference = oracle(split, found, kind, ids).stats[:3]
        assert ours == pytest.approx(reference, abs=1e-9)
    assert np.isnan(aps[12]).all()
    # 3. With repeated images, it scores a file in which they are repeated.
    data = json.loads(split.file.read_text())
    repeated, detections = written_out(data, found, drawn[13].int().tolist())
    split.file.write_text(json.dumps(repeated))
    ids = [image["id"] for image in repeated["images"]]
    reference = oracle(split, detections, kind, ids).stats[:3]
    assert aps[13] == pytest.approx(reference, abs=1e-9)


def written_out(data, found, counts):
    """Write image i `counts[i]` times under new ids, with its objects and its detections."""
    repeated = {"images": [], "annotations": [], "categories": data["categories"]}
    detections = []
    for image, count in zip(data["images"], counts, strict=True):
        of_image = [a for a in data["annotations"] if a["image_id"] == image["id"]]
        mine = [d for d in found if d["image_id"] == image["id"]]
        for _ in range(count):
            new = len(repeated["images"]) + 1
            repeated["images"].append({**image, "id": new})
            for a in of_image:
                number = len(repeated["annotations"]) + 1
                repeated["annotations"].append({**a, "id": number, "image_id": new})
            detections += [{**d, "image_id": new} for d in mine]
    return repeated, detections


def test_draws_depend_on_the_images_alone(tmp_path, monkeypatch):
    """Two checkpoints share their draws, so that they can be compared draw by draw."""
    split, found = make(tmp_path, FASTER_RCNN)
    a = evaluate.score(split, found, "bbox", [], manifest="m")
    b = evaluate.score(split, found[::2], "bbox", [], manifest="m")
    assert np.corrcoef(a.samples["AP"], b.samples["AP"])[0, 1] > 0.3
    assert a.ci95["AP"][0] < a.values["AP"] < a.ci95["AP"][1]
    # Neither is it of weight how many threads compute them
    for threads in (1, 3):
        monkeypatch.setattr(evaluate.loading, "cores", lambda n=threads: n)
        again = evaluate.score(split, found, "bbox", [], manifest="m")
        np.testing.assert_array_equal(a.samples["AP"], again.samples["AP"])


def test_an_annotation_with_the_id_0_can_be_found(tmp_path):
    """For pycocotools it cannot: it marks a detection by the id of its object, and 0 is none."""
    split, _ = make(tmp_path, FASTER_RCNN)
    data = json.loads(split.file.read_text())
    all_found = []
    for annotation in data["annotations"]:
        annotation["id"] -= 1
        if not annotation["iscrowd"]:
            all_found.append({**annotation, "score": 0.5})
    assert all_found[0]["id"] == 0
    split.file.write_text(json.dumps(data))
    scores = evaluate.score(split, all_found, "bbox", [], manifest=None)
    assert scores.values["AP"] == pytest.approx(100)
    assert 100 * oracle(split, all_found, "bbox").stats[0] < 99


def test_nothing_predicted_or_nothing_to_find_is_undefined(tmp_path):
    split, found = make(tmp_path / "a", FASTER_RCNN)
    nothing = evaluate.score(split, [], "bbox", [], manifest="m")
    assert set(nothing.values.values()) == {None} and nothing.ci95 == {}
    split, _ = make(tmp_path / "b", FASTER_RCNN, images=3, empty=(1, 2, 3))
    empty = evaluate.score(split, found[:3], "bbox", [], manifest="m")
    assert set(empty.values.values()) == {None}
    assert set(empty.ci95.values()) == {None}


def test_first_images_only(tmp_path):
    split, found = make(tmp_path, FASTER_RCNN)
    few = reading.read(reading.find("coco_2017_val_7", tmp_path), FASTER_RCNN)
    assert [r["image_id"] for r in few.records] == list(range(1, 8))
    mine = [d for d in found if d["image_id"] <= 7]
    ev = oracle(split, mine, "bbox", list(range(1, 8)))
    values = evaluate.score(few, mine, "bbox", [], manifest="m").values
    assert values["AP"] == pytest.approx(100 * ev.stats[0])


def test_unknown_dataset_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"coco_2017_vla.*did you mean 'coco_2017_val'"):
        reading.find("coco_2017_vla", tmp_path)


# ---- Smaller parts


def test_draws_have_as_many_images_as_there_are():
    weights = evaluate.drawn(7, "m")
    assert weights.shape == (AP_COUNT, 7)
    assert set(weights.sum(1).tolist()) == {7}
    # Drawn with replacement, evenly
    assert weights.max() > 2 and weights.min() == 0
    assert (weights.mean(0) - 1).abs().max() < 0.2
    assert not torch.equal(evaluate.drawn(7, "n"), weights)


def test_aps_at_ten_overlaps_are_summarised_as_three_numbers():
    aps = torch.arange(20, dtype=torch.float64).reshape(2, 10) / 100
    found = evaluate.summarised(aps)
    assert found["AP"].tolist() == pytest.approx([4.5, 14.5])
    assert found["AP50"].tolist() == pytest.approx([0, 10])
    assert found["AP75"].tolist() == pytest.approx([5, 15])


def test_a_class_without_objects_has_no_ap(tmp_path, monkeypatch):
    """Of three classes the file has objects of two, and one of these is never found."""
    split, _ = make(tmp_path, FASTER_RCNN, images=4, empty=(1, 2, 3, 4))
    data = json.loads(split.file.read_text())
    boxes = [[10, 10, 40, 90], [60, 60, 120, 30]]
    for number, (category, box) in enumerate(zip((2, 9), boxes, strict=True), 1):
        row = {"id": number, "image_id": 3, "category_id": category, "bbox": box}
        data["annotations"].append(row | {"area": box[2] * box[3], "iscrowd": 0})
    split.file.write_text(json.dumps(data))
    found = [{"image_id": 3, "category_id": 2, "bbox": boxes[0], "score": 0.5}]
    # All images, the one with objects twice, and all others
    draws = torch.tensor([[1.0, 1, 1, 1], [0, 0, 2, 0], [1, 1, 0, 1]]).double()
    monkeypatch.setattr(evaluate, "drawn", lambda images, manifest: draws)
    scores = evaluate.score(split, found, "bbox", [], manifest="m")
    assert scores.per_category == {"c2": pytest.approx(100), "c5": None, "c9": 0}
    assert scores.values["AP"] == pytest.approx(50)
    assert scores.samples["AP"].tolist() == pytest.approx([50, 50, np.nan], nan_ok=True)


def test_hotcocos_health_check_is_passed_on(tmp_path):
    split, _ = make(tmp_path, FASTER_RCNN, images=3, empty=(1, 2, 3))
    row = {"bbox": [10.0, 10.0, 40.0, 30.0], "category_id": 1, "iscrowd": 0}
    for record in split.records:
        record["annotations"] = [dict(row)]
    assert evaluate.health(split) == []
    # What our own reading says is not said again
    split.records[1]["annotations"][0]["bbox"] = [SIZE - 9.0, 10.0, 40.0, 30.0]
    assert evaluate.health(split) == []
    split.records[2]["annotations"].append(dict(row))
    (note,) = evaluate.health(split)
    assert note.startswith("hotcoco's health check: ")
    assert "duplicate" in note.casefold()


def test_a_rehearsal_takes_one_object_of_each_of_the_first_images(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate, "REHEARSED", 3)
    split, _ = make(tmp_path, FASTER_RCNN, images=5)
    tried = []
    real = evaluate.matched

    def matched(truth, rows, kind, sigmas):
        tried.append([row["image_id"] for row in rows])
        return real(truth, rows, kind, sigmas)

    monkeypatch.setattr(evaluate, "matched", matched)
    evaluate.rehearse(split, "bbox", [])
    assert tried == [[1, 2, 3]] * 2
    for record in split.records:
        record["annotations"] = []
    evaluate.rehearse(split, "bbox", [])
    assert len(tried) == 2
