"""Tests the pictures for people, and compares masks pasted straight to run lengths with bitmaps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from pycocotools import mask

from backbench.datasets import embedded
from backbench.detection import pictures
from backbench.detection.data import reading
from backbench.detection.data.masks import encode, paste
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return embedded.build(tmp_path_factory.mktemp("data"), "tiny")


def found(record, ids, shift=0):
    """Detect every object of an image where it is, or a little beside it."""
    out = []
    for n, a in enumerate(record["annotations"]):
        x, y, w, h = a["bbox"]
        out.append(
            {
                "image_id": record["image_id"],
                "category_id": ids[a["category_id"]],
                "bbox": [x + shift, y, w, h],
                "score": 0.9 - n / 10,
            }
        )
    return out


HEADING = pictures.LETTERS + 2 * pictures.GAP  # pixels above the two sides


@pytest.mark.parametrize("task", [FASTER_RCNN, KEYPOINT_RCNN])
def test_each_side_says_what_it_is(root, tmp_path, task):
    name = "keypoints_scenes_val" if task.keypoints else "scenes_val"
    split = reading.read(reading.find(name, root), task)
    some = [d for record in split.records for d in found(record, split.ids)]
    with_some = pictures.write(tmp_path / "some", split, some)
    with_none = pictures.write(tmp_path / "none", split, [])
    assert len(with_some) == len(split.records) == len(with_none)
    one = np.asarray(Image.open(with_some[0]), int)
    bare = np.asarray(Image.open(with_none[0]), int)
    assert one.shape == bare.shape
    # There is a word above either side.
    middle = one.shape[1] // 2
    ink = 255 - one[:HEADING].min(2)
    assert ink[:, :middle].max() > 200
    assert ink[:, middle:].max() > 200
    # The left shows the truth, whatever was found.
    left = middle - pictures.GAP
    assert (one[:, :left] == bare[:, :left]).all()
    # The right says that nothing was found, and then nothing is drawn on it.
    assert (one[:HEADING, middle:] != bare[:HEADING, middle:]).any()
    with Image.open(split.records[0]["file_name"]) as image:
        scene = np.asarray(image.resize((320, 320)), int)
    assert (bare[HEADING:, -320:] == scene).all()
    assert (one[HEADING:, -320:] != scene).any()


def test_a_label_is_dark_on_the_ground_of_its_colour(root, tmp_path):
    split = reading.read(reading.find("scenes_val", root), FASTER_RCNN)
    record = split.records[0]
    best = found(record, split.ids)[:1]
    seen = np.asarray(Image.open(pictures.write(tmp_path, split, best)[0]), int)
    label = record["annotations"][0]["category_id"]
    colour = np.array(pictures.COLOURS[label % len(pictures.COLOURS)])
    right = seen[HEADING:, -320:]
    # There is a patch, beside the lines of the box, which are 2 pixels wide and enlarged 2.5 times.
    patch = (abs(right - colour).sum(2) < 6).sum()
    _, _, width, height = best[0]["bbox"]
    outline = 2 * 2 * 2.5 * (width + height)
    assert patch > outline + 300
    # And there are letters on it.
    assert (right.sum(2) < 90).sum() > 40


def test_a_keypoint_that_was_found_exactly_is_where_the_true_one_is(root, tmp_path):
    """An annotation counts from the corner of a pixel, a detection, as in COCO's files, from its middle."""
    split = reading.read(reading.find("keypoints_scenes_val", root), KEYPOINT_RCNN)
    record = split.records[0]
    exact = found(record, split.ids)
    scene = Image.open(record["file_name"]).size[0]
    points = []
    for detection, a in zip(exact, record["annotations"]):
        rows = np.array(a["keypoints"], float).reshape(-1, 3)
        points += [
            (x, y) for x, y, seen in (rows - [0.5, 0.5, 0]) * 320 / scene if seen
        ]
        detection["keypoints"] = (rows - [0.5, 0.5, 0]).ravel().tolist()
    seen = np.asarray(Image.open(pictures.write(tmp_path, split, exact)[0]), int)
    left, right = seen[HEADING:, :320], seen[HEADING:, -320:]
    same = 0
    for x, y in points:
        around = np.s_[
            max(round(y) - 5, 0) : round(y) + 6, max(round(x) - 5, 0) : round(x) + 6
        ]
        same += bool((left[around] == right[around]).all())
    # A few lie under a name, to which the right adds a score.
    assert len(points) > 3 and same > 0.6 * len(points), (same, points)


