"""A step's input depends on recipe and data alone, not on workers, ranks or restarts."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_pretraining
from support.pictures import picture, write_pictures, write_shards
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision.transforms.functional import resized_crop, to_tensor

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images.augmentations import draw
from backbench.images.crops import Crops
from backbench.images.image_list import ArrayList, ImageList
from backbench.images.preprocess import Pixels, normalise
from backbench.pretrain import data
from backbench.pretrain.recipe import Data, ViewsConfig
from backbench.runs import seeding

CROPS = (Crops(count=2, size=24), Crops(count=1, size=16, scale=(0.05, 0.3)))


def recipe(**changes):
    defaults = {"views": ViewsConfig(crops=CROPS), "epochs": 3}
    return tiny_pretraining.config(**{**defaults, **changes})


@pytest.fixture
def root(tmp_path):
    write_pictures(tmp_path)
    return tmp_path


@pytest.fixture
def found(root):
    return catalog.open_split(root, "shapes", "train")


def batches(found, config, *, first=0, last=6, workers=0, **ranks):
    return list(
        data.loader(found, config, first=first, last=last, workers=workers, **ranks)
    )


def same(a, b):
    """Two batches have the same images, labels and views."""
    if not torch.equal(a.index, b.index) or not torch.equal(a.labels, b.labels):
        return False
    return all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


def test_epochs_are_permutations_cut_into_whole_batches(found):
    order = list(data.batch_order(21, recipe(), first=0, last=6))
    assert [len(b) for b in order] == [8] * 6
    for epoch in range(3):
        pairs = order[2 * epoch] + order[2 * epoch + 1]
        assert {e for e, _ in pairs} == {epoch}
        assert len({i for _, i in pairs}) == 16
    assert [i for _, i in order[0]] != [i for _, i in order[2]]
    assert list(data.batch_order(21, recipe(seed=1), first=0, last=6)) != order


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_global_batch_in_order(ranks, accumulate):
    whole = list(data.batch_order(21, recipe(), first=0, last=6))
    config = recipe(accumulate=accumulate)
    parts = []
    for rank in range(ranks):
        order = data.batch_order(21, config, first=0, last=6, rank=rank, ranks=ranks)
        parts.append(list(order))
    # Whatever the number of ranks, a micro-batch is the same images in the same order
    micro = []
    for shares in zip(*parts, strict=True):
        for share in shares:
            micro += share
    assert micro == [pair for batch in whole for pair in batch]


def test_views_and_labels_depend_on_neither_workers_nor_ranks_nor_restarts(found):
    config = recipe()
    whole = batches(found, config)
    assert [v.shape for v in whole[0].views] == [
        (8, 24, 24, 3),
        (8, 24, 24, 3),
        (8, 16, 16, 3),
    ]
    assert all(map(same, whole, batches(found, config, workers=2)))
    assert all(map(same, whole[3:], batches(found, config, first=3, workers=1)))
    first_half, second_half = (
        batches(found, config, rank=rank, ranks=2) for rank in range(2)
    )
    for batch, first, second in zip(whole, first_half, second_half, strict=True):
        for view, *shares in zip(batch.views, first.views, second.views, strict=True):
            assert torch.equal(view, torch.cat(shares))
    assert not torch.equal(whole[0].views[0], whole[0].views[1])
    by_image = {int(i): v for i, v in zip(whole[0].index, whole[0].views[0])}
    again = {int(i): v for b in whole[2:4] for i, v in zip(b.index, b.views[0])}
    for i, label in zip(whole[0].index, whole[0].labels):
        assert found.paths[i].startswith("abc"[label])
    assert any(
        not torch.equal(by_image[i], again[i]) for i in by_image.keys() & again.keys()
    )


def test_reference_views_are_torchvisions_tensors(found):
    """With no random step but the crop: resized_crop on the PIL image, then ToTensor's numbers."""
    crops = Crops(count=1, size=24, flip=0, jitter_p=0, gray_p=0, blur_p=0)
    config = recipe(views=ViewsConfig(pipeline="reference", crops=(crops,)))
    (batch, *_) = batches(found, config)
    for n, i in enumerate(batch.index.tolist()):
        image = Image.open(found.file(i)).convert("RGB")
        generator = seeding.generator(config.seed, "views", 0, i)
        drawn = draw(generator, image.height, image.width, crops)
        want = to_tensor(resized_crop(image, *drawn.box, [24, 24]))
        have = batch.views[0][n].permute(2, 0, 1).float() / 255
        assert torch.equal(have, want)


@dataclass(frozen=True)
class Counting(ImageList):
    """A list that notes every decoding."""

    decoded: list

    def array(self, index):
        self.decoded.append(index)
        return super().array(index)


def view_batches(found, *, cache_bytes=1 << 20, device_colour=False):
    return data.ViewBatches(
        found, recipe(), cache_bytes=cache_bytes, device_colour=device_colour
    )


