"""What is looked at before a training: each image once, and each way to score once."""

import logging
from types import SimpleNamespace

import pytest
from support.detection_runs import run_of_config

from backbench.detection import lint
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput


@pytest.fixture
def looked(monkeypatch, caplog):
    """looked(turned, **p): what `lint.files` looked at; so many images of train are turned."""
    caplog.set_level(logging.INFO, "backbench")

    def files(turned=0, *, val="mine", aps=("bbox", "segm")):
        done = []

        def check_files(records):
            done.append(("images", len(records)))
            each = [SimpleNamespace(turned=i < turned) for i in range(len(records))]
            return each if records == train.records else [SimpleNamespace(turned=False)]

        def rehearse(split, kind, sigmas):
            done.append((split.name, kind, sigmas))

        train = SimpleNamespace(name="mine", folder="mine/train", records=[1, 2, 3])
        scored = SimpleNamespace(name=val, folder="mine/val", records=[4])
        test = SimpleNamespace(KEYPOINT_OKS_SIGMAS=[0.1])
        monkeypatch.setattr(lint, "training_records", lambda split, task: split.records)
        monkeypatch.setattr(lint.images, "check_files", check_files)
        monkeypatch.setattr(
            lint, "check_shared_images", lambda *_: done.append("shared")
        )
        monkeypatch.setattr(lint.evaluate, "rehearse", rehearse)
        monkeypatch.setattr(lint.voc_ap, "rehearse", lambda split: done.append("voc"))
        task = SimpleNamespace(aps=aps)
        sizes = {"MIN_SIZE_TRAIN": (480, 320), "MAX_SIZE_TRAIN": 640}
        sizes |= {"MIN_SIZE_TEST": 240, "MAX_SIZE_TEST": 500}
        cfg = SimpleNamespace(TEST=test, INPUT=SimpleNamespace(**sizes))
        monkeypatch.setattr(lint, "refuse_slivers", lambda *given: done.append(given))
        lint.files(SimpleNamespace(train=train, val=scored, task=task, cfg=cfg))
        return done

    return files


def test_every_image_and_every_score_is_tried(looked, caplog):
    pictures = [("images", 3), ("images", 1)]
    pictures += [([1, 2, 3], 320, 640), ([4], 240, 500), "shared"]
    assert looked() == [*pictures, ("mine", "bbox", [0.1]), ("mine", "segm", [0.1])]
    assert "checking 3 + 1 images" in caplog.text
    assert "EXIF" not in caplog.text


def test_vocs_own_score_is_tried_for_vocs_own_sets(looked):
    done = looked(val="voc_2007_test", aps=("bbox",))
    assert done[-1] == "voc"
    assert not any("bbox" in each for each in done)


def test_turned_images_are_told(looked, caplog):
    looked(2)
    said = "mine/train: 2 of 3 images have an EXIF orientation; they are read as shown"
    assert said in caplog.text
    assert "mine/val" not in caplog.text


def test_an_image_of_which_nothing_is_left_is_refused():
    def refused(width, height):
        record = {"file_name": "x/a.png", "width": width, "height": height}
        try:
            lint.refuse_slivers([record], 320, 533)
        except BadInput as error:
            return str(error)
        return ""

    # 533 x 0.49 and 0.51 pixels
    assert refused(1088, 1) == (
        "x/a.png: 1088 x 1 pixels, of which no pixel of the shorter side is left at 533 of the"
        " longer; cut it, or take it out"
    )
    assert refused(2, 2176).startswith("x/a.png: 2 x 2176 pixels, of which no pixel")
    assert refused(1045, 1) == refused(2, 2090) == refused(1, 1) == ""


# What can be scored, but would train wrongly


def a_split(*outlines, **more):
    records = []
    for number, outline in enumerate(outlines):
        objects = [{"segmentation": outline}, {}]
        records.append({"file_name": f"x/{number}.png", "annotations": objects})
    return SimpleNamespace(file="mine.json", records=records, **more)


def a_config(mask_format="polygon", flip="none"):
    return SimpleNamespace(
        INPUT=SimpleNamespace(MASK_FORMAT=mask_format, RANDOM_FLIP=flip)
    )


POLYGON, RUNS = [[1, 2, 3, 4, 5, 6]], {"counts": "x"}


def test_run_lengths_are_not_trained_on_as_polygons():
    train = a_split(POLYGON, RUNS, RUNS)
    says = r"mine\.json: 2 objects have run-length masks \(first in 1\.png\), but polygons are"
    with pytest.raises(BadInput, match=says):
        lint.check_training(a_config(), train, MASK_RCNN)
    lint.check_training(a_config("bitmask"), train, MASK_RCNN)
    lint.check_training(a_config(), a_split(POLYGON), MASK_RCNN)
    lint.check_training(a_config(), train, FASTER_RCNN)
    with pytest.raises(BadInput, match="MASK_FORMAT other: polygon or bitmask"):
        lint.check_training(a_config("other"), train, MASK_RCNN)


def test_keypoints_of_one_side_need_their_partner_where_pictures_are_mirrored():
    def check(names, flip="horizontal", **more):
        given = {"partners": None, "partners_unknown": False} | more
        train = a_split(keypoints=names, **given)
        lint.check_training(a_config(flip=flip), train, KEYPOINT_RCNN)

    check(("left_eye", "right_eye", "nose"))
    check(("left_eye", "nose"), flip="none")
    with pytest.raises(
        BadInput, match="keypoint 'left_eye' has no partner of the other side"
    ):
        check(("left_eye", "nose"))
    with pytest.raises(BadInput, match="neither flip_idx nor kpt_names in data"):
        check(("keypoint_1", "keypoint_2"), partners_unknown=True)
    with pytest.raises(
        BadInput, match="flip_idx does not exchange 'left_eye' and 'right_eye'"
    ):
        check(("left_eye", "right_eye"), partners=(0, 1))
    check(("left_eye", "right_eye"), partners=(1, 0))


@pytest.mark.parametrize("task", [FASTER_RCNN, MASK_RCNN, KEYPOINT_RCNN])
def test_a_tasks_heads_are_groups_of_its_config(task, tiny_root, tmp_path):
    run = run_of_config(f"tiny_{task.name}_R_18_FPN", tiny_root, tmp_path)
    assert run.task == task
    assert set(task.heads) <= set(run.cfg.MODEL)
    own = {MASK_RCNN.name: "ROI_MASK_HEAD", KEYPOINT_RCNN.name: "ROI_KEYPOINT_HEAD"}
    assert task.heads == tuple(filter(None, ["ROI_BOX_HEAD", own.get(task.name)]))
