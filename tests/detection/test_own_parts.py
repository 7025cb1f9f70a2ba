"""Parts of reading boxes of one's own: the drawn fifth, digests, heads that fit, and the check."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from support import own_boxes

from backbench.detection import own_check, own_heads
from backbench.detection.data import own
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN
from backbench.errors import BadInput
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint


def changed(file, change):
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


@pytest.fixture
def base(tmp_path):
    return own_boxes.coco(tmp_path / "mine")


@pytest.mark.parametrize(("count", "drawn"), [(5, 1), (13, 3), (12, 2)])
def test_the_drawn_fifth_follows_from_the_names(tmp_path, caplog, count, drawn):
    caplog.set_level("INFO", "backbench")
    about = {"images": [], "annotations": [], "categories": [{"id": 4, "name": "x"}]}
    names = [f"{number % 7}_{number}.png" for number in range(count)]
    for id, name in enumerate(names, 1):
        size = {"width": 30, "height": 20}
        about["images"].append({"id": id, "file_name": name, **size})
        # Without an area, of which a note is made
        box = {"bbox": [1, 2, 10, 10], "iscrowd": 0}
        about["annotations"].append({"id": id, "image_id": id, "category_id": 4, **box})
        (tmp_path / "mine" / "images").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20)).save(tmp_path / "mine" / "images" / name)
    (tmp_path / "mine" / "boxes.json").write_text(json.dumps(about))
    train, test = own.read(tmp_path / "mine", FASTER_RCNN)

    def digest(name):
        return hashlib.sha256(f"0 {name}".encode()).hexdigest()

    scored = sorted(sorted(names, key=digest)[:drawn])
    assert [Path(r["file_name"]).name for r in test.records] == scored
    rest = sorted(set(names) - set(scored))
    assert [Path(r["file_name"]).name for r in train.records] == rest
    assert (train.name, test.name) == ("own_mine_train", "own_mine_test")
    # What is noted of the file is noted once
    assert len(train.notes) == 1 and test.notes == ()
    assert (
        f"mine: no split; a fifth of the images ({drawn} of {count}) is drawn for test, by sha256"
        " of '0 <name>'"
    ) in caplog.text


def test_without_a_test_list_val_is_scored_and_not_trained_on(base):
    both = own.read(base, FASTER_RCNN)
    assert [len(split.records) for split in both] == [9, 3]
    assert both[0].name == "own_mine_train+own_mine_val"
    (base / "annotations" / "instances_test.json").unlink()
    train, scored = own.read(base, FASTER_RCNN)
    assert (train.name, scored.name) == ("own_mine_train", "own_mine_val")
    assert [len(split.records) for split in (train, scored)] == [6, 3]


def test_a_list_without_objects_is_named_with_its_use(base):
    folder = base / "annotations"
    test = folder / "instances_test.json"
    changed(test, lambda about: about.update(annotations=[]))
    with pytest.raises(BadInput) as error:
        own.read(base, FASTER_RCNN)
    said = (
        "images has an object, and they are to be {}; annotate them, or leave '{}' out"
    )
    assert str(error.value) == f"{test}: none of its 3 " + said.format("scored", "test")
    val = folder / "instances_val.json"
    changed(val, lambda about: about.update(annotations=[]))
    with pytest.raises(BadInput) as error:
        own.read(base, FASTER_RCNN)
    assert str(error.value) == f"{val}: none of its 3 " + said.format(
        "trained on", "val"
    )


CHANGES = {
    "a box": lambda a: a["annotations"][3]["bbox"].__setitem__(2, 17),
    "a class": lambda a: a["annotations"][3].update(category_id=1),
    "a crowd": lambda a: a["annotations"][3].update(iscrowd=1),
    "an object less": lambda a: a["annotations"].pop(),
    "another image": lambda a: a["annotations"][3].update(image_id=3),
    "a class's name": lambda a: a["categories"][1].update(name="kitten"),
    "a class more": lambda a: a["categories"].append({"id": 9, "name": "dog"}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_is_said_of_an_image_changes_the_digest(base, change):
    before = own.read(base, FASTER_RCNN)[1].lists_digest
    test = base / "annotations" / "instances_test.json"
    changed(test, change)
    # Both lists have the same classes
    classes = json.loads(test.read_text())["categories"]
    for file in (base / "annotations").iterdir():
        changed(file, lambda about: about.update(categories=classes))
    assert own.read(base, FASTER_RCNN)[1].lists_digest != before


def renumber(about):
    """Give classes, images and objects other ids, in another order."""
    for row in about["annotations"]:
        row["category_id"] = 50 - row["category_id"]
        row["image_id"] = 70 - row["image_id"]
        row["bbox"] = [float(value) for value in row["bbox"]]
    for row in (*about["categories"], *about["images"]):
        row["id"] = (50 if "name" in row else 70) - row["id"]
    about["annotations"].reverse()
    about["images"].reverse()


def test_ids_and_their_order_do_not_change_the_digest(base):
    before = [split.lists_digest for split in own.read(base, FASTER_RCNN)]
    for file in (base / "annotations").iterdir():
        changed(file, renumber)
    train, test = own.read(base, FASTER_RCNN)
    assert [train.lists_digest, test.lists_digest] == before
    assert (test.categories, test.ids) == (("cat", "zebra"), (48, 49))
    names = [Path(record["file_name"]).name for record in test.records]
    assert names == ["test_1.png", "test_2.png", "test_3.png"]


def test_each_file_may_number_its_classes_anew(base):
    before = own.read(base, FASTER_RCNN)
    changed(base / "annotations" / "instances_test.json", renumber)
    after = own.read(base, FASTER_RCNN)
    assert [s.lists_digest for s in after] == [s.lists_digest for s in before]
    assert {split.ids for split in after} == {(48, 49)}
    (base / "annotations" / "instances_test.json").unlink()
    changed(base / "annotations" / "instances_val.json", renumber)
    assert {split.ids for split in own.read(base, FASTER_RCNN)} == {(48, 49)}


@pytest.mark.parametrize(("lacking", "other"), [("val", "test"), ("test", "train")])
def test_a_class_that_one_list_does_not_name_is_refused(base, lacking, other):
    """By the reading itself, and so by `data check` and `evaluate`, too."""
    file = base / "annotations" / f"instances_{lacking}.json"
    about = json.loads(file.read_text())
    (cat,) = [row["id"] for row in about["categories"] if row["name"] == "cat"]
    for key in ("category_id", "id"):
        rows = "annotations" if key == "category_id" else "categories"
        about[rows] = [row for row in about[rows] if row[key] != cat]
    file.write_text(json.dumps(about))
    with pytest.raises(BadInput) as error:
        own.read(base, FASTER_RCNN)
    named = base / "annotations" / f"instances_{other}.json"
    assert str(error.value) == (
        f"{file}: its categories are not those of {named}: it lacks 'cat'; name the same ones in"
        " both, also those without objects"
    )
    assert own_check.check(base) == ([], [str(error.value)])


def test_partners_that_names_do_not_tell_change_the_digest(tmp_path):
    base = own_boxes.posed_yolo(tmp_path / "mine")
    before = own.read(base, KEYPOINT_RCNN)
    description = base / "data.yaml"
    text = description.read_text()
    description.write_text(text.replace("flip_idx: [1, 0, 2]", "flip_idx: [0, 1, 2]"))
    after = own.read(base, KEYPOINT_RCNN)
    for one, other in zip(before, after, strict=True):
        assert (one.flip, other.flip) == ([1, 0, 2], [0, 1, 2])
        assert one.lists_digest != other.lists_digest
    posed = own_boxes.posed_coco(tmp_path / "coco" / "mine")
    by_names = own.read(posed, KEYPOINT_RCNN)
    for one, other in zip(before, by_names, strict=True):
        assert one.lists_digest == other.lists_digest


# ---- The heads


def a_config(sigmas=()):
    return SimpleNamespace(
        DATASETS=SimpleNamespace(TRAIN=(), TEST=()),
        MODEL=SimpleNamespace(
            ROI_HEADS=SimpleNamespace(NUM_CLASSES=80),
            ROI_KEYPOINT_HEAD=SimpleNamespace(NUM_KEYPOINTS=17),
        ),
        TEST=SimpleNamespace(KEYPOINT_OKS_SIGMAS=list(sigmas)),
    )


def a_split(name, images, classes=1, keypoints=(), visible=()):
    values = [v for seen in visible for v in (1.5, 1.5, seen)]
    annotation = {"keypoints": values} if keypoints else {}
    return SimpleNamespace(
        name=name,
        part="test",
        dataset="mine",
        categories=tuple(f"c{n}" for n in range(classes)),
        keypoints=keypoints,
        records=[{"annotations": [annotation, annotation]} for _ in range(images)],
    )


def test_heads_fit_the_classes_and_ten_are_named(caplog):
    caplog.set_level("INFO", "backbench")
    cfg = a_config()
    train, val = a_split("own_a", 7, 12), a_split("own_b", 4, 12)
    own_heads.fit(cfg, FASTER_RCNN, train, val)
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("own_a",), ("own_b",))
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 12
    assert cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS == 17
    assert cfg.TEST.KEYPOINT_OKS_SIGMAS == []
    ten = ", ".join(f"c{n}" for n in range(10))
    assert [line.getMessage() for line in caplog.records] == [
        f"mine: 12 classes ({ten}); 7 images to train on, 4 of 'test' to score"
    ]


def test_heads_fit_the_keypoints_whose_sigmas_are_said(caplog):
    caplog.set_level("INFO", "backbench")
    names = ("nose", "left_fin", "left_eye")
    # Two objects an image: 2 of 3 marked in 3 images, 1 of 3 in one
    lists = (
        a_split("own_a", 3, keypoints=names, visible=(2, 0, 1)),
        a_split("own_b", 1, keypoints=names, visible=(0, 0, 2)),
    )
    for sigmas, used in (((), [0.026, 0.107, 0.025]), ((0.5, 0.25, 1.0),) * 2):
        caplog.clear()
        cfg = a_config(sigmas)
        own_heads.fit(cfg, KEYPOINT_RCNN, *lists)
        assert cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS == 3
        assert list(used) == cfg.TEST.KEYPOINT_OKS_SIGMAS
        said = ", ".join(f"{n} {s:g}" for n, s in zip(names, used, strict=True))
        assert caplog.records[1].getMessage() == (
            f"mine: 14 of 24 keypoints are marked; their sigmas: {said}"
            " (TEST.KEYPOINT_OKS_SIGMAS changes them)"
        )


def test_each_key_that_the_boxes_decide_is_refused():
    request = SimpleNamespace(dataset="mine")
    for key in own_heads.DECIDED:
        with pytest.raises(BadInput) as error:
            own_heads.refuse_keys(request, ["SEED", "3", key, "1"])
        assert str(error.value) == f"{key} comes from --dataset mine; leave it out"
        own_heads.refuse_keys(SimpleNamespace(dataset=None), [key, "1"])
    own_heads.refuse_keys(request, ["SEED", "3"])


def test_a_plain_trunk_has_a_config_of_its_own(tmp_path):
    def config_for(dataset="mine", checkpoint=None):
        request = SimpleNamespace(dataset=dataset, checkpoint=checkpoint)
        return own_heads.config_for(request)

    assert config_for() == "faster_rcnn_own"
    plain = "timm:vit_tiny_patch16_224,depth=1,embed_dim=32,num_heads=2,pos=aa"
    configs = {"resnet18,width=0.25": "faster_rcnn_own"}
    for arch, config in (configs | {plain: "faster_rcnn_own_plain"}).items():
        file = tmp_path / f"{config}.safetensors"
        state = archs.build_trunk(arch).state_dict()
        Checkpoint(arch=arch, method="test", state_dict=state).save(file)
        assert config_for(checkpoint=str(file)) == config
    with pytest.raises(BadInput) as error:
        config_for(dataset=None)
    assert str(error.value) == (
        "no config: give --config-file NAME, or --dataset NAME for boxes of your own"
    )


# ---- The check


def test_the_check_says_both_lists_and_what_looks_wrong(base):
    train, test = own.read(base, FASTER_RCNN)
    lines = [
        "boxes in COCO's layout, 2 classes: cat, zebra",
        f"train+val: 9 images, trained on; 18 objects; sha256 of the list {train.lists_digest}",
        f"test: 3 images, scored; 6 objects; sha256 of the list {test.lists_digest}",
    ]
    assert own_check.check(base) == (lines, [])

    def twice(about):
        row = about["annotations"][0]
        about["annotations"].append(row | {"id": 99})
        for row in about["annotations"]:
            row.pop("area")

    changed(base / "annotations" / "instances_test.json", twice)
    said, wrong = own_check.check(base)
    assert said[:2] == lines[:2]
    areas, health = wrong
    assert areas.startswith("test: 7 of 7 areas are missing or 0: computed from the")
    assert health.startswith("test: hotcoco's health check: ")
    (base / "images" / "val" / "val_2.png").unlink()
    said, (wrong,) = own_check.check(base)
    assert said == []
    assert wrong.endswith(
        "1 of 3 images of instances_val.json are missing, first val_2.png"
    )


def test_the_check_tells_of_classes_that_blanks_alone_tell_apart(base):
    for name, by in (("zebra ", "blanks"), (" Zebra", "capital letters and blanks")):
        for file in (base / "annotations").iterdir():
            changed(file, lambda a, name=name: a["categories"][1].update(name=name))
            changed(file, lambda a: a["categories"][0].update(name="zebra"))
        (said,) = own_check.check(base)[1]
        first, second = sorted(["zebra", name])
        assert said == (
            f"classes '{first}' and '{second}' differ by {by} alone; if they are one, spell it in one"
            " way"
        )


def test_the_check_tells_of_keypoints_beside_a_group_without_any(tmp_path):
    base = own_boxes.posed_coco(tmp_path / "mine")
    before, _ = own_check.check(base)
    assert "3 keypoints (left_eye, right_eye, tail), " in before[-1]
    group = {"id": 0, "name": "pose", "supercategory": "none"}
    for file in (base / "annotations").iterdir():
        changed(file, lambda about: about["categories"].insert(0, group))
    after, wrong = own_check.check(base)
    assert (after[-1], wrong) == (before[-1], [])
    assert "1 of 2 classes have no object: pose" in after


def test_the_check_names_ten_classes_and_twenty_keypoints(base, tmp_path):
    more = [{"id": 9 + n, "name": f"z{n:02}"} for n in range(11)]
    for file in (base / "annotations").iterdir():
        changed(file, lambda about: about["categories"].extend(more))
    said, _ = own_check.check(base)
    ten = "cat, z00, z01, z02, z03, z04, z05, z06, z07, z08"
    assert said[0] == f"boxes in COCO's layout, 13 classes: {ten}"
    posed = own_boxes.posed_coco(tmp_path / "posed" / "mine")
    names = [f"left_{n}" for n in range(11)] + [f"right_{n}" for n in range(11)]

    def named(about):
        about["categories"][0]["keypoints"] = names
        for row in about["annotations"]:
            x, y, _, _ = row["bbox"]
            row["keypoints"] = [x + 4, y + 4, 2] * 21 + [0, 0, 0]

    for file in (posed / "annotations").iterdir():
        changed(file, named)
    said, wrong = own_check.check(posed)
    assert wrong == []
    pairs = ", ".join(f"left_{n} and right_{n}" for n in range(11))
    assert said[-1] == (
        f"22 keypoints ({', '.join(names[:20])}), {21 * 24} of {22 * 24} marked; mirrored images"
        f" swap {pairs}"
    )
    names[3] = "left_other"
    for file in (posed / "annotations").iterdir():
        changed(file, named)
    said, wrong = own_check.check(posed)
    assert "keypoint 'left_other' has no partner" in wrong[0]
    assert len(said) == 4
