"""Tests MoCo's detectors on the Detectron2 engine: C4 with the extra norm, VOC's files and its AP."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from PIL import Image
from support.detection_runs import built, near_its_checkpoint, run_of_config

from backbench.datasets.readers import VOC07_CLASSES
from backbench.detection import evaluate, lint, train_net, voc_ap
from backbench.detection.data import reading
from backbench.detection.data.split import join, training_records
from backbench.detection.protocol import protocol
from backbench.detection.task_rows import FASTER_RCNN, MASK_RCNN
from backbench.errors import BadInput

pytest.importorskip(
    "detectron2", reason="Detectron2 is not installed: `make detectron2`"
)

from backbench.detection.engine_detectron2_backbones import OwnResNet


def element(tag, *content):
    return f"<{tag}>{''.join(content)}</{tag}>"


def annotation_of(number):
    """Return the annotation file of an image with a dog and a car, which is difficult if odd."""
    objects = []
    for name, difficult in (("dog", 0), ("car", number % 2)):
        box = element(
            "bndbox",
            element("xmin", str(10 + number)),
            element("ymin", "1"),
            element("xmax", str(60 + number)),
            element("ymax", "50"),
        )
        about = (
            element("name", name),
            element("pose", "x"),
            element("truncated", "0"),
            element("difficult", str(difficult)),
        )
        objects.append(element("object", *about, box))
    sides = (element("width", "100"), element("height", "80"), element("depth", "3"))
    return element("annotation", element("size", *sides), *objects)


@pytest.fixture
def voc(tmp_path):
    """Write six images a year in VOC's layout."""
    rng = np.random.default_rng(0)
    for year in (2007, 2012):
        root = tmp_path / f"VOC{year}"
        for folder in ("ImageSets/Main", "Annotations", "JPEGImages"):
            (root / folder).mkdir(parents=True)
        names = [f"{year}{i:02}" for i in range(6)]
        (root / "ImageSets/Main/trainval.txt").write_text("\n".join(names[:3]))
        (root / "ImageSets/Main/test.txt").write_text("\n".join(names[3:]))
        for i, name in enumerate(names):
            pixels = rng.integers(0, 255, (80, 100, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"JPEGImages/{name}.jpg")
            (root / f"Annotations/{name}.xml").write_text(annotation_of(i))
    return tmp_path


def test_records_are_detectron2s(voc):
    from detectron2.data.datasets.pascal_voc import load_voc_instances

    split = reading.read(reading.find("voc_2007_trainval", voc), FASTER_RCNN)
    theirs = load_voc_instances(str(voc / "VOC2007"), "trainval", VOC07_CLASSES)
    for a, b in zip(split.records, theirs, strict=True):
        for key in ("file_name", "image_id", "height", "width"):
            assert a[key] == b[key], key
        for x, y in zip(a["annotations"], b["annotations"], strict=True):
            left, top, width, height = x["bbox"]
            assert [left, top, left + width, top + height] == y["bbox"]
            assert x["category_id"] == y["category_id"]


def test_several_years_are_joined(voc):
    year_2007 = reading.read(reading.find("voc_2007_trainval", voc), FASTER_RCNN)
    year_2012 = reading.read(reading.find("voc_2012_trainval", voc), FASTER_RCNN)
    both = join([year_2007, year_2012])
    assert len(both.records) == 6
    assert both.name == "voc_2007_trainval+voc_2012_trainval"


def test_another_task_and_missing_images_are_refused(voc):
    test = reading.find("voc_2007_test", voc)
    with pytest.raises(BadInput, match="VOC has boxes only"):
        reading.read(test, MASK_RCNN)
    gone = max(test.folder.iterdir())
    gone.unlink()
    with pytest.raises(
        BadInput, match=f"1 of 3 images of test.txt are missing, first {gone.name}"
    ):
        reading.read(test, FASTER_RCNN)


def moved(text):
    """Put every object a thousand pixels to the right."""
    return re.sub(r"(?<=<xm..>)\d+", lambda x: str(int(x.group()) + 1000), text)


def sides_for_corners(text):
    """Write a width of 3 and a height of 2 pixels in place of the second corner."""
    text = re.sub(r"(?<=<xmax>)\d+", "3", text)
    return re.sub(r"(?<=<ymax>)\d+", "0", text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (moved, "none of 6 boxes touches its image; first image 200703: "),
        (sides_for_corners, "no box has a width and a height; .* corners xmin, ymin"),
    ],
)
def test_boxes_in_another_format_are_refused(voc, change, words):
    for file in (voc / "VOC2007" / "Annotations").iterdir():
        file.write_text(change(file.read_text()))
    with pytest.raises(BadInput, match=words):
        reading.read(reading.find("voc_2007_test", voc), FASTER_RCNN)


