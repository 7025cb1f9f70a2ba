"""What is drawn for a training image, what is seen of its file, and where its objects are then."""

import hashlib
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from backbench.detection.data import images, masks
from backbench.detection.data.images import ResizeAndFlip, TrainImages, targets
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput
from backbench.images.decoding import EXIF_ORIENTATION

# ---- What is drawn


def test_a_side_is_one_of_the_sizes_or_lies_between_two():
    chosen = ResizeAndFlip((32, 40, 48), limit=90, flip=True, seed=3)
    between = ResizeAndFlip((30, 33, 99), 90, flip=False, seed=3, sampling="range")
    places = [(iteration, slot) for iteration in range(20) for slot in range(10)]
    draws = [chosen.draw(*place) for place in places]
    assert {size for size, _ in draws} == {32, 40, 48}
    assert 70 < sum(mirrored for _, mirrored in draws) < 130
    assert draws == [chosen.draw(*place) for place in places]
    ranged = [between.draw(*place) for place in places]
    assert {size for size, _ in ranged} == {30, 31, 32, 33}
    assert not any(mirrored for _, mirrored in ranged)
    assert ranged == [between.draw(*place) for place in places]


@pytest.mark.parametrize("flip", ["horizontal", "none"])
def test_a_config_says_what_is_drawn(flip):
    keys = SimpleNamespace(
        MIN_SIZE_TRAIN=[20, 30],
        MAX_SIZE_TRAIN=70,
        RANDOM_FLIP=flip,
        MIN_SIZE_TRAIN_SAMPLING="range",
    )
    augment = ResizeAndFlip.of(SimpleNamespace(INPUT=keys), seed=5)
    assert augment == ResizeAndFlip((20, 30), 70, flip == "horizontal", 5, "range")


@pytest.mark.parametrize(
    ("sides", "size", "limit", "expected"),
    [
        ((40, 80), 20, 100, (20, 40)),
        ((80, 40), 20, 100, (40, 20)),
        ((50, 50), 25, 100, (25, 25)),
        ((40, 80), 20, 30, (15, 30)),
        ((80, 40), 20, 30, (30, 15)),
        # Halves go up, less does not: 4.67, 2.5 and 3.33 pixels
        ((3, 7), 2, 100, (2, 5)),
        ((4, 5), 2, 100, (2, 3)),
        ((3, 5), 2, 100, (2, 3)),
    ],
)
def test_the_shorter_side_has_the_size_unless_the_longer_is_too_long(
    sides, size, limit, expected
):
    assert images.shortest_edge(*sides, size, limit) == expected


# ---- What is seen of a file


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_by_all_orientations_but_the_first(tmp_path, orientation):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    file = tmp_path / "a.jpg"
    Image.new("RGB", (12, 8)).save(file, exif=exif)
    width, height = (8, 12) if orientation > 4 else (12, 8)
    record = {"file_name": str(file), "width": width, "height": height}
    data = file.read_bytes()
    assert images.check_file(record) == images.LookedAt(
        turned=orientation > 1,
        length=len(data),
        tail=hashlib.sha256(data[-1024:]).digest(),
    )
    record |= {"width": height, "height": width}
    with pytest.raises(BadInput) as error:
        images.check_file(record)
    said = f"is ({width}, {height}) pixels; its annotations say ({height}, {width})"
    if orientation > 4:
        said = (
            f"its EXIF orientation {orientation} turns it, so it is shown and read as"
            f" ({width}, {height}) pixels; its annotations say ({height}, {width}), the size as"
            " stored; annotate what is shown, or, if the boxes are right for the stored pixels,"
            " take the orientation out (`exiftool -Orientation= FILE`)"
        )
    assert str(error.value) == f"{file}: {said}"


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_jpeg_has_its_end_within_its_last_kilobyte(tmp_path, format):
    """Whatever its name is. The end has two bytes."""
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format=format)
    assert len(buffer.getvalue()) > 1024
    file = tmp_path / "a.png"
    record = {"file_name": str(file), "width": 40, "height": 30}
    file.write_bytes(buffer.getvalue() + bytes(1022))
    found = images.check_file(record)
    assert found.length == len(buffer.getvalue()) + 1022
    file.write_bytes(buffer.getvalue() + bytes(1023))
    if format == "PNG":
        assert not images.check_file(record).turned
        return
    with pytest.raises(BadInput, match="corrupt image \\(truncated: it has no end\\)"):
        images.check_file(record)


def test_all_files_are_looked_at_in_their_order(tmp_path):
    records = []
    for number in range(3):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (10 + number, 5)).save(file)
        records.append({"file_name": str(file), "width": 10 + number, "height": 5})
    sizes = [(tmp_path / f"{number}.png").stat().st_size for number in range(3)]
    assert [seen.length for seen in images.check_files(records)] == sizes
    assert images.same_bytes(records[1], records[1])
    assert not images.same_bytes(records[1], records[2])
    records[1]["width"] = records[2]["width"] = 50
    with pytest.raises(BadInput, match=r"1\.png: is \(11, 5\) pixels; .* \(50, 5\)$"):
        images.check_files(records)


