"""What a step is fed depends on the recipe and the data alone: not on workers, ranks, restarts or neighbours."""

import io
import os
import pickle
import tarfile
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images import archives
from backbench.images.files import ArrayList, ImageList, decode, decode_array
from backbench.images.views import Crops
from pretrain import data
from pretrain.config import Data, Optim, PretrainConfig, Views
from pretrain.methods.random import Config as RandomConfig

CROPS = (Crops(count=2, size=24), Crops(count=1, size=16, scale=(0.05, 0.3)))


def recipe(**changes):
    values = {
        "name": "test",
        "method": RandomConfig(name="random"),
        "views": Views(crops=CROPS),
        "data": Data(dataset="shapes", workers=0),
        "optim": Optim(lr=0.1),
        "epochs": 3,
        "batch_size": 8,
    }
    return PretrainConfig(**values | changes)


def picture(n, size=32):
    rng = np.random.default_rng(n)
    low = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return low.resize((size, size + n % 5), Image.BICUBIC)


@pytest.fixture
def root(tmp_path):
    """ROOT/shapes/train/{a,b,c}: 21 pictures, PNG and JPEG."""
    for n in range(21):
        folder = tmp_path / "shapes" / "train" / "abc"[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        picture(n).save(folder / f"{n:02}.{'png' if n % 2 else 'jpg'}")
    return tmp_path


@pytest.fixture
def found(root):
    return catalog.open_split(root, "shapes", "train")


def batches(found, config, *, workers=0, **where):
    where = {"first": 0, "last": 6} | where
    return list(data.loader(found, config, workers=workers, **where))


def same(a, b):
    return (
        torch.equal(a["index"], b["index"])
        and torch.equal(a["labels"], b["labels"])
        and all(torch.equal(x, y) for x, y in zip(a["views"], b["views"], strict=True))
    )


def test_epochs_are_permutations_cut_into_whole_batches(found):
    order = list(data.Order(21, recipe(), first=0, last=6))
    assert [len(b) for b in order] == [8] * 6
    for epoch in range(3):
        pairs = order[2 * epoch] + order[2 * epoch + 1]
        assert {e for e, _ in pairs} == {epoch}
        assert len({i for _, i in pairs}) == 16
    assert [i for _, i in order[0]] != [i for _, i in order[2]]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_global_batch_in_order(ranks, accumulate):
    whole = list(data.Order(21, recipe(), first=0, last=6))
    config = recipe(accumulate=accumulate)
    parts = [
        list(data.Order(21, config, first=0, last=6, rank=r, ranks=ranks)) for r in range(ranks)
    ]
    for step in range(6):
        mine = [
            [pair for part in p[step * accumulate : (step + 1) * accumulate] for pair in part]
            for p in parts
        ]
        assert [pair for share in mine for pair in share] == whole[step]


def test_a_restart_continues_in_the_middle_of_an_epoch():
    whole = list(data.Order(21, recipe(), first=0, last=6))
    assert list(data.Order(21, recipe(), first=3, last=6)) == whole[3:]
    other = list(data.Order(21, recipe(seed=1), first=0, last=6))
    assert other != whole


def test_views_depend_on_neither_workers_nor_ranks_nor_restarts(found):
    config = recipe()
    whole = batches(found, config)
    assert [v.shape for v in whole[0]["views"]] == [(8, 24, 24, 3), (8, 24, 24, 3), (8, 16, 16, 3)]
    assert all(map(same, whole, batches(found, config, workers=2)))
    assert all(map(same, whole[4:], batches(found, config, first=4, workers=1)))
    halves = [batches(found, config, rank=r, ranks=2) for r in range(2)]
    for step, batch in enumerate(whole):
        for v, view in enumerate(batch["views"]):
            assert torch.equal(view, torch.cat([half[step]["views"][v] for half in halves]))
    assert not torch.equal(whole[0]["views"][0], whole[0]["views"][1])
    by_image = {int(i): v for i, v in zip(whole[0]["index"], whole[0]["views"][0])}
    again = {int(i): v for b in whole[2:4] for i, v in zip(b["index"], b["views"][0])}
    assert any(
        not torch.equal(by_image[i], again[i]) for i in by_image.keys() & again.keys()
    )  # another epoch


def test_labels_are_the_folders(found):
    for batch in batches(found, recipe()):
        for i, label in zip(batch["index"], batch["labels"]):
            assert found.paths[i].startswith("abc"[label])


def test_reference_views_are_torchvisions_tensors(found):
    """With every random step switched off but the crop: resized_crop on the PIL image, then ToTensor's numbers."""
    from torchvision.transforms.functional import resized_crop

    crops = Crops(count=1, size=24, flip=0, jitter_p=0, gray_p=0, blur_p=0)
    config = recipe(views=Views(pipeline="reference", crops=(crops,)))
    (batch, *_) = batches(found, config)
    for n, i in enumerate(batch["index"].tolist()):
        from backbench.images import views
        from backbench.runs import seeding

        image = Image.open(found.file(i)).convert("RGB")
        drawn = views.draw(
            seeding.generator(config.seed, "views", 0, i), image.height, image.width, crops
        )
        want = to_tensor(resized_crop(image, *drawn.box, [24, 24]))
        have = batch["views"][0][n].permute(2, 0, 1).float() / 255
        assert torch.equal(have, want)


@dataclass(frozen=True)
class Counting(ImageList):
    """A list that notes every decoding."""

    decoded: list

    def array(self, index):
        self.decoded.append(index)
        return super().array(index)


def view_batches(found, **changes):
    settings = {
        "seed": 0,
        "skip_corrupt": False,
        "cache_bytes": 1 << 20,
        "device_colour": False,
    } | changes
    return data.ViewBatches(found, Views(crops=CROPS), **settings)


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


def test_with_colour_left_to_the_device_only_geometry_is_done(found):
    from backbench.images.views import apply_colour

    items = [(0, i) for i in range(8)]
    whole = view_batches(found).__getitems__(items)
    part = view_batches(found, device_colour=True).__getitems__(items)
    for v, crops in enumerate([CROPS[0], CROPS[0], CROPS[1]]):
        done = apply_colour(part["views"][v].permute(0, 3, 1, 2), **part["colour"][v], crops=crops)
        assert (done.permute(0, 2, 3, 1) - whole["views"][v].float()).abs().mean() < 0.6


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
@pytest.mark.parametrize("name", ["00.jpg", "03.png"])
@pytest.mark.parametrize("pipeline", ["fast", "reference"])
def test_a_corrupt_image_is_named_or_left_out(root, damage, name, pipeline, caplog):
    file = root / "shapes" / "train" / "a" / name
    content = {"truncated": file.read_bytes()[:-40], "text": b"no image", "empty": b""}[damage]
    file.write_bytes(content)
    found = catalog.open_split(root, "shapes", "train")
    config = recipe(views=Views(pipeline=pipeline, crops=CROPS))
    errors = {b["error"] for b in batches(found, config) if "error" in b}
    (error,) = errors
    assert str(file) in error
    assert "corrupt" in error
    assert "skip_corrupt=true" in error
    config = replace(config, data=Data(dataset="shapes", skip_corrupt=True))
    allowed = batches(found, config, workers=1)
    assert all("error" not in b for b in allowed)
    assert {str(file) in line for b in allowed for line in b["skipped"]} == {True}
    broken = found.paths.index(f"a/{name}")
    assert all(broken not in b["index"] for b in allowed)


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(BadInput, match="shapes/train: no such folder"):
        catalog.open_split(tmp_path, "shapes", "train")
    (tmp_path / "shapes" / "train").mkdir(parents=True)
    with pytest.raises(BadInput, match="no images found"):
        catalog.open_split(tmp_path, "shapes", "train")
    (tmp_path / "shapes" / "train" / "a").mkdir()
    with pytest.raises(BadInput, match="class folder without images"):
        catalog.open_split(tmp_path, "shapes", "train")


def test_the_fingerprint_sees_names_labels_and_pixels(root, found):
    before = data.fingerprint(found)
    assert data.fingerprint(catalog.open_split(root, "shapes", "train")) == before
    fewer = found.subset(range(20))
    swapped = replace(found, labels=(*found.labels[1:], found.labels[0]))
    assert len({before, data.fingerprint(fewer), data.fingerprint(swapped)}) == 3
    picture(100).save(found.file(0))
    assert data.fingerprint(found) != before


def test_decoding_is_pils(root, found):
    for i in range(len(found)):
        assert np.array_equal(found.array(i), np.asarray(found.open(i)))
    gray, palette, alpha = (root / name for name in ("g.png", "p.png", "a.png"))
    picture(1).convert("L").save(gray)
    picture(2).convert("P").save(palette)
    picture(3).convert("RGBA").save(alpha)
    rotated = root / "r.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4, 40).save(rotated, exif=exif)
    for path in (gray, palette, alpha, rotated):
        assert np.array_equal(decode_array(path.read_bytes(), path), np.asarray(decode(path)))


# ------------------------------------------------------------------------------------------- other sources


def test_imagenet100_is_imagenets_folder_and_a_list(tmp_path):
    from importlib import resources

    classes = resources.files("backbench.datasets").joinpath("imagenet100.txt").read_text().split()
    assert len(set(classes)) == 100
    for n, name in enumerate([*classes, "n99999999"]):
        folder = tmp_path / "imagenet" / "train" / name
        folder.mkdir(parents=True)
        picture(n, 8).save(folder / "0.png")
    found = catalog.open_split(tmp_path, "imagenet100", "train")
    assert len(found) == 100
    assert list(found.classes) == classes
    (tmp_path / "imagenet" / "train" / classes[7] / "0.png").unlink()
    (tmp_path / "imagenet" / "train" / classes[7]).rmdir()
    with pytest.raises(BadInput, match=f"class folder '{classes[7]}' is missing"):
        catalog.open_split(tmp_path, "imagenet100", "train")


def write_cifar(folder, hundred=False):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = (
        ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    )
    key, names = ("fine_labels", "fine_label_names") if hundred else ("labels", "label_names")
    pixels = {}
    for name in files:
        pixels[name] = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        content = {"data": pixels[name], key: [0, 1, 2, 1]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = folder / ("meta" if hundred else "batches.meta")
    meta.write_bytes(pickle.dumps({names: ["cat", "dog", "owl"]}, protocol=2))
    return pixels


@pytest.mark.parametrize(("name", "train"), [("cifar10", 20), ("cifar100", 4)])
def test_cifar_as_torchvision_lays_it_out(tmp_path, name, train):
    pixels = write_cifar(tmp_path / name / archives.CIFAR_FOLDERS[name], hundred=name == "cifar100")
    found = catalog.open_split(tmp_path, name, "train")
    assert (len(found), found.classes) == (train, ("cat", "dog", "owl"))
    first = (
        pixels["train" if name == "cifar100" else "data_batch_1"][0]
        .reshape(3, 32, 32)
        .transpose(1, 2, 0)
    )
    assert np.array_equal(found.array(0), first)
    assert np.array_equal(np.asarray(found.open(0)), first)
    assert found.labels[:4] == (0, 1, 2, 1)
    assert len(catalog.open_split(tmp_path, name, "test")) == 4
    with pytest.raises(BadInput, match="no split 'val'"):
        catalog.open_split(tmp_path, name, "val")
    assert len(batches(found, recipe(batch_size=4), last=1)[0]["index"]) == 4


def test_a_pickle_that_wants_to_run_something_is_refused(tmp_path):
    write_cifar(tmp_path / "cifar10" / "cifar-10-batches-py")

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    (tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_3").write_bytes(
        pickle.dumps(Evil())
    )
    with pytest.raises(BadInput, match=r"data_batch_3.*mkdir"):
        catalog.open_split(tmp_path, "cifar10", "train")
    assert not (tmp_path / "executed").exists()


def test_stl10_with_its_unlabelled_part(tmp_path):
    folder = tmp_path / "stl10" / "stl10_binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    raw = {
        s: rng.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8)
        for s, n in (("train", 3), ("unlabeled", 5))
    }
    for split, pixels in raw.items():
        pixels.tofile(folder / f"{split}_X.bin")
    np.array([1, 10, 3], np.uint8).tofile(folder / "train_y.bin")
    (folder / "class_names.txt").write_text("\n".join("abcdefghij"))
    found = catalog.open_split(tmp_path, "stl10", "train+unlabeled")
    assert found.labels == (0, 9, 2, -1, -1, -1, -1, -1)
    assert found.classes == tuple("abcdefghij")
    assert np.array_equal(
        found.array(4), raw["unlabeled"][1].transpose(2, 1, 0)
    )  # stored column by column
    assert np.array_equal(np.asarray(found.open(1)), raw["train"][1].transpose(2, 1, 0))
    assert found.subset([7, 0]).labels == (-1, 0)
    assert len(catalog.open_split(tmp_path, "stl10", "unlabeled")) == 5
    assert len(batches(found, recipe(batch_size=4), last=2, workers=1)) == 2
    with pytest.raises(BadInput, match="did you mean 'unlabeled'"):
        catalog.open_split(tmp_path, "stl10", "unlabelled")
    (folder / "train_y.bin").write_bytes(b"\1")
    with pytest.raises(BadInput, match="3 images but 1 labels"):
        catalog.open_split(tmp_path, "stl10", "train")