@pytest.mark.parametrize("seed", range(8))
def test_a_part_of_an_image_in_run_lengths(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 12, 2).tolist()
    h = int(rng.integers(1, height + 1))
    w = int(rng.integers(1, width + 1))
    top = int(rng.integers(0, height - h + 1))
    left = int(rng.integers(0, width - w + 1))
    some = rng.random((h, w)) < 0.7
    for part in (some, np.ones((h, w), bool), np.zeros((h, w), bool)):
        image = np.zeros((height, width), np.uint8)
        image[top : top + h, left : left + w] = part
        whole = mask.encode(np.asfortranarray(image))
        found = encode(part, left, top, (height, width))
        assert found == {"size": [height, width], "counts": whole["counts"].decode()}


def test_pasted_as_detectron2_does():
    pytest.importorskip(
        "detectron2", reason="Detectron2 is not installed: `make detectron2`"
    )
    from detectron2.layers.mask_ops import paste_masks_in_image
    from detectron2.structures import Boxes

    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(20, 28, 28, generator=generator)
    corners = torch.rand(20, 2, generator=generator) * torch.tensor([70.0, 50.0])
    sides = 1 + torch.rand(20, 2, generator=generator) * 60
    boxes = torch.cat([corners, corners + sides], 1).clamp(
        max=torch.tensor([90.0, 70, 90, 70])
    )
    theirs = paste_masks_in_image(masks, Boxes(boxes), (70, 90)).numpy()
    for ours, reference in zip(paste(masks, boxes, 70, 90), theirs, strict=True):
        # A value at a half may fall on either side.
        assert (mask.decode(ours).astype(bool) != reference).sum() <= 2


ODD = {
    "beside the image": [-30.0, -40.0, -5.0, -4.0],
    "behind the image": [200.0, 5.0, 230.0, 9.0],
    "over all edges": [-7.5, -3.2, 130.0, 99.0],
    "one pixel": [3.0, 4.0, 4.0, 5.0],
    "the last pixel": [89.0, 69.0, 90.0, 70.0],
    "less than a pixel": [10.2, 10.3, 10.6, 10.9],
    "a hair": [20.0, 0.0, 20.01, 70.0],
    "without width": [5.5, 5.0, 5.5, 9.0],
    "without height": [5.0, 5.5, 9.0, 5.5],
    "the whole image": [0.0, 0.0, 90.0, 70.0],
}


@pytest.mark.parametrize("box", ODD.values(), ids=ODD)
def test_odd_boxes_have_the_codes_of_whole_images(box):
    """The box's own pixels alone give the codes of sampling every pixel of the image."""
    generator = torch.Generator().manual_seed(1)
    masks = torch.rand(4, 28, 28, generator=generator)
    masks[0] = 1
    found = paste(masks, torch.tensor([box] * 4), 70, 90)
    for code, one in zip(found, masks, strict=True):
        bitmap = np.zeros((70, 90), np.uint8)
        if box[2] > box[0] and box[3] > box[1]:
            x1, y1, x2, y2 = torch.tensor(box).tolist()  # rounded to float32
            grid_x = (torch.arange(90) + 0.5 - x1) / (x2 - x1) * 2 - 1
            grid_y = (torch.arange(70) + 0.5 - y1) / (y2 - y1) * 2 - 1
            grid = torch.stack(torch.meshgrid(grid_x, grid_y, indexing="xy"), -1)
            sampled = torch.nn.functional.grid_sample(
                one[None, None], grid[None], align_corners=False
            )[0, 0]
            # No value is so near to a half that a machine's last bit decides.
            assert ((sampled - 0.5).abs() > 1e-6).all()
            bitmap = (sampled >= 0.5).numpy().astype(np.uint8)
        whole = mask.encode(np.asfortranarray(bitmap))
        assert code == {"size": [70, 90], "counts": whole["counts"].decode()}


# Where things are drawn, in images that are no squares


def a_list(folder, sizes, objects=()):
    """Write black images of these sizes, each with these objects (label, box)."""
    records = []
    for number, (width, height) in enumerate(sizes):
        file = folder / f"{number}.png"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (width, height)).save(file)
        rows = [{"category_id": label, "bbox": box} for label, box in objects]
        about = {"file_name": str(file), "image_id": 10 + number, "annotations": rows}
        records.append(about | {"width": width, "height": height})
    names = tuple(f"c{n}" for n in range(8))
    return SimpleNamespace(records=records, categories=names, ids=tuple(range(20, 28)))


