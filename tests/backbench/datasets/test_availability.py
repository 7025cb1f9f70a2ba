"""What is looked for before a command starts: its folders, its files and its datasets."""

import json

import pytest
from PIL import Image

from backbench.cli import program
from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.requests.parsing import parse

TRUNK = "timm:resnet18@random"


def class_folder(base, *, splits=("train", "test")):
    for split in splits:
        for name in "ab":
            folder = base / split / name
            folder.mkdir(parents=True)
            for n in range(3):
                Image.new("RGB", (3, 2), (n, 0, 0)).save(folder / f"{split}{n}.png")


def boxes(base):
    (base / "annotations").mkdir(parents=True)
    (base / "images").mkdir()
    Image.new("RGB", (3, 2)).save(base / "images" / "1.png")
    about = {"images": [{"id": 1, "file_name": "1.png"}], "annotations": []}
    about["categories"] = [{"id": 1, "name": "cat"}]
    (base / "annotations" / "all.json").write_text(json.dumps(about))


@pytest.fixture
def root(tmp_path):
    class_folder(tmp_path / "data" / "mine")
    boxes(tmp_path / "data" / "cells")
    return tmp_path / "data"


def words(root, verb, *more, out=None):
    out = out or root.parent / "runs" / "x"
    of_verb = {
        "linear": ["linear", TRUNK, "--datasets", "mine", "--protocol", "knn_own"],
        "finetune": ["finetune", TRUNK, "--dataset", "mine"],
        "semisup": ["semisup", TRUNK, "--dataset", "mine", "--percent", "10"],
        "analyze": ["analyze", TRUNK, "--dataset", "mine"],
        "detect": ["detect", "--dataset", "cells", "--checkpoint", TRUNK],
        "pretrain": ["pretrain", "demo_simclr", "data.dataset=mine"],
    }[verb]
    return parse([*of_verb, *more, "--data", str(root), "--out", str(out)])


VERBS = ("linear", "finetune", "analyze", "detect", "pretrain")


@pytest.mark.parametrize("verb", VERBS)
def test_a_place_inside_of_its_dataset_is_refused_by_each_verb(root, verb):
    dataset = "cells" if verb == "detect" else "mine"
    availability.out_inside(words(root, verb))
    with pytest.raises(
        BadInput, match=f"lies in the dataset {root / dataset}, so what is"
    ):
        availability.out_inside(words(root, verb, out=root / dataset / "runs"))


def test_a_semisup_run_lies_outside_of_its_dataset(root):
    with pytest.raises(BadInput, match=f"lies in the dataset {root / 'mine'}, so what"):
        availability.out_inside(words(root, "semisup", out=root / "mine" / "x"))


@pytest.mark.parametrize("verb", [*(v for v in VERBS if v != "pretrain"), "semisup"])
def test_a_dataset_that_is_not_there_is_refused_by_each_verb(root, verb):
    request = words(root, verb)
    availability.refuse(request)
    name = "cells" if verb == "detect" else "mine"
    (root / name).rename(root / "gone")
    with pytest.raises(BadInput, match=f"{root / name}: no such folder; expected"):
        availability.refuse(request)


def test_the_dataset_that_a_part_of_labels_names_itself_is_there(root):
    line = ["semisup", TRUNK, "--percent", "1", "--data", str(root), "--out", "r"]
    with pytest.raises(BadInput, match=f"{root / 'imagenet'}"):
        availability.datasets_there(parse(line))
    # A protocol that names none, or is none, is refused where it is read
    for name in ("semisup_own", "no-such-protocol"):
        availability.datasets_there(parse([*line, "--protocol", name]))


@pytest.mark.parametrize(
    ("config", "folder"),
    [
        ("keypoint_rcnn_R_50_FPN_1x", "coco"),
        ("faster_rcnn_R_50_C4_VOC", "VOC2007"),
        ("demo_faster_rcnn_frozen", "scenes"),
    ],
)
def test_the_folder_of_a_detectors_config_is_there(root, config, folder):
    line = ["detect", "--config-file", config, "--data", str(root), "--out", "r"]
    with pytest.raises(BadInput, match=f"{root / folder}: no such folder; a config's"):
        availability.datasets_there(parse(line))
    # Others are judged where they are read
    availability.datasets_there(parse([*line, "DATASETS.TRAIN", "('x',)"]))
    for name in (folder, "VOC2012"):
        (root / name).mkdir()
    availability.datasets_there(parse(line))


def test_a_pretraining_needs_one_split(root):
    request = words(root, "pretrain")
    availability.datasets_there(request)
    (root / "mine").rename(root / "gone")
    with pytest.raises(BadInput, match=f"{root / 'mine'}: no such folder; expected"):
        availability.datasets_there(request)
    (root / "mine" / "unlabeled").mkdir(parents=True)
    availability.datasets_there(request)