def write_shards(folder, found, *, suffix=".tar", mode="w"):
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"part-{shard:06}{suffix}", mode) as tar:
            for i in range(shard, len(found), 2):
                key = f"sub/{i:05}"
                extension = found.file(i).suffix
                for name, content in (
                    (f"{key}{extension}", found.file(i).read_bytes()),
                    (f"{key}.cls", str(found.labels[i]).encode()),
                    (f"{key}.txt", b"a caption"),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def test_tar_shards_hold_the_same_images_in_place(root, found):
    write_shards(root / "tarred" / "train", found)
    shards = catalog.open_split(root, "tarred", "train")
    order = [*range(0, 21, 2), *range(1, 21, 2)]
    assert shards.labels == tuple(found.labels[i] for i in order)
    for n, i in enumerate(order):
        assert np.array_equal(shards.array(n), found.array(i))
        assert np.array_equal(np.asarray(shards.open(n)), np.asarray(found.open(i)))
    config = recipe()
    assert all(map(same, batches(shards, config), batches(shards, config, workers=2)))
    assert [p.name for p in sorted((root / "tarred" / "train").iterdir())] == [
        "part-000000.tar",
        "part-000001.tar",
    ]


def test_unusable_shards_are_named(root, found):
    write_shards(root / "packed" / "train", found, mode="w:gz")
    with pytest.raises(BadInput, match=r"part-000000\.tar: not readable as an uncompressed tar"):
        catalog.open_split(root, "packed", "train")
    write_shards(root / "cut" / "train", found)
    shard = root / "cut" / "train" / "part-000001.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(BadInput, match=r"part-000001\.tar.*cut short"):
        catalog.open_split(root, "cut", "train")
    with tarfile.open(root / "cut" / "train" / "part-000001.tar", "w") as tar:
        member = tarfile.TarInfo("a.jpg")
        tar.addfile(member)
        label = tarfile.TarInfo("a.cls")
        label.size = 3
        tar.addfile(label, io.BytesIO(b"cat"))
    with pytest.raises(BadInput, match=r"label in /?a\.cls is not a whole number"):
        catalog.open_split(root, "cut", "train")


def test_array_lists_are_decoded_from_memory(found):
    pixels = np.stack([np.asarray(picture(n).resize((32, 32))) for n in range(8)])
    arrays = ArrayList(found.root, tuple(map(str, range(8))), (0,) * 8, ("x",), pixels)
    assert same(*(batches(arrays, recipe(), last=1, workers=w)[0] for w in (0, 1)))
