"""Numbers of a config at their bounds, lists that do not fit it or each other, and images in both."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.detection_runs import run_of_config

from backbench.detection import dialect, lint
from backbench.detection.data.images import LookedAt
from backbench.detection.rcnn import roi_heads, rpn
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN
from backbench.errors import BadInput

GIVEN = SimpleNamespace(path=Path("mine.yaml"))


@pytest.fixture(scope="module")
def tiny(tiny_root, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return run_of_config("tiny_faster_rcnn_R_18_FPN", tiny_root, out).cfg


def check_values(cfg, key, value):
    """Check the config with one key set; return what is said."""
    changed = cfg.clone()
    changed.defrost()
    *groups, last = key.split(".")
    node = changed
    for group in groups:
        node = node[group]
    node[last] = value
    try:
        lint.check_values(changed, GIVEN)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", lint.BOUNDS)
def test_a_value_may_be_its_bound_and_no_more(tiny, key):
    least, most = lint.BOUNDS[key]
    several = isinstance(dialect.flat(tiny)[key], list | tuple)

    def said(*values):
        return check_values(tiny, key, values if several else values[0])

    assert said(least) == said(most) == ""
    for value, bound in ((least - 1, f"least {least}"), (most + 1, f"most {most}")):
        shown = f"({value},)" if several else value
        assert said(value) == f"mine.yaml: {key} {shown}: at {bound}"
    if several:
        assert said(least, most) == said(most, least) == ""
        assert said(least, least - 1).endswith(f": at least {least}")
        assert said(most + 1, least).endswith(f": at most {most}")


def test_a_rate_is_above_zero_and_overlaps_rise(tiny):
    assert check_values(tiny, "SOLVER.BASE_LR", 1e-9) == ""
    for rate in (0.0, -0.1, float("nan")):
        said = check_values(tiny, "SOLVER.BASE_LR", rate)
        assert said == f"mine.yaml: SOLVER.BASE_LR {rate}: above 0"
    proposals, heads = lint.THRESHOLDS
    assert check_values(tiny, proposals, [0.3, 0.3]) == ""
    assert check_values(tiny, heads, [0.3]) == check_values(tiny, heads, [0.3, 1]) == ""
    for key, value, wanted in (
        (proposals, [0.3], "2"),
        (proposals, [0.7, 0.3], "2"),
        (heads, [], "1 or more"),
        (heads, [0.7, 0.3], "1 or more"),
    ):
        said = check_values(tiny, key, value)
        assert said == f"mine.yaml: {key} {value}: {wanted} overlaps, in rising order"


@pytest.mark.parametrize("sizes", [(64,), (128, 64), (64, 96, 128)])
def test_a_range_of_sizes_is_drawn_between_two(tiny, sizes):
    """Other sizes would stand in the config, and never be trained on."""
    ranged = tiny.clone()
    ranged.defrost()
    ranged.INPUT.MIN_SIZE_TRAIN_SAMPLING = "range"
    for good in ((64, 128), (64, 64)):
        assert check_values(ranged, "INPUT.MIN_SIZE_TRAIN", good) == ""
    said = check_values(ranged, "INPUT.MIN_SIZE_TRAIN", sizes)
    assert "draws between two sizes" in said and str(sizes) in said
    assert check_values(tiny, "INPUT.MIN_SIZE_TRAIN", sizes) == ""


@pytest.mark.parametrize(
    ("key", "value", "build"),
    [
        ("MODEL.ROI_HEADS.IOU_THRESHOLDS", [0.3, 0.5], roi_heads.build_heads),
        ("MODEL.RPN.IOU_THRESHOLDS", [0.3, 0.5, 0.7], rpn.build_rpn),
        ("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", [[1.0]] * 5, rpn.build_rpn),
    ],
)
def test_values_that_torchvisions_engine_would_leave_out_are_refused(
    tiny, key, value, build
):
    changed = tiny.clone()
    changed.defrost()
    changed.merge_from_list([key, value])
    with pytest.raises(BadInput, match=f"{key} .*: this engine has"):
        build(changed)


# ---- Lists that do not fit


def a_split(name, *, names=("cat", "dog"), ids=(1, 2), files=("a.jpg",), keypoints=()):
    return SimpleNamespace(
        name=name,
        file=f"{name}.json",
        categories=names,
        ids=ids,
        records=[{"file_name": f"{name}/{file}"} for file in files],
        keypoints=keypoints,
    )


def ground_truth(train, val, *, classes=2, keypoints=2, sigmas=2, task=FASTER_RCNN):
    """Check two lists against a config; return what is said."""
    heads = {"NUM_CLASSES": classes}, {"NUM_KEYPOINTS": keypoints}
    model = dict(zip(("ROI_HEADS", "ROI_KEYPOINT_HEAD"), heads, strict=True))
    cfg = SimpleNamespace(
        MODEL=SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in model.items()}),
        TEST=SimpleNamespace(KEYPOINT_OKS_SIGMAS=[0.1] * sigmas),
    )
    try:
        lint.check_ground_truth(cfg, GIVEN, train, val, task)
    except BadInput as error:
        return str(error)
    return ""


def test_both_lists_have_the_heads_classes():
    train, val = a_split("train"), a_split("val")
    assert ground_truth(train, val) == ""
    three = {"names": ("cat", "dog", "emu"), "ids": (1, 2, 3)}
    for lists, name in (
        ((a_split("train", **three), val), "train"),
        ((train, a_split("val", **three)), "val"),
    ):
        assert ground_truth(*lists) == (
            f"{name}.json: 3 categories, but MODEL.ROI_HEADS.NUM_CLASSES is 2 (mine.yaml)"
        )


@pytest.mark.parametrize(
    ("other", "first"),
    [
        ({"names": ("cat", "emu")}, "2 'dog'"),
        ({"names": ("ant", "dog")}, "1 'ant'"),
        ({"ids": (1, 7)}, "2 'dog'"),
        ({"ids": (0, 2)}, "0 'cat'"),
    ],
)
def test_the_first_class_that_differs_is_named(other, first):
    assert ground_truth(a_split("train"), a_split("val", **other)) == (
        "val.json: its categories are not those of train.json; first difference: "
        + first
    )


def test_images_of_both_lists_are_counted_by_their_paths():
    files = ("c.jpg", "b.jpg", "a.jpg", "d.jpg")
    train, val = a_split("here", files=files[:3]), a_split("here", files=files[:2])
    val.name = "val"
    said = ground_truth(train, val)
    assert said == "val and here share 2 images, first b.jpg"
    val.records = [{"file_name": "here/e.jpg"}, {"file_name": "there/a.jpg"}]
    assert ground_truth(train, val) == ""


def test_both_lists_have_the_heads_keypoints_and_sigmas():
    names = ("left_eye", "right_eye")
    train, val = (a_split(name, keypoints=names) for name in ("train", "val"))
    other = a_split("val", keypoints=(*names, "nose"))
    about = {"task": KEYPOINT_RCNN}
    assert ground_truth(train, val, **about) == ""
    assert ground_truth(train, other) == ""
    assert ground_truth(train, other, **about) == (
        "val.json: 3 keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is 2"
    )
    assert ground_truth(train, val, keypoints=3, **about).startswith(
        "train.json: 2 keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is 3"
    )
    turned = a_split("val", keypoints=names[::-1])
    assert "its keypoint 0 is 'right_eye'" in ground_truth(train, turned, **about)
    assert ground_truth(train, val, sigmas=1, **about) == (
        "mine.yaml: 1 TEST.KEYPOINT_OKS_SIGMAS for 2 keypoints"
    )


# ---- Images in both lists


@pytest.fixture
def shared(tmp_path):
    """shared(val, trained): look for the contents of val among those trained on."""

    def records_of(part, contents):
        records = []
        for number, content in enumerate(contents):
            file = tmp_path / f"{part}_{number}"
            file.write_text(content)
            records.append({"file_name": str(file)})
        # As images are, but that all of one length look alike
        looks = [LookedAt(False, len(text), b"") for text in contents]
        return records, looks

    def check(val, trained):
        records, looks = records_of("val", val)
        taught = records_of("train", trained)
        lint.check_shared_images(*taught, SimpleNamespace(records=records), looks)

    return check


def different(count):
    return [hashlib.sha256(bytes([n])).hexdigest() + "x" * n for n in range(count)]


def test_one_image_of_a_hundred_may_be_in_both_lists(shared, caplog, tmp_path):
    many = different(99)
    shared(many, ["a", "b"])
    assert caplog.text == ""
    shared([*many, "b"], ["a", "b", "b", "c"])
    (line,) = caplog.records
    said = f"val images are trained on; first {tmp_path}/val_{{}}, the same as {tmp_path}/train_1"
    assert line.getMessage() == f"1 of 100 {said}".format(99)
    with pytest.raises(BadInput) as error:
        shared([*many[1:], "b"], ["a", "b"])
    said += "; take them out of one of the two"
    assert str(error.value) == f"1 of 99 {said}".format(98)
    with pytest.raises(BadInput, match=r"^2 of 101 val images are"):
        shared(["b", *many, "a"], ["a", "b"])