def detected(image, label, score, box):
    return {"image_id": image, "category_id": 20 + label, "score": score, "bbox": box}


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((80, 40), (320, 160)),
        ((40, 20), (160, 80)),
        ((20, 40), (80, 160)),
        ((640, 320), (320, 160)),
        ((100, 200), (160, 320)),
        ((3000, 3), (320, 1)),
        ((3, 3000), (1, 320)),
    ],
)
def test_both_sides_have_the_images_shape(tmp_path, size, shown):
    (file,) = pictures.write(tmp_path / "p", a_list(tmp_path / "i", [size]), [])
    with Image.open(file) as image:
        assert image.size == (2 * shown[0] + 6, shown[1] + 25)
        # White are the heading and what is between the sides
        assert image.getpixel((shown[0] + 3, shown[1] + 24)) == (255, 255, 255)
        assert image.getpixel((shown[0] - 1, 25)) == (0, 0, 0)
        assert image.getpixel((shown[0] + 6, shown[1] + 24)) == (0, 0, 0)


def test_the_first_six_images_are_drawn_under_their_own_names(tmp_path):
    split = a_list(tmp_path / "i", [(40, 20)] * 8)
    files = pictures.write(tmp_path / "p", split, [])
    assert [file.name for file in files] == [f"{n}.png" for n in range(6)]
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == [
        f"{n}.png" for n in range(6)
    ]


def test_images_of_one_name_are_drawn_each(tmp_path):
    split = a_list(tmp_path / "a", [(40, 20)] * 2)
    more = a_list(tmp_path / "b", [(40, 20)] * 2)
    split.records[1:1] = more.records[:1]
    split.records += more.records[1:]
    files = pictures.write(tmp_path / "p", split, [])
    names = ["0.png", "0_2.png", "1.png", "1_2.png"]
    assert [file.name for file in files] == names
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == names


def test_boxes_are_drawn_where_they_are_in_the_colour_of_their_class(tmp_path):
    """Of the eighth class in the colour of the second."""
    split = a_list(tmp_path / "i", [(80, 40)], [(7, [20, 10, 30, 15])])
    found = [detected(10, 2, 0.5, [50, 20, 20, 10])]
    (file,) = pictures.write(tmp_path / "p", split, found)
    pixels = np.asarray(Image.open(file))[25:]
    left, right = pixels[:, :320], pixels[:, 326:]
    for side, colour, (x, y, w, h) in (
        (left, pictures.COLOURS[1], (80, 40, 120, 60)),
        (right, pictures.COLOURS[2], (200, 80, 80, 40)),
    ):
        column, row = side[y + h - 8], side[:, x + w - 4]
        drawn = np.flatnonzero((column == colour).all(1))
        assert drawn.tolist() == [x, x + 1, x + w - 1, x + w]
        drawn = np.flatnonzero((row == colour).all(1))
        assert drawn.tolist()[-2:] == [y + h - 1, y + h]
        # The name stands above the box, so nothing is in it
        assert not side[y + 4 : y + h - 2, x + 4 : x + w - 2].any()
        assert side[y - 10, x + 2].tolist() == list(colour)


def test_a_name_stays_in_its_image(tmp_path):
    """Inside the box where there is no room above, and left of the edge."""
    split = a_list(tmp_path / "i", [(80, 40)], [(0, [77, 1, 3, 38])])
    (file,) = pictures.write(tmp_path / "p", split, [])
    left = np.asarray(Image.open(file))[25:, :320]
    _, columns = np.nonzero((left == pictures.COLOURS[0]).all(2)[6:14])
    # The box begins at 308, four pixels below the upper edge, and the name is wider than it
    assert 290 < columns.min() < 306
    assert columns.max() == 319
    # With its letters
    assert not left[6:14, 300:318].any(2).all()


