"""Where the images of an annotation file are: by name, in subfolders, by absolute paths."""

import json

import pytest
from PIL import Image

from backbench.detection.data import reading
from backbench.detection.data.split import DatasetFiles
from backbench.detection.task_rows import FASTER_RCNN
from backbench.errors import BadInput


@pytest.fixture
def read(tmp_path):
    """Read annotations of images with these names; `folder` holds a.png and below/b.png."""
    folder = tmp_path / "images"
    for name in ("images/a.png", "images/below/b.png", "beside/c.png"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(file)

    def read(*names):
        images = []
        annotations = []
        for number, name in enumerate(names, 1):
            images.append({"id": number, "file_name": name, "width": 40, "height": 40})
            box = {"bbox": [1, 1, 20, 20], "area": 400, "iscrowd": 0}
            which = {"id": number, "image_id": number, "category_id": 1}
            annotations.append({**box, **which})
        file = tmp_path / "instances.json"
        categories = [{"id": 1, "name": "thing"}]
        file.write_text(
            json.dumps(
                {"images": images, "annotations": annotations, "categories": categories}
            )
        )
        files = DatasetFiles("coco_2017_val", file, folder, None)
        split = reading.read(files, FASTER_RCNN)
        return [record["file_name"] for record in split.records]

    return read


@pytest.mark.parametrize("name", ["a.png", "below/b.png", "below/../a.png", "./a.png"])
def test_a_name_is_below_the_images_folder(read, tmp_path, name):
    wanted = "below/b.png" if "b.png" in name else "a.png"
    assert read(name) == [f"{tmp_path}/images/{wanted}"]


def test_an_absolute_name_may_lie_in_the_images_folder(read, tmp_path):
    inside = f"{tmp_path}/images/below/b.png"
    assert read(inside, "a.png") == [inside, f"{tmp_path}/images/a.png"]


@pytest.mark.parametrize("name", ["../beside/c.png", "{}/beside/c.png", "..", "{}"])
def test_a_name_outside_of_the_images_folder_is_refused(read, tmp_path, name):
    name = name.format(tmp_path)
    with pytest.raises(BadInput, match=r"instances\.json: file_name .* is outside of"):
        read(name)


def test_missing_images_are_counted_and_the_first_is_named(read):
    with pytest.raises(BadInput, match=r"2 of 3 images .* missing, first x\.png"):
        read("a.png", "x.png", "below/y.png")


@pytest.mark.parametrize(
    "name", ["coco_2017_val_x", "voc_2007_test_5", "nothing_5", "coco_2017_val_0"]
)
def test_only_of_cocos_lists_the_first_images_may_be_named(tmp_path, name):
    with pytest.raises(BadInput, match=f"^DATASETS: unknown dataset '{name}'; "):
        reading.find(name, tmp_path)
    for whole in ("coco_2017_val", "keypoints_scenes_train", "voc_2007_test"):
        assert reading.find(whole, tmp_path).limit is None
    some = reading.find("keypoints_coco_2017_val_12", tmp_path)
    assert (some.name, some.limit) == ("keypoints_coco_2017_val_12", 12)
    about = "coco/annotations/person_keypoints_val2017.json"
    assert (some.file, some.folder) == (tmp_path / about, tmp_path / "coco/val2017")