def test_folders_of_a_request_are_folders(root, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match=f"^{file}: is a file; --out needs a folder$"):
        availability.refuse(words(root, "linear", out=file))
    for data, what in (
        (tmp_path / "none", "no such folder"),
        (file, "is a file, no folder"),
    ):
        with pytest.raises(BadInput) as refused:
            availability.refuse(words(data, "linear"))
        assert str(refused.value) == (
            f"--data {data}: {what}; it holds one folder per dataset (`backbench data list`)"
        )
    # One archive may be all data of `evaluate`, and is there
    request = parse(
        ["evaluate", TRUNK, "--data", str(file), "--out", str(tmp_path / "r")]
    )
    availability.refuse(request)


def test_files_of_weights_are_there(root, tmp_path):
    for verb, option in (("linear", None), ("detect", "--checkpoint")):
        request = words(root, verb)
        gone = tmp_path / "gone.pth"
        line = [str(gone) if word == TRUNK else word for word in request.argv()]
        with pytest.raises(BadInput, match=f"{gone}: no such"):
            availability.weight_files(parse(line))
        gone.touch()
        availability.weight_files(parse(line))
        gone.unlink()
        assert option is None or option in line


def test_several_missing_datasets_are_one_line(root):
    with pytest.raises(BadInput) as refused:
        availability.all_there(["mine", "other", "cifar10"], root)
    assert str(refused.value) == (
        f"{root}: 2 of 3 datasets are missing: other, cifar10; `backbench data list --data {root}`"
        " says what to get; what is there: --datasets mine"
    )
    spaced = root.parent / "my data"
    with pytest.raises(BadInput, match=f"`backbench data list --data '{spaced}'`"):
        availability.all_there(["other", "cifar10"], spaced)
    with pytest.raises(BadInput) as refused:
        availability.all_there(["other", "cifar10"], root)
    assert str(refused.value).endswith("says what to get")
    with pytest.raises(BadInput, match=f"{root / 'other'}: no such folder; expected"):
        availability.all_there(["other"], root)
    availability.all_there(["mine"], root)
    availability.all_there([], root)


def test_boxes_serve_where_images_of_several_classes_are_read(root):
    availability.all_there(["cells"], root, multilabel=True)
    with pytest.raises(
        BadInput, match=f"{root / 'mine'}: holds no boxes; expected COCO's"
    ):
        availability.all_there(["mine"], root, multilabel=True)
    several = words(root, "linear", "--protocol", "knn_own,multilabel")
    assert availability._takes_several_classes(several)
    assert not availability._takes_several_classes(words(root, "linear"))
    own = words(root, "linear", "--protocol", "own")
    assert not availability._takes_several_classes(own)


def test_what_is_below_a_folder_is_listed_with_what_is_wrong(root):
    (root / "half" / "train" / "a").mkdir(parents=True)
    (root / "cifar10").mkdir()
    (root / "odd" / "annotations").mkdir(parents=True)
    (root / "odd" / "annotations" / "x.json").write_text("{")
    (root / "coco").mkdir()
    rows = {row["name"]: row for row in availability.listed(root)}
    assert len(rows) == len(availability.listed(root))
    mine = rows["mine"]
    assert (mine["on_disk"], mine["wrong"], mine["licence"]) == (
        "found",
        None,
        "your own",
    )
    assert (mine["classes"], mine["images"], mine["container"]) == (2, [4, 2, 6], "")
    cells = rows["cells"]
    assert (cells["on_disk"], cells["metric"]) == ("found", "AP")
    assert cells["container"] == "boxes in COCO's layout (no split)"
    assert rows["odd"]["on_disk"] == "unusable"
    assert "x.json: not an annotation file" in rows["odd"]["wrong"]
    assert rows["half"]["on_disk"] == "unusable"
    assert "no folder 'test' or 'val' beside 'train'" in rows["half"]["wrong"]
    cifar = rows["cifar10"]
    assert (cifar["on_disk"], cifar["images"]) == ("missing", (50000, None, 10000))
    assert cifar["wrong"].endswith(f"; it belongs in {root / 'cifar10'}")
    # A set that is ImageNet's own pictures is told where these belong
    real = rows["imagenet-real"]
    assert real["wrong"].endswith(f"ImageNet's val; it belongs in {root / 'imagenet'}")
    assert "coco" not in rows
    known = {row["name"] for row in availability.listed(root / "none")}
    assert known == rows.keys() - {"mine", "cells", "odd", "half"}


def test_a_recipe_that_is_none_is_left_to_its_reader(tmp_path, capsys):
    """`simclr` is a method; looking for its dataset first would only say that it is no recipe."""
    (tmp_path / "data").mkdir()
    words = ["pretrain", "simclr", "--data", str(tmp_path / "data")]
    words += ["--out", str(tmp_path / "out")]
    assert program.main(words) == 2
    said = capsys.readouterr().err
    assert "simclr: a method, which trains on pictures of your own" in said
    assert not (tmp_path / "out").exists()
