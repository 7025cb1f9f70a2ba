"""Linear segmentation: each head is as if alone; dilation, windows, counts, the whole command."""

import dataclasses
import io
import itertools
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score, recall_score
from support.interruptions import Killed, kill
from torch import nn

from backbench.board.board import collect, compare_rows
from backbench.cli.program import main
from backbench.images.dense import IGNORED, DenseList
from backbench.records import store
from backbench.stats import dense_counts
from backbench.transfer.devices import Machine
from backbench.transfer.features import dense_views
from backbench.transfer.features.dense_views import TrainingPairs, best_classes, starts
from backbench.transfer.probes import seg as probe_seg
from backbench.transfer.probes.seg import DenseHeads
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.verify import verification
from backbench.weights.families.resnet_trunk import build_backbone

ONE = Machine(torch.device("cpu"), 0, 1, 0)
DEMO = load_protocol("seg_demo", all_kinds())


@pytest.mark.parametrize(
    ("average", "dropout"), [("all", 0.0), ("labelled", 0.0), ("all", 0.3)]
)
def test_each_head_is_what_torchs_modules_train_alone(average, dropout):
    """Rates in one pass against nn.BatchNorm2d, nn.Conv2d, cross_entropy and AdamW, one by one."""
    p = dataclasses.replace(DEMO, lr=(1e-3, 1e-2), average=average, dropout=dropout)
    ours = DenseHeads(p, 5, 12, seed=3, machine=ONE)
    start = ours.heads[0]["weight"].detach().clone()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(30):
        maps = torch.randn(4, 3, 3, 12, generator=generator) * 2 + 1
        labels = torch.randint(0, 5, (4, 12, 12), generator=generator)
        labels[:, :2] = IGNORED
        batches.append((maps, labels))
    kept = []
    for step, (maps, labels) in enumerate(batches):
        kept.append(ours._kept(4, 4))
        factor = p.schedule.factor(step, 30, 1.0)
        ours.step(maps, labels.to(torch.uint8), torch.tensor(p.lr) * factor, batch=4)
    for index, lr in enumerate(p.lr):
        alone = nn.Sequential(nn.BatchNorm2d(12), nn.Conv2d(12, 5, 1))
        with torch.no_grad():
            alone[1].weight.copy_(start[:, :, None, None])
            alone[1].bias.zero_()
        optimizer = torch.optim.AdamW(alone.parameters(), weight_decay=p.weight_decay)
        for step, (maps, labels) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr * p.schedule.factor(step, 30, 1.0)
            x = maps.permute(0, 3, 1, 2) * (kept[step] if dropout else 1)
            large = F.interpolate(
                alone(x), (12, 12), mode="bilinear", align_corners=False
            )
            summed = F.cross_entropy(
                large, labels, ignore_index=IGNORED, reduction="sum"
            )
            pixels = labels.numel()
            if average == "labelled":
                pixels = int((labels != IGNORED).sum())
            optimizer.zero_grad()
            (summed / pixels).backward()
            optimizer.step()
        norm, convolution = alone
        matrix = convolution.weight[:, :, 0, 0]
        theirs = (matrix, convolution.bias, norm.weight, norm.bias)
        for mine, wanted in zip(ours.heads[index].values(), theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            ours.norm.running_var, norm.running_var, rtol=0, atol=1e-5
        )


def test_a_map_is_scored_alone_as_among_others():
    """By the running statistics, and not by those of an image's windows."""
    heads = DenseHeads(DEMO, 5, 12, seed=3, machine=ONE)
    maps = torch.randn(4, 3, 3, 12)
    heads.step(maps, torch.zeros(4, 6, 6, dtype=torch.uint8), torch.ones(2), batch=4)
    torch.testing.assert_close(heads.normalised(maps)[:1], heads.normalised(maps[:1]))


def test_the_rates_follow_dinov3s_schedule():
    """The two lines of its code, at the steps where they begin and end."""
    schedule = load_protocol("seg_linear", all_kinds()).schedule

    def factor(step):
        return schedule.factor(step, 40000, 1.0)

    assert factor(0) == pytest.approx(1e-6)
    assert factor(750) == pytest.approx(0.5 * (1 - 750 / 40000), rel=1e-5)
    assert factor(1500) == pytest.approx(0.5 * (1 + np.cos(np.pi * 1501 / 40000)))
    assert factor(39999) == pytest.approx(0)


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stride", [16, 8])
def test_dilation_adds_places_and_changes_none(arch, stride):
    torch.manual_seed(0)
    trunk = build_backbone(arch, width=0.25).eval().double()
    images = torch.randn(2, 3, 95, 130).double()
    more = 32 // stride  # times as many places along a side
    with torch.no_grad():
        before = trunk.tokens(images)
        trunk.dilate(stride)
        after = trunk.tokens(images)
    assert trunk.strides[-1] == stride
    assert after.shape[1] > before.shape[1]
    torch.testing.assert_close(after[:, ::more, ::more], before, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (400, [0]),
        (512, [0]),
        (513, [0, 1]),
        (853, [0, 341]),
        (854, [0, 341, 342]),
        (2217, [0, 341, 682, 1023, 1364, 1705]),
    ],
)
def test_windows_begin_where_a_hand_puts_them(length, expected):
    assert starts(length, 512, 341) == expected