def test_an_item_is_the_resized_image_with_its_boxes(tmp_path):
    """Mirrored or not, both together."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:10, :30] = (250, 120, 60)
    file = tmp_path / "a.png"
    Image.fromarray(pixels).save(file)
    record = a_record({"bbox": [0, 0, 30, 10]}, width=40, height=20)
    record["file_name"] = str(file)
    augment = ResizeAndFlip((10,), limit=15, flip=True, seed=0)
    made = TrainImages([record, record, record], augment, [], FASTER_RCNN)
    assert len(made) == 3
    seen = set()
    for slot in range(8):
        sample = made[7, slot, 1]
        assert (sample["iteration"], sample["slot"]) == (7, slot)
        _, mirrored = augment.draw(7, slot)
        seen.add(mirrored)
        # 15 pixels are the most of the longer side, so the shorter has 8
        image = sample["image"].permute(1, 2, 0)
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (8, 15, 3))
        resized = np.asarray(Image.fromarray(pixels).resize((15, 8), Image.BILINEAR))
        if mirrored:
            resized = resized[:, ::-1]
        assert (image.numpy() == resized).all()
        right = [[3.75, 0, 15, 4]] if mirrored else [[0, 0, 11.25, 4]]
        assert sample["target"]["boxes"].tolist() == right
    assert seen == {True, False}


# ---- Where the objects are


def a_record(*annotations, width=100, height=50):
    rows = [{"category_id": 0, "iscrowd": 0} | row for row in annotations]
    return {"width": width, "height": height, "annotations": rows}


def placed(record, *, mirrored, task=FASTER_RCNN, flip_map=(), **more):
    """Put the objects on an image three times as wide and twice as high."""
    return targets(
        record, 100, 300, mirrored=mirrored, flip_map=flip_map, task=task, **more
    )


def test_boxes_are_cut_to_the_image_and_what_is_empty_is_left_out():
    record = a_record(
        {"bbox": [10, 5, 20, 30], "iscrowd": 1},
        {"bbox": [100, 5, 20, 30]},  # beside the image
        {"bbox": [10, 5, 20, 30], "category_id": 2},
        {"bbox": [10, 5, 20, 0]},
        {"bbox": [10, 5, 3e-6, 30]},
        {"bbox": [-10, -5, 30, 100], "category_id": 7},
        {"bbox": [60, 40, 0.25, 0.25], "category_id": 1},
    )
    found = placed(record, mirrored=False)
    right = [[30, 10, 90, 70], [0, 0, 60, 100], [180, 80, 180.75, 80.5]]
    assert found["boxes"].tolist() == right
    assert found["labels"].tolist() == [3, 8, 2]
    assert found.keys() == {"boxes", "labels"}
    found = placed(record, mirrored=True)
    right = [[210, 10, 270, 70], [240, 0, 300, 100], [119.25, 80, 120, 80.5]]
    assert found["boxes"].tolist() == right


def test_keypoints_change_their_places_when_mirrored():
    """The corners of the image are in it; what lies outside is not learned."""
    record = a_record(
        {"bbox": [0, 0, 100, 50], "keypoints": [10, 5, 2, 20, 8, 1, 30, 9, 0]},
        {"bbox": [0, 0, 100, 50], "keypoints": [100, 50, 2, 0, 0, 1, 100.5, 9, 2]},
        {"bbox": [0, 0, 100, 50], "keypoints": [-0.5, 5, 2, 9, 50.5, 2, 9, -0.5, 2]},
    )
    about = {"task": KEYPOINT_RCNN, "flip_map": [1, 0, 2]}
    none = [0, 0, 0]
    assert placed(record, mirrored=False, **about)["keypoints"].tolist() == [
        [[30, 10, 2], [60, 16, 1], none],
        [[300, 100, 2], [0, 0, 1], none],
        [none, none, none],
    ]
    assert placed(record, mirrored=True, **about)["keypoints"].tolist() == [
        [[240, 16, 1], [270, 10, 2], none],
        [[300, 0, 1], [0, 100, 2], none],
        [none, none, none],
    ]
    outside = {"bbox": [0, 0, 100, 50], "keypoints": [101, 5, 2, 9, 5, 2, 1, 1, 0]}
    found = placed(a_record(outside), mirrored=True, **about)["keypoints"].tolist()
    assert found == [[[273, 10, 2], none, none]]


def test_outlines_move_with_their_image():
    parts = [[10, 5, 30, 5, 30, 25], [50, 5, 60, 5, 60, 25, 50, 25]]
    record = a_record(
        {"bbox": [10, 5, 50, 20], "segmentation": parts},
        {"bbox": [200, 5, 50, 20], "segmentation": parts},
        {"bbox": [10, 5, 20, 20], "segmentation": parts[:1]},
    )
    first = [[30, 10, 90, 10, 90, 50], [150, 10, 180, 10, 180, 50, 150, 50]]
    found = placed(record, mirrored=False, task=MASK_RCNN)["polygons"]
    assert [[part.tolist() for part in each] for each in found] == [first, first[:1]]
    first = [[270, 10, 210, 10, 210, 50], [150, 10, 120, 10, 120, 50, 150, 50]]
    found = placed(record, mirrored=True, task=MASK_RCNN)["polygons"]
    assert [[part.tolist() for part in each] for each in found] == [first, first[:1]]


@pytest.mark.parametrize("mirrored", [False, True])
def test_bitmaps_without_a_pixel_are_left_out(mirrored):
    stored = np.zeros((50, 100), np.uint8)
    stored[5:25, 10:30] = 1
    record = a_record(
        {"bbox": [10, 5, 20, 20], "segmentation": [[10, 80, 30, 80, 30, 90]]},
        {
            "bbox": [10, 5, 20, 20],
            "segmentation": [[10, 5, 30, 5, 30, 25, 10, 25]],
            "category_id": 4,
        },
        {
            "bbox": [10, 5, 20, 20],
            "segmentation": masks.encode(stored.astype(bool), 0, 0, (50, 100)),
            "category_id": 5,
        },
    )
    found = placed(record, mirrored=mirrored, task=MASK_RCNN, bitmasks=True)
    right = np.zeros((100, 300), bool)
    right[10:50, 30:90] = True
    if mirrored:
        right = right[:, ::-1]
    assert (found["bitmaps"].numpy() == [right, right]).all()
    assert found["labels"].tolist() == [5, 6]
    assert len(found["boxes"]) == 2
    assert "polygons" not in found


def test_an_image_without_objects_has_targets_of_no_rows():
    empty = a_record({"bbox": [1, 1, 9, 9], "iscrowd": 1})
    shapes = {"boxes": (0, 4), "labels": (0,)}
    found = placed(empty, mirrored=True, task=MASK_RCNN, bitmasks=True)
    assert {name: tuple(of.shape) for name, of in found.items()} == {
        **shapes,
        "bitmaps": (0, 100, 300),
    }
    assert placed(empty, mirrored=True, task=MASK_RCNN)["polygons"] == []
    found = placed(empty, mirrored=True, task=KEYPOINT_RCNN, flip_map=[1, 0])
    assert {name: tuple(of.shape) for name, of in found.items()} == {
        **shapes,
        "keypoints": (0, 2, 3),
    }


# ---- Outlines on the grid of a box


def test_polygons_are_drawn_on_the_grid_of_their_own_box():
    """Of the first object the left half and the lower right quarter, of the second the upper half."""
    halves = [
        np.array([10.0, 20, 30, 20, 30, 100, 10, 100]),
        np.array([30.0, 60, 50, 60, 50, 100, 30, 100]),
    ]
    upper = [np.array([0.0, 0, 60, 0, 60, 15, 0, 15])]
    boxes = torch.tensor([[10.0, 20, 50, 100], [0, 0, 60, 30]])
    first, second = masks.rasterise([halves, upper], boxes, 8)
    right = torch.zeros(8, 8)
    right[:, :4] = 1
    right[4:, 4:] = 1
    assert torch.equal(first, right)
    right = torch.zeros(8, 8)
    right[:4] = 1
    assert torch.equal(second, right)


def test_a_box_of_less_than_a_tenth_of_a_pixel_is_drawn_as_one_of_a_tenth():
    thin = np.array([5.0, 5, 5.05, 5, 5.05, 13, 5, 13])
    flat = np.array([5.0, 5, 13, 5, 13, 5.05, 5, 5.05])
    boxes = torch.tensor([[5.0, 5, 5.05, 13], [5.0, 5, 13, 5.05]])
    tall, wide = masks.rasterise([[thin], [flat]], boxes, 8)
    assert tall.sum(0).tolist() == [8] * 4 + [0] * 4
    assert wide.sum(1).tolist() == [8] * 4 + [0] * 4


@pytest.mark.parametrize("mirrored", [False, True])
def test_stored_masks_are_resized_and_mirrored(mirrored):
    stored = np.zeros((4, 6), bool)
    stored[1, 0] = stored[3, 2:5] = True
    code = masks.encode(stored, 0, 0, (4, 6))
    whole = masks.bitmap(code, 4, 6, mirrored=mirrored)
    right = stored[:, ::-1] if mirrored else stored
    assert (whole == right).all()
    larger = masks.bitmap(code, 8, 18, mirrored=mirrored)
    assert (larger == right.repeat(2, 0).repeat(3, 1)).all()


def test_each_box_crops_the_bitmap_that_it_is_of():
    upper, left = torch.zeros(2, 8, 12, dtype=torch.bool)
    upper[:4] = True
    left[:, :6] = True
    boxes = torch.tensor([[0.0, 0, 12, 8], [0, 0, 12, 8], [3, 2, 9, 8]])
    found = masks.crop(torch.stack([upper, left]), torch.tensor([1, 0, 0]), boxes, 4)
    columns, rows, part = found
    assert columns.tolist() == [[1, 1, 0, 0]] * 4
    assert rows.tolist() == [[1] * 4] * 2 + [[0] * 4] * 2
    # Of its rows of 1.5 pixels the second has a third of a bitmap that ends after two pixels
    assert part[:, 0].tolist() == [1, 0, 0, 0]
    assert part.dtype == torch.float32