def test_as_many_of_the_best_are_shown_as_there_are_objects_but_three(
    tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr(
        pictures, "_write", lambda pen, text, *more: said.append((text, more[1]))
    )
    scores = [0.5, 0.91, 0.2, 0.7, 0.655]
    found = [detected(11, n, s, [1, 1, 9, 9]) for n, s in enumerate(scores)]
    found.append(detected(12, 3, 0.99, [1, 1, 9, 9]))
    box = [5, 5, 9, 9]
    for count, shown in ((1, 3), (4, 4)):
        said.clear()
        split = a_list(tmp_path / "i", [(40, 20)] * 2, [(6, box)] * count)
        pictures.write(tmp_path / "p", split, found)
        truth = [("c6", 6)] * count
        best = [("c1 0.91", 1), ("c3 0.70", 3), ("c4 0.66", 4), ("c0 0.50", 0)]
        # The surest last, so that it lies on top
        assert said == [*truth, *truth, *best[:shown][::-1]]


def test_marked_keypoints_are_dots_in_the_middle_of_their_pixels(tmp_path):
    split = a_list(tmp_path / "i", [(80, 40)], [(0, [2, 2, 76, 36])])
    seen = [20.5, 20.5, 2, 40.5, 30.5, 0, 60.5, 20.5, 1]
    split.records[0]["annotations"][0]["keypoints"] = seen
    found = detected(10, 0, 0.5, [2, 2, 76, 36])
    found["keypoints"] = [30, 20, 0.9, 50, 30, -2.0]
    (file,) = pictures.write(tmp_path / "p", split, [found])
    pixels = np.asarray(Image.open(file))[25:]
    colour = list(pictures.COLOURS[0])
    for side, dots in (
        (pixels[:, :320], {(80, 80): True, (160, 120): False, (240, 80): True}),
        (pixels[:, 326:], {(120, 80): True, (200, 120): True, (160, 80): False}),
    ):
        for (x, y), there in dots.items():
            assert (side[y, x].tolist() == colour) is there
            edges = [side[y, x - 3], side[y, x + 3], side[y - 3, x], side[y + 3, x]]
            assert all(edge.tolist() == [255] * 3 for edge in edges) is there


def test_outlines_are_drawn_of_polygons_and_of_run_lengths(tmp_path):
    """An image of 80 x 40 pixels is shown four times as large."""
    split = a_list(tmp_path / "i", [(80, 40)], [(0, [0, 36, 1, 1])])
    triangle = [20, 5, 60, 5, 60, 35]
    split.records[0]["annotations"][0]["segmentation"] = [triangle]
    block = np.zeros((40, 80), np.uint8)
    block[10:30, 30:70] = 1
    code = mask.encode(np.asfortranarray(block))
    found = detected(10, 0, 0.5, [0, 36, 1, 1])
    found["segmentation"] = {"size": [40, 80], "counts": code["counts"].decode()}
    (file,) = pictures.write(tmp_path / "p", split, [found])
    pixels = np.asarray(Image.open(file))[25:]
    left, right = pixels[:, :320], pixels[:, 326:]
    colour = pictures.COLOURS[0]

    def drawn(line):
        return np.flatnonzero((line == colour).all(1))

    # The triangle's hypotenuse leads from (80, 20) to (240, 140)
    row = drawn(left[80])
    assert row.min() == pytest.approx(160, abs=2) and row.max() == 240
    assert len(row) < 6
    row, column = drawn(right[40, 60:]) + 60, drawn(right[:, 200])
    assert row.min() == pytest.approx(120, abs=4)
    assert row.max() == pytest.approx(280, abs=4)
    assert column.min() == pytest.approx(40, abs=4)
    assert column.max() == pytest.approx(120, abs=4)


@pytest.mark.parametrize("x", [20, -5])
def test_a_name_has_two_pixels_of_ground_around_it(tmp_path, x):
    """Also where its box begins left of the image."""
    split = a_list(tmp_path / "i", [(80, 40)], [(2, [x, 20, 60, 15])])
    (file,) = pictures.write(tmp_path / "p", split, [])
    left = np.asarray(Image.open(file))[25:, :320]
    rows, columns = np.nonzero((left[:79] == pictures.COLOURS[2]).all(2))
    assert columns.min() == max(4 * x, 0)
    font = pictures._font()
    before, over, behind, under = (int(v) for v in font.getbbox("c2"))
    width, height = behind - before + 4, under - over + 4
    sign = Image.new("RGB", (width + 1, height + 1), pictures.COLOURS[2])
    at = (2 - before, 2 - over)
    ImageDraw.Draw(sign).text(at, "c2", fill="black", font=font)
    shown = left[rows.min() :, columns.min() :][: height + 1, : width + 1]
    assert (shown == np.asarray(sign)).all()
    assert rows.min() + height == 80  # it stands on the box