def test_an_image_is_decoded_once_for_all_views_and_epochs_within_the_budget(found):
    counting = Counting(found.root, found.paths, found.labels, found.classes, [])
    dataset = view_batches(counting)
    items = [(epoch, i) for epoch in range(3) for i in range(21)]
    dataset.__getitems__(items)
    assert sorted(counting.decoded) == list(range(21))
    counting.decoded.clear()
    half = sum(found.array(i).nbytes for i in range(10))
    dataset = view_batches(counting, cache_bytes=half)
    dataset.__getitems__(items)
    assert sum(a.nbytes for a in dataset.cache.values()) <= half
    assert len(counting.decoded) == 21 + 2 * (21 - len(dataset.cache))
    counting.decoded.clear()
    view_batches(counting, cache_bytes=0).__getitems__(items[:21])
    assert len(counting.decoded) == 21


def device_batch(found, count=8):
    """A batch whose colours are left to the device."""
    return view_batches(found, device_colour=True).__getitems__(
        [(0, i) for i in range(count)]
    )


@pytest.mark.parametrize(
    ("settings", "dtype", "layout"),
    [
        ({}, torch.float32, torch.channels_last),
        ({"channels_last": False}, torch.float32, torch.contiguous_format),
        ({"precision": "fp64"}, torch.float64, torch.channels_last),
        ({"precision": "bf16"}, torch.float32, torch.channels_last),  # autocast casts
    ],
)
def test_a_batch_is_finished_as_the_network_takes_it(found, settings, dtype, layout):
    config = recipe(**settings)
    form = data.InputFormat.of(config, torch.device("cpu"))
    loaded = view_batches(found).__getitems__([(0, i) for i in range(8)])
    finished = data.finish_views(loaded, config.views, form)
    assert len(finished) == len(config.views.per_view) == 3
    for view, made in zip(finished, loaded.views):
        assert (view.dtype, view.shape) == (dtype, (8, 3, made.shape[1], made.shape[2]))
        assert view.is_contiguous(memory_format=layout)
        want = normalise(made.permute(0, 3, 1, 2), Pixels()).to(dtype)
        assert torch.equal(view, want)


def test_colours_that_were_left_are_finished_with_the_views(found):
    form = data.InputFormat.of(recipe(), torch.device("cpu"))
    whole = view_batches(found).__getitems__([(0, i) for i in range(8)])
    batches = (whole, device_batch(found))
    here, there = (data.finish_views(batch, recipe().views, form) for batch in batches)
    for a, b in zip(here, there):
        assert (a - b).abs().mean() < 0.6 / 255 / min(Pixels().std)


def same_colour(a, b):
    tensors = ((a.matrix, b.matrix), (a.sigma, b.sigma), (a.solarize, b.solarize))
    return all(torch.equal(x, y) for x, y in tensors)


def test_the_dataloader_pins_every_tensor_of_a_batch(found, monkeypatch):
    """As the loader's own thread does it; without a GPU, memory cannot really be pinned."""
    pinned = []
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x.clone()
        )
    batch = device_batch(found)
    there = pin_memory(batch)
    assert type(there) is data.LoadedBatch
    assert same(batch, there)
    assert all(map(same_colour, batch.colour, there.colour))
    tensors = [*there.views, there.index, there.labels]
    for colour in there.colour:
        tensors += [colour.matrix, colour.sigma, colour.solarize]
    if torch.cuda.is_available():
        assert all(x.is_pinned() for x in tensors)
    else:
        assert len(pinned) == len(tensors) == 3 + 2 + 3 * 3


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
@pytest.mark.parametrize(
    ("pipeline", "name"),
    [("fast", "00.jpg"), ("fast", "03.png"), ("reference", "03.png")],
)
def test_a_corrupt_image_is_named_or_left_out(root, damage, pipeline, name):
    file = root / "shapes" / "train" / "a" / name
    contents = {
        "truncated": file.read_bytes()[:-40],
        "text": b"no image",
        "empty": b"",
    }
    file.write_bytes(contents[damage])
    found = catalog.open_split(root, "shapes", "train")
    config = recipe(views=ViewsConfig(pipeline=pipeline, crops=CROPS))
    errors = {b.error for b in batches(found, config) if b.error}
    (error,) = errors
    assert str(file) in error
    assert "corrupt" in error
    assert "skip_corrupt=true" in error
    config = replace(config, data=Data(dataset="shapes", skip_corrupt=True))
    allowed = batches(found, config, workers=1)
    assert all(b.error is None for b in allowed)
    skipped = [line for b in allowed for line in b.skipped]
    assert skipped
    assert all(str(file) in line for line in skipped)
    broken = found.paths.index(f"a/{name}")
    assert all(broken not in b.index for b in allowed)


def test_the_fingerprint_sees_names_labels_and_pixels(root, found):
    before = data.dataset_fingerprint(found)
    again = catalog.open_split(root, "shapes", "train")
    assert data.dataset_fingerprint(again) == before
    fewer = data.dataset_fingerprint(found.subset(range(20)))
    labels = (*found.labels[1:], found.labels[0])
    swapped = data.dataset_fingerprint(replace(found, labels=labels))
    assert len({before, fewer, swapped}) == 3
    picture(100).save(found.file(0))
    assert data.dataset_fingerprint(found) != before