@pytest.mark.parametrize(("height", "width"), [(17, 300), (64, 64), (40, 9)])
def test_logits_in_strips_have_the_best_classes_of_whole_ones(height, width):
    logits = torch.randn(7, 20, 30, generator=torch.Generator().manual_seed(height))
    whole = F.interpolate(
        logits[None], (height, width), mode="bilinear", align_corners=False
    )[0]
    best = best_classes(logits, height, width).long()
    picked = whole.gather(0, best[None])[0]
    torch.testing.assert_close(picked, whole.max(0).values, rtol=0, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Blocks(DenseList):
    """Images whose red channel is their label map, in blocks of 16 pixels."""

    def pair(self, index):
        draw = np.random.default_rng(index)
        labels = draw.integers(0, 3, (6, 8), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
        labels[:16, :16] = IGNORED
        pixels = np.stack([labels, labels * 0, labels * 0], 2)
        return Image.fromarray(pixels), labels


def blocks(tmp_path, count=3):
    names = tuple(f"{n}.png" for n in range(count))
    return Blocks(tmp_path, names, (0,) * count, ("a", "b", "c"), names, {})


def test_a_crop_and_its_labels_stay_together_and_repeat(tmp_path, monkeypatch):
    """Cut, flipped and padded alike: away from the blocks' borders the red channel is the label."""
    monkeypatch.setattr(dense_views, "distorted", lambda pixels, *_: pixels)
    p = dataclasses.replace(DEMO, scale=(0.5, 2.0))
    items = TrainingPairs(
        blocks(tmp_path),
        side=96,
        scale=p.scale,
        crop=p.geometry.crop,
        most_of_a_class=p.most_of_a_class,
        hue=p.hue,
        seed=0,
    )
    padded = 0
    for key in itertools.product(range(8), range(3)):  # (epoch, image)
        image, labels, inside = items[key]
        for first, again in zip((image, labels, inside), items[key]):
            assert torch.equal(first, again)
        outside = ~inside[0]
        assert (labels[outside] == IGNORED).all()
        assert (image[:, outside] == 0).all()
        known = {0, 1, 2, IGNORED}
        assert set(labels.unique().tolist()) <= known, "a label is never a mean of two"
        agree = (image[0] == labels) | (labels == IGNORED)
        assert agree[inside[0]].float().mean() > 0.7
        padded += int(outside.any())
    assert 0 < padded < 24


class OneHot(nn.Module):
    """A trunk whose map is the label, one-hot at a stride of 16."""

    def __call__(self, trunks, pixels, *, tokens, inside=None):
        small = pixels[:, 0, 8::16, 8::16].long().clamp(max=2)
        return [F.one_hot(small, 3).float() for _ in trunks]


def test_a_trunk_that_knows_the_label_scores_100(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_seg, "forward_all", OneHot())
    geometry = dataclasses.replace(DEMO.geometry, resize=96)
    p = dataclasses.replace(DEMO, lr=(1.0,), stride=32, geometry=geometry)
    heads = DenseHeads(p, 3, 3, seed=0, machine=ONE)
    with torch.no_grad():
        heads.heads[0]["weight"].copy_(torch.eye(3))
    images = blocks(tmp_path)
    task = SimpleNamespace(protocol=p)
    windows = probe_seg.Windows(task, [None], [heads], ONE, None)
    for index in range(3):
        picture, labels = images.pair(index)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        (maps,) = windows._maps(pixels)
        logits = windows._logits(heads, 0, heads.normalised(maps), 96, 128)
        # The middles of the blocks: between two middles interpolation mixes two labels.
        best = best_classes(logits, 96, 128).numpy()[8::16, 8::16]
        counts = dense_counts.count(best, labels[8::16, 8::16], 3)
        assert float(dense_counts.scores(*counts)["miou"]) == 1.0


def test_the_pictures_of_one_of_two_ranks_are_of_its_own_images(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_seg, "forward_all", OneHot())
    heads = DenseHeads(DEMO, 3, 3, seed=0, machine=ONE)
    images = blocks(tmp_path, 6)
    task = SimpleNamespace(
        protocol=DEMO,
        run=tmp_path,
        dataset=SimpleNamespace(name="x"),
        splits={"test": images},
    )
    first_of_two = Machine(ONE.device, 0, 2, 0)
    windows = probe_seg.Windows(task, [None], [heads], first_of_two, None)
    ((counts,),), (shown,) = windows.count("test", [[0]])
    assert list(shown) == [0, 2, 4]
    assert np.flatnonzero(counts.any((1, 2))).tolist() == [0, 2, 4]
    for index, best in shown.items():
        again = dense_counts.count(best, images.pair(index)[1], 3)
        np.testing.assert_array_equal(again, counts[index])


def test_scores_are_sklearns_on_1000_random_maps():
    """scikit-learn scores all maps in one call: class c of map m is its class 10 m + c."""
    draw = np.random.default_rng(0)
    found = []
    labels = []
    predictions = []
    for number in range(1000):
        classes = int(draw.integers(2, 8))
        there = int(draw.integers(1, classes + 1))  # the others are in no label
        label = draw.integers(0, there, (5, 9))
        right = draw.random((5, 9)) < 0.6
        prediction = np.where(right, label, draw.integers(0, classes, (5, 9)))
        label = np.where(draw.random((5, 9)) < 0.2, IGNORED, label)
        known = label != IGNORED
        counts = dense_counts.count(prediction, label, classes)
        found.append(dense_counts.scores(*counts))
        labels.append(10 * number + label[known])
        predictions.append(10 * number + prediction[known])
    y, x = np.concatenate(labels), np.concatenate(predictions)
    in_both = np.union1d(y, x)
    ious = jaccard_score(y, x, average=None, labels=in_both)
    in_labels = np.unique(y)
    recalls = recall_score(y, x, average=None, labels=in_labels)
    for number, scores in enumerate(found):
        right = labels[number] == predictions[number]
        assert abs(scores["pixel_acc"] - right.mean()) < 1e-9
        assert abs(scores["miou"] - ious[in_both // 10 == number].mean()) < 1e-9
        assert abs(scores["macc"] - recalls[in_labels // 10 == number].mean()) < 1e-9


def test_the_mean_is_over_classes_of_all_images_and_not_per_image():
    first = [[4, 0], [4, 0], [4, 0]]  # intersection, predicted, labelled of two classes
    second = [[0, 1], [3, 1], [0, 4]]
    scores = dense_counts.scores(*np.array([first, second]).sum(0))
    assert scores["miou"] == pytest.approx((4 / 7 + 1 / 4) / 2)


def command(made, out, *more, protocol="seg_demo"):
    root, trunks = made
    files = list(map(str, trunks))
    words = ["--datasets", "scenes", "--protocol", protocol]
    words += ["length.default.iterations=6", "dropout=0.2", *more]
    words += ["--data", str(root), "--out", str(out)]
    words += ["--workers", "0", "--accelerator", "cpu"]
    return main(["linear", *files, *words])


def test_the_rate_is_chosen_on_the_held_out_part(made, tmp_path, monkeypatch):
    looked = []
    real = probe_seg.Windows.count

    def count(self, split, heads):
        looked.append((split, {len(each) for each in heads}))
        return real(self, split, heads)

    monkeypatch.setattr(probe_seg.Windows, "count", count)
    assert command(made, tmp_path / "run", "lr=0.001,0.01") == 0
    assert looked == [("val", {2}), ("test", {1})]


def numbers(out):
    found = {}
    for r in store.read(out)[0]:
        found[r.checkpoint, r.metric] = (r.value, r.ci95, r.chosen)
    return found


@pytest.mark.usefixtures("dense_rows")
def test_the_command_leaves_numbers_that_follow_from_its_counts(whole, tmp_path):
    board = collect([whole])
    (main_column,) = board.main_columns()
    assert main_column.name.startswith("segmentation/scenes/miou@seg-demo-v1")
    pairs = compare_rows(board)
    assert len(pairs) == 3
    assert all("resamples" in pair.difference.paired for pair in pairs)
    page = tmp_path / "page.html"
    words = ["leaderboard", str(whole), "--html", str(page), "--latex", str(tmp_path)]
    assert main(words) == 0
    assert "Segmentation of random0" in page.read_text()
    assert "segmentation" in (tmp_path / "board.tex").read_text().lower()


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (["intersection"], "more pixels are right"),
        (["predicted"], "other numbers of pixels"),
        (["predicted", "labelled"], "its counts of pixels give"),
        ([], "its list has"),  # an image is left out instead
    ],
)
def test_forged_counts_do_not_pass(whole, tmp_path, raised, says, caplog):
    out = tmp_path / "forged"
    shutil.copytree(whole, out)
    rows = [r for r in store.read(out)[0] if r.metric == "miou"][:1]
    file = out / rows[0].provenance["predictions"]
    arrays = dict(np.load(file))
    if not raised:
        arrays |= {name: arrays[name][:-1] for name in dense_counts.NAMES}
    for name in raised:
        arrays[name][0, 0] += 10**6
    np.savez(file, **arrays)
    (verdict,) = verification.of_run(rows, out)
    assert says in verdict.why + caplog.text
    assert verdict.level == verification.UNBACKED


# In training, at its end, in the test
@pytest.mark.parametrize("at", [20, 50, pytest.param(57, marks=pytest.mark.slow)])
def test_a_killed_run_continues_to_the_same_numbers(made, whole, tmp_path, decoder, at):
    out = tmp_path / "killed"
    decoder.at[at] = kill
    with pytest.raises(Killed):
        command(made, out, "save_minutes=0")
    assert command(made, out, "save_minutes=0") == 0
    assert numbers(out) == numbers(whole)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["geometry.resize=60"], "resize"),
        (["stride=100"], "stride at most"),
        (["optimizer=sgd"], "optimizer: adamw"),
    ],
)
def test_what_does_not_fit_is_refused_unread(made, tmp_path, bad_input, words, says):
    bad_input(command(made, tmp_path / "run", *words), says)
    assert not (tmp_path / "run").exists()


def test_evaluate_measures_it_beside_other_tasks(made, tmp_path):
    root, trunks = made
    task = "segmentation/scenes@seg_demo length.default.iterations=2"
    words = ["evaluate", str(trunks[0]), task, "--data", str(root)]
    words += ["--out", str(tmp_path / "runs"), "--workers", "0"]
    assert main(words) == 0
    table = (tmp_path / "runs" / "leaderboard.csv").read_text()
    assert "segmentation/scenes/miou" in table


def test_one_rate_trains_on_all_of_train(made, tmp_path):
    words = ("batch_size=4", "reference_batch=4", "stride=43")
    words += ("geometry.crop=64", "geometry.resize=64")
    assert command(made, tmp_path / "run", *words, protocol="seg_dinov3") == 0
    rows = list(store.read(tmp_path / "run")[0])
    chosen = rows[0].chosen
    assert all(row.chosen == chosen for row in rows)
    assert chosen["lr"] == 0.001
    assert chosen["on"] is None
    assert chosen["trained_on"] == "train+val"


class TwoPictures:
    """Two test images: 60 x 20 pixels, of class 0, and 20 x 20, whose upper half is of class 1."""

    classes = ("wall", "sky", "tree")

    def pair(self, index):
        if index == 0:
            return Image.new("RGB", (60, 20), (1, 2, 3)), np.zeros((20, 60), np.uint8)
        labels = np.full((20, 20), IGNORED, np.uint8)
        labels[:10] = 1
        return Image.new("RGB", (20, 20), (200, 100, 50)), labels


def test_the_picture_shows_images_labels_and_predictions_below_one_another():
    task = SimpleNamespace(splits=SimpleNamespace(test=TwoPictures()))
    right = np.zeros((20, 60), np.uint8)
    shown = {0: right, 1: np.full((20, 20), 2, np.uint8)}
    whole = Image.open(io.BytesIO(probe_seg._montage(task, shown))).convert("RGB")
    side = probe_seg.SHOWN_SIDE
    assert whole.size == (3 * 3 * side, 2 * side)

    def at(column, row, width, height=0.5):
        """The pixel in the middle of a column of a strip."""
        x = int((column + 0.5) * width * side)
        return whole.getpixel((x, int((row + height) * side)))

    assert at(0, 0, 3) == (1, 2, 3)
    assert at(1, 0, 3) == at(2, 0, 3)  # as labelled
    assert at(0, 1, 1) == (200, 100, 50)
    wall, sky, tree = at(1, 0, 3), at(1, 1, 1, 0.25), at(2, 1, 1)
    assert len({wall, sky, tree, (0, 0, 0)}) == 4
    assert at(1, 1, 1, 0.75) == (0, 0, 0)  # what is ignored
    assert at(5, 1, 1) == (0, 0, 0)  # beside a narrow image