def test_perfect_and_missing_detections(voc):
    split = reading.read(reading.find("voc_2007_test", voc), FASTER_RCNN)
    exact = []
    for record in split.records:
        for a in record["annotations"]:
            row = {"image_id": record["image_id"], "category_id": a["category_id"]}
            exact.append({**row, "bbox": a["bbox"], "score": 0.9})
    scores = voc_ap.score(split, exact, None)
    assert scores.per_category["dog"] == pytest.approx(100)
    # Two of the twenty classes are there.
    assert scores.values["AP"] == pytest.approx(2 * 100 / 20)
    assert scores.ci95 == {}
    assert split.part == "test"
    assert split.dataset == "voc2007"
    none = voc_ap.score(split, [], None)
    assert set(none.values.values()) == {None}


def test_a_detection_that_overlaps_by_the_threshold_misses(voc):
    """As in VOC's evaluator: a half of the object is no hit at 0.5."""
    split = reading.read(reading.find("voc_2007_test", voc), FASTER_RCNN)
    found = []
    for record in split.records:
        for a in record["annotations"]:
            x, y, w, h = a["bbox"]
            row = {"image_id": record["image_id"], "category_id": a["category_id"]}
            found.append({**row, "bbox": [x, y, w, h / 2], "score": 0.9})
    assert (w, h) == (51, 50)
    assert voc_ap.score(split, found, None).values["AP50"] == 0
    samples = voc_ap.bootstrap(split, voc_ap.lines_by_label(found), "m")
    assert not samples["AP50"].any()


@pytest.mark.parametrize("year", [2007, 2012])
def test_the_interval_is_of_the_evaluators_ap(voc, monkeypatch, year):
    split = reading.read(reading.find(f"voc_{year}_trainval", voc), FASTER_RCNN)
    rng = np.random.default_rng(year)
    found = []
    for record in split.records:
        for a in record["annotations"]:
            for _ in range(4):
                x, y, w, h = np.array(a["bbox"]) + rng.normal(0, 4, 4)
                label = rng.choice([a["category_id"], VOC07_CLASSES.index("dog")])
                found.append(
                    {
                        "image_id": record["image_id"],
                        "category_id": int(label),
                        "bbox": [x, y, max(w, 2), max(h, 2)],
                        "score": float(np.round(rng.random(), 1)),  # ties on purpose
                    }
                )
    scores = voc_ap.score(split, found, "m")
    assert scores.values["AP50"] > 0
    for name, value in scores.values.items():
        low, high = scores.ci95[name]
        assert low <= value <= high
    lines = voc_ap.lines_by_label(found)
    once = torch.ones(1, len(split.records), dtype=torch.float64)
    monkeypatch.setattr(evaluate, "drawn", lambda images, manifest: once)
    samples = voc_ap.bootstrap(split, lines, "m")
    for name, value in scores.values.items():
        assert samples[name].tolist() == pytest.approx([value], abs=1e-9)
    monkeypatch.setattr(evaluate, "drawn", lambda images, manifest: 0 * once)
    assert voc_ap.bootstrap(split, lines, "m")["AP"].tolist() == [0]