def test_arrays_and_shards_are_loaded_alike_by_any_number_of_workers(root, found):
    pixels = np.stack([np.asarray(picture(n).resize((32, 32))) for n in range(8)])
    arrays = ArrayList(found.root, tuple(map(str, range(8))), (0,) * 8, ("x",), pixels)
    write_shards(root / "tarred" / "train", found)
    shards = catalog.open_split(root, "tarred", "train")
    for images in (arrays, shards):
        (alone,) = batches(images, recipe(), last=1, workers=0)
        for workers in (1, 2):
            (other,) = batches(images, recipe(), last=1, workers=workers)
            assert same(alone, other)


def listed(count, damaged=()):
    """Images in memory, of which those in `damaged` cannot be read."""

    @dataclass(frozen=True)
    class Some(ArrayList):
        def array(self, index):
            if index in damaged:
                raise BadInput(f"{index} is corrupt")
            return super().array(index)

    pixels = np.zeros((count, 32, 32, 3), np.uint8)
    pixels[:] = np.arange(count, dtype=np.uint8)[:, None, None, None]
    names = tuple(map(str, range(count)))
    labels = tuple(i % 2 for i in range(count))
    return Some(Path("here"), names, labels, ("x", "y"), pixels)


def test_the_next_readable_image_stands_for_a_corrupt_one_also_at_the_end():
    config = recipe(data=Data(dataset="shapes", skip_corrupt=True))
    about = {"cache_bytes": 0, "device_colour": False}
    some = data.ViewBatches(listed(6, {0, 1, 5}), config, **about)
    batch = some.__getitems__([(0, 4), (0, 5), (0, 3)])
    assert batch.index.tolist() == [4, 2, 3]
    assert batch.labels.tolist() == [0, 0, 1]
    assert batch.skipped == ("5 is corrupt", "0 is corrupt", "1 is corrupt")
    none = data.ViewBatches(listed(2, {0, 1}), config, **about)
    batch = none.__getitems__([(0, 1)])
    assert batch.error == "here: not one readable image"
    assert (batch.views, len(batch.index)) == ((), 0)
    strict = data.ViewBatches(listed(6, {0}), recipe(), **about)
    assert strict.__getitems__([(0, 1), (0, 0)]).error == (
        "0 is corrupt; remove it, or leave such images out with data.skip_corrupt=true"
    )


def test_a_share_that_is_held_out_is_the_same_for_all_runs():
    found = listed(10)
    assert data.to_train_on(found, 0.0) is found
    kept = [int(name) for name in data.to_train_on(found, 0.25).paths]
    # A half goes to the even number: 2 of 10
    assert len(kept) == 8 and kept == sorted(set(kept))
    fewer = [int(name) for name in data.to_train_on(found, 0.5).paths]
    assert len(fewer) == 5 and set(fewer) < set(kept)
    assert list(data.to_train_on(found, 0.25).paths) == list(map(str, kept))


def test_the_fingerprint_sees_the_pixels_of_every_sixteenth_part():
    """Of 40 images every second; of fewer than 16 all."""
    for count, looked_at in ((40, range(0, 40, 2)), (9, range(9))):
        found = listed(count)
        before = data.dataset_fingerprint(found)
        assert len(before) == 12
        for index in range(count):
            pixels = found.array(index).copy()
            found.pixels[index, 0, 0] += 100
            changed = data.dataset_fingerprint(found) != before
            assert changed is (index in looked_at)
            found.pixels[index] = pixels
        assert data.dataset_fingerprint(found) == before
    assert data.dataset_fingerprint(listed(40, {0})) != data.dataset_fingerprint(
        listed(40)
    )


@pytest.mark.parametrize(
    ("workers", "share"), [(0, data.CACHE_BYTES), (1, data.CACHE_BYTES), (4, 128 << 20)]
)
def test_workers_share_the_memory_and_a_gpu_does_the_colours(
    monkeypatch, workers, share
):
    def started(dataset, order, **more):
        return dataset, list(order), more

    monkeypatch.setattr(data.loading, "started", started)
    for on_gpu in (False, True):
        for pipeline in ("fast", "reference"):
            config = recipe(views=ViewsConfig(crops=CROPS, pipeline=pipeline))
            dataset, order, more = data.loader(
                listed(21),
                config,
                first=1,
                last=3,
                workers=workers,
                rank=1,
                ranks=2,
                on_gpu=on_gpu,
            )
            assert dataset.cache_left == share
            assert dataset.device_colour is (on_gpu and pipeline == "fast")
            assert more == {"workers": workers, "pin": on_gpu}
            whole = data.batch_order(21, config, first=1, last=3)
            assert order == [batch[4:] for batch in whole]
