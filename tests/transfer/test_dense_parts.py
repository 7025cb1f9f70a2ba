"""Images with label maps, part by part: sizes, windows, crops, shares of ranks, neighbours' votes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from backbench.errors import BadInput
from backbench.images.dense import IGNORED, DenseList
from backbench.records import predictions
from backbench.transfer.devices import Machine
from backbench.transfer.features import dense_views
from backbench.transfer.features.dense_views import (
    SquareMaps,
    TrainingPairs,
    bilinear,
    pairs,
    resized_to,
    starts,
)
from backbench.transfer.probes import seg, seg_knn
from backbench.transfer.probes.seg import DenseHeads, Windows
from backbench.transfer.protocols import all_kinds, load_protocol

ONE = Machine(torch.device("cpu"), 0, 1, 0)
DEMO = load_protocol("seg_demo", all_kinds())


@dataclasses.dataclass(frozen=True)
class Painted(DenseList):
    """Images whose red channel is their label map: the left 10 columns of 30 are of class 1."""

    def pair(self, index):
        labels = np.zeros((20, 30), np.uint8)
        labels[:, :10] = 1
        labels[:5] = IGNORED
        labels[0, 0] = index
        pixels = np.stack([labels * 100, labels * 0, labels * 0 + 7], 2)
        return Image.fromarray(pixels.astype(np.uint8)), labels


def painted(count=3):
    names = tuple(f"{n}.png" for n in range(count))
    return Painted(Path("/d"), names, (0,) * count, ("a", "b", "c"), names, {})


@pytest.mark.parametrize(
    ("size", "side", "resized"),
    [
        ((30, 20), 10, (15, 10)),
        ((20, 30), 10, (10, 15)),
        ((20, 20), 10, (10, 10)),
        # The longer side is rounded, and a half goes up
        ((25, 20), 10, (13, 10)),
        ((20, 25), 10, (10, 13)),
        ((101, 100), 10, (10, 10)),
        ((100, 104), 10, (10, 10)),
    ],
)
def test_the_shorter_side_is_the_protocols(size, side, resized):
    assert resized_to(*size, side) == resized


def test_images_to_test_keep_their_labels_at_their_own_size():
    items = dense_views.TestPairs(painted(), 10)
    pixels, labels, index = items[0, 2]
    assert (pixels.shape, labels.shape, index) == ((3, 10, 15), (20, 30), 2)
    assert labels[0, 0] == 2 and labels[10, 3] == 1 and labels[10, 20] == 0
    # Channels first: class 1 is red at the left, and blue is 7 everywhere
    assert pixels[0, 8, 1] == 100 and pixels[0, 8, 12] == 0
    assert (pixels[2] == 7).all() and not pixels[1].any()


def test_squared_maps_take_the_nearest_label():
    square = SquareMaps(painted(), 12)[0, 1]
    assert (square.shape, square.dtype) == ((12, 12), torch.uint8)
    assert set(square.unique().tolist()) == {0, 1, IGNORED}
    # A third of the columns is of class 1, and a quarter of the rows is ignored
    assert square[6].tolist() == [1] * 4 + [0] * 8
    assert (square[:3, 1:] == IGNORED).all() and (square[3:] != IGNORED).all()


def test_pairs_come_in_the_order_of_their_keys():
    items = SquareMaps(painted(5), 4)
    whole = [items[0, n] for n in range(5)]
    batches = [[(0, 3), (0, 1)], [(0, 4)]]
    found = [torch.stack(list(maps)) for maps in pairs(items, batches, ONE)]
    assert torch.equal(found[0], torch.stack([whole[3], whole[1]]))
    assert torch.equal(found[1], whole[4][None])


def place(labels, drawn, crop=4, most=0.75):
    items = TrainingPairs(
        painted(),
        side=4,
        scale=(1, 1),
        crop=crop,
        most_of_a_class=most,
        hue=0.1,
        seed=0,
    )
    return items._place(np.asarray(labels, np.uint8), drawn)


def test_a_crop_has_two_classes_and_none_of_them_fills_it():
    """Of 4 x 8 pixels the left half is of class 0, the right one of class 1; (left, top)."""
    labels = np.zeros((4, 8), int)
    labels[:, 4:] = 1
    # The first of two that would do; the first column of windows has one class alone
    assert place(labels, [[0, 0], [0, 0.5], [0, 0.6]]) == (2, 0)
    # Exactly as much as is allowed is too much: 12 of 16
    assert place(labels, [[0, 0.2], [0, 0.4], [0, 0.99]]) == (2, 0)
    assert place(labels, [[0, 0.2], [0, 0.4]], most=0.76) == (1, 0)
    # Where none does, the last one stands
    assert place(labels * 0, [[0, 0.3], [0, 0.99]]) == (4, 0)
    # What is ignored counts for neither
    ignored = labels.copy()
    ignored[:, 4:] = IGNORED
    assert place(ignored, [[0, 0.5], [0, 0.99]]) == (4, 0)
    # An image smaller than the crop has one place
    assert place(labels[:3, 3:6], [[0.99, 0.99]]) == (0, 0)
    # The first number is of the top, the second of the left
    assert place(labels.T, [[0, 0], [0.5, 0]]) == (0, 2)


def test_a_crops_size_is_drawn_between_two_factors(monkeypatch):
    """And the seed, the epoch and the image decide it."""
    items = TrainingPairs(
        painted(),
        side=20,
        scale=(0.5, 1.5),
        crop=64,
        most_of_a_class=1,
        hue=0.0,
        seed=0,
    )
    shapes = set()
    for epoch in range(30):
        _, _, inside = items[epoch, 0]
        height, width = int(inside[0, :, 0].sum()), int(inside[0, 0].sum())
        assert (width, height) == resized_to(30, 20, height)
        assert inside[0, :height, :width].all() and inside.sum() == height * width
        shapes.add(height)
    assert min(shapes) >= 10 and max(shapes) <= 30 and len(shapes) > 8
    assert min(shapes) < 14 and max(shapes) > 26
    other = dataclasses.replace(painted())
    again = TrainingPairs(
        other, side=20, scale=(0.5, 1.5), crop=64, most_of_a_class=1, hue=0.0, seed=1
    )
    assert any(not torch.equal(items[n, 0][2], again[n, 0][2]) for n in range(3))


def test_half_of_the_crops_are_flipped():
    """Class 1 is at the left of the image."""
    items = TrainingPairs(
        painted(), side=20, scale=(1, 1), crop=32, most_of_a_class=1, hue=0.0, seed=0
    )
    at_left = 0
    for epoch in range(60):
        image, labels, _ = items[epoch, 0]
        row = labels[15, :30].tolist()
        assert row in ([1] * 10 + [0] * 20, [0] * 20 + [1] * 10)
        at_left += row[0]
        red = image[0, 15, :30].float()
        assert (
            red[labels[15, :30] == 1].mean() > red[labels[15, :30] == 0].mean()
        ) or (red.std() == 0)
    assert 15 < at_left < 45


# Windows


@pytest.mark.parametrize(
    ("length", "window", "stride", "expected"),
    [
        (8, 8, 4, [0]),
        (9, 8, 4, [0, 1]),
        (12, 8, 4, [0, 4]),
        (13, 8, 4, [0, 4, 5]),
        (5, 8, 4, [0]),
        (16, 8, 8, [0, 8]),
    ],
)
def test_where_windows_begin(length, window, stride, expected):
    assert starts(length, window, stride) == expected


def test_interpolation_is_torchs():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    for size in (3, 5, 11):
        found = bilinear(5, size) @ x
        expected = F.interpolate(
            x[None, None], size, mode="linear", align_corners=False
        )
        torch.testing.assert_close(found, expected[0, 0])


def test_logits_are_means_of_the_windows_over_a_wide_image(monkeypatch):
    """A crop of 8 and a stride of 4: a map has one place, and pixels lie in one window to four."""
    geometry = dataclasses.replace(DEMO.geometry, resize=8, crop=8)
    p = dataclasses.replace(
        DEMO, lr=(1.0,), stride=4, geometry=geometry, feature_batch=2
    )
    heads = DenseHeads(p, 2, 1, seed=0, machine=ONE)
    with torch.no_grad():
        heads.heads[0]["weight"].copy_(torch.tensor([[1.0], [-2.0]]))
        heads.heads[0]["bias"].copy_(torch.tensor([0.5, 0.0]))
    passed = []

    def forward(trunks, windows, *, tokens):
        passed.append(len(windows))
        assert tokens
        return [windows[:, 0].float().mean((1, 2))[:, None, None, None] for _ in trunks]

    monkeypatch.setattr(seg, "forward_all", forward)
    windows = Windows(SimpleNamespace(protocol=p), [None], [heads], ONE, None)
    assert windows._corners(8, 14) == [(0, 0), (0, 4), (0, 6)]
    assert windows._corners(12, 8) == [(0, 0), (4, 0)]
    pixels = torch.arange(12 * 14).view(1, 12, 14) % 50
    pixels = pixels.repeat(3, 1, 1).to(torch.uint8)
    (maps,) = windows._maps(pixels)
    assert passed == [2, 2, 2] and maps.shape == (6, 1, 1, 1)
    found = windows._logits(heads, 0, maps.permute(0, 3, 1, 2), 12, 14)
    total = torch.zeros(2, 12, 14)
    times = torch.zeros(12, 14)
    for top in (0, 4):
        for left in (0, 4, 6):
            mean = pixels[0, top : top + 8, left : left + 8].float().mean()
            total[0, top : top + 8, left : left + 8] += mean + 0.5
            total[1, top : top + 8, left : left + 8] += -2 * mean
            times[top : top + 8, left : left + 8] += 1
    torch.testing.assert_close(found, total / times)


# Ranks


def test_ranks_count_equally_many_images_and_each_is_counted_once():
    for n, world in ((7, 3), (6, 3), (2, 4), (1, 1)):
        machines = [Machine(ONE.device, rank, world, 0) for rank in range(world)]
        shares = [seg.own_images(n, machine) for machine in machines]
        assert len({len(share) for share in shares}) == 1
        counted = []
        for machine, share in zip(machines, shares):
            counts = torch.zeros(n, 3, 2, dtype=torch.int64)
            for index in share:
                counts[index] = index + 1
            counted.append(seg.gathered(counts, machine))
        expected = np.arange(1, n + 1)[:, None, None] * np.ones((1, 3, 2), int)
        np.testing.assert_array_equal(sum(counted), expected)


def test_a_rank_drops_the_channels_of_its_own_images():
    """Those that one process would drop of them, by the number of steps that were taken."""
    p = dataclasses.replace(DEMO, dropout=0.25, lr=(1.0,))
    whole = DenseHeads(p, 2, 50, seed=0, machine=ONE)
    factors = whole._kept(7, 7)
    assert factors.shape == (7, 50, 1, 1)
    assert factors.unique().tolist() == pytest.approx([0, 4 / 3])
    assert 0.6 < float((factors > 0).float().mean()) < 0.9
    for rank, images in ((0, slice(0, 2)), (1, slice(2, 4)), (2, slice(4, 7))):
        machine = Machine(ONE.device, rank, 3, 0)
        heads = DenseHeads(p, 2, 50, seed=0, machine=machine)
        mine = factors[images]
        assert torch.equal(heads._kept(7, len(mine)), mine)
    weight = whole.heads[0]["weight"]
    whole.optimizer.state[weight]["step"] = torch.tensor(3.0)
    assert not torch.equal(whole._kept(7, 7), factors)
    other = DenseHeads(p, 2, 50, seed=1, machine=ONE)
    assert not torch.equal(other._kept(7, 7), factors)


def test_processes_that_do_not_divide_a_batch_of_crops_are_refused():
    p = dataclasses.replace(DEMO, batch_size=4)
    task = SimpleNamespace(protocol=p)
    three = Machine(ONE.device, 0, 3, 0)
    extractor = SimpleNamespace(trunks=[])
    with pytest.raises(
        BadInput, match="--devices: 3 do not divide a batch of 4 images"
    ):
        seg.measure(task, extractor, three, None)


# Rows of maps


def test_rows_of_maps_are_of_all_images_together(tmp_path, monkeypatch):
    counts = np.array(
        [[[4, 0], [4, 0], [4, 0]], [[0, 1], [3, 1], [0, 4]], [[2, 2], [3, 2], [2, 3]]]
    )
    rows = []

    def row(task, checkpoint, **about):
        rows.append(about)
        return about

    monkeypatch.setattr(seg.keeping, "row", row)
    monkeypatch.setattr(seg, "_montage", lambda task, shown: b"png of" + bytes(shown))
    task = SimpleNamespace(
        run=tmp_path, stem=lambda checkpoint: "stem", hashes={"test": "m"}
    )
    module = SimpleNamespace(strides=(4, 16))
    trunk = SimpleNamespace(checkpoint="c", state="digest", module=module)
    found = seg.rows_of(task, trunk, counts, {"lr": 1}, [1, 2])
    assert found == rows
    by_metric = {about["metric"]: about for about in rows}
    # Of class a 6 of 10, of class b 3 of 7
    assert by_metric["miou"]["value"] == pytest.approx(100 * (6 / 10 + 3 / 7) / 2)
    assert by_metric["pixel_acc"]["value"] == pytest.approx(100 * 9 / 13)
    assert by_metric["macc"]["value"] == pytest.approx(100 * (6 / 6 + 3 / 7) / 2)
    assert by_metric["macc"]["ci95"] is None
    for metric in ("miou", "pixel_acc"):
        low, high = by_metric[metric]["ci95"]
        assert 0 <= low < by_metric[metric]["value"] < high <= 100
    kept = predictions.load(tmp_path / "predictions" / "stem.npz")
    np.testing.assert_array_equal(kept["intersection"], counts[:, 0])
    np.testing.assert_array_equal(kept["predicted"], counts[:, 1])
    np.testing.assert_array_equal(kept["labelled"], counts[:, 2])
    assert (tmp_path / "pictures" / "stem.png").read_bytes() == b"png of\1\2"
    for about in rows:
        assert about["chosen"] == {"lr": 1}
        assert about["provenance"] == {
            "predictions": "predictions/stem.npz",
            "picture": "pictures/stem.png",
            "trunk_sha256": "digest",
            "map_stride": 16,
        }


# Neighbours


def test_votes_are_counted_without_what_is_ignored():
    labels = torch.tensor([[0, 2, 2, IGNORED], [IGNORED] * 4, [1, 1, 0, 1]])
    kept = labels.clone()
    assert seg_knn.votes(labels.to(torch.uint8), 3).tolist() == [
        [1, 0, 2],
        [0, 0, 0],
        [1, 3, 0],
    ]
    assert torch.equal(labels, kept)


def test_pieces_hold_so_many_numbers_at_most(monkeypatch):
    monkeypatch.setattr(seg_knn, "PIECE", 12)
    rows = torch.arange(28).view(7, 4)
    assert [len(part) for part in seg_knn._pieces(rows)] == [3, 3, 1]
    assert torch.equal(torch.cat(seg_knn._pieces(rows)), rows)
    wide = torch.zeros(3, 50)
    assert [len(part) for part in seg_knn._pieces(wide)] == [1, 1, 1]


@pytest.mark.parametrize(
    "changes", [{"square": False}, {"crop": 64, "resize": 96}, {"head": "lphi"}]
)
def test_whole_images_are_read_as_squares(changes):
    p = load_protocol("seg_knn_demo", all_kinds())
    head = {"head": changes.pop("head", None)}
    geometry = dataclasses.replace(p.geometry, **changes)
    with pytest.raises(ValueError, match="whole images are read: geometry"):
        dataclasses.replace(p, geometry=geometry, **head)