def test_voc_config(voc, tmp_path):
    name = "faster_rcnn_R_50_C4_VOC"
    run = run_of_config(name, voc, tmp_path / "run", engine="detectron2")
    p = train_net.prepare(run)
    assert (len(p.train.records), len(p.val.records)) == (6, 3)
    lint.files(p)
    auto = run_of_config(name, voc, tmp_path / "auto", engine="auto")
    assert auto.engine == "detectron2"
    assert protocol(run.given) == "detection-c4-voc-v2"
    with pytest.raises(BadInput, match=r"--engine detectron2"):
        train_net.prepare(run_of_config(name, voc, tmp_path / "run"))


@pytest.mark.parametrize("what", ["a fraction", "no number", "an empty line"])
def test_what_only_vocs_evaluator_would_stumble_over(voc, tmp_path, what):
    """Boxes of fractions, of which VOC 2012 has some, can be trained on, but not scored."""
    run = run_of_config(
        "faster_rcnn_R_50_C4_VOC", voc, tmp_path / "run", engine="detectron2"
    )
    p = train_net.prepare(run)
    file = voc / "VOC2007/Annotations/200704.xml"
    names = voc / "VOC2007/ImageSets/Main/test.txt"
    if what == "a fraction":
        file.write_text(file.read_text().replace("<xmin>14<", "<xmin>14.5<"))
    elif what == "no number":
        file.write_text(file.read_text().replace("<difficult>0<", "<difficult>no<"))
    else:
        names.write_text(names.read_text() + "\n\n")
    with pytest.raises(
        BadInput, match=r"Main/test\.txt: VOC's evaluator cannot score it"
    ):
        lint.files(p)


@pytest.mark.slow
def test_c4_trunk_arrives(tiny_root, tmp_path):
    run = run_of_config(
        "tiny_faster_rcnn_R_50_C4", tiny_root, tmp_path, engine="detectron2"
    )
    p, engine = built(run)
    assert near_its_checkpoint(p, engine) <= 1e-5
    assert any("res5.norm" in k for k in engine.model.state_dict())
    engine.start(training_records(p.train, p.task), 0, 1)
    losses = engine.step()
    assert all(torch.isfinite(v) for v in losses.values())
    moved = engine.model.state_dict()["backbone.res4.0.conv1.weight"]
    assert not torch.equal(moved, p.checkpoint.state_dict["layer3.0.conv1.weight"])


class Multiplies(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def stages_of(**factors):
    return torch.nn.Sequential(
        OrderedDict((name, Multiplies(factor)) for name, factor in factors.items())
    )


def test_a_c4_trunk_ends_in_the_head_before_its_extra_norm():
    """The stem, and the norm that MoCo adds behind res5, are no maps."""
    body = stages_of(stem=2, res2=3, res3=5, res4=7)
    res5 = torch.nn.Sequential(
        OrderedDict([("0", Multiplies(11)), ("1", Multiplies(13))])
    )
    res5.add_module("norm", Multiplies(1000))
    c4 = torch.nn.Module()
    c4.backbone = body
    c4.roi_heads = torch.nn.Module()
    c4.roi_heads.res5 = res5
    fpn = torch.nn.Module()
    fpn.backbone = torch.nn.Module()
    fpn.backbone.bottom_up = stages_of(stem=2, res2=3, res3=5, res4=7, res5=11)
    x = torch.ones(())
    names = ("conv1.weight", "layer3.0.conv2.weight", "layer4.1.conv1.weight")
    state = dict.fromkeys(names, torch.ones(1))
    for model, maps, places in (
        (
            c4,
            [6, 30, 210, 210 * 143],
            (
                "backbone.stem.conv1.weight",
                "backbone.res4.0.conv2.weight",
                "roi_heads.res5.1.conv1.weight",
            ),
        ),
        (
            fpn,
            [6, 30, 210, 2310],
            (
                "backbone.bottom_up.stem.conv1.weight",
                "backbone.bottom_up.res4.0.conv2.weight",
                "backbone.bottom_up.res5.1.conv1.weight",
            ),
        ),
    ):
        trunk = OwnResNet(model)
        assert [float(m) for m in trunk.stages(x)] == maps
        assert tuple(trunk.named(state)) == places
