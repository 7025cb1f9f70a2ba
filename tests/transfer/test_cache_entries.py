"""Entries of the feature cache and what they are of: names, damaged tables, room, unfinished parts."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backbench.errors import BadInput, Failed
from backbench.images import contents
from backbench.images.contents import Named
from backbench.images.image_list import ArrayList
from backbench.transfer.features import cache as feature_cache
from backbench.transfer.features.cache import FeatureCache, PartFiles, describe
from backbench.transfer.features.frozen import (
    FrozenTrunk,
    TokenFeature,
    Watch,
    build_projector,
    forward_all,
    kept_head,
    output_dim,
    refuse_unusable,
)
from backbench.transfer.protocol import Geometry
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


def of_vit(seed=0, **about):
    torch.manual_seed(seed)
    state = archs.build_trunk(VIT).state_dict()
    return Checkpoint(arch=VIT, method="random", state_dict=state, **about)


# Names


def test_an_entry_is_named_by_what_follows_the_trunk():
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    heads = {"lphi.0.weight": weight, "fc.0.weight": -weight}
    point = of_vit(heads=heads)
    plain = FrozenTrunk.build(point, device=CPU)
    trunks = {
        "plain": plain,
        "lphi": FrozenTrunk.build(point, device=CPU, head="lphi"),
        "fc": FrozenTrunk.build(point, device=CPU, head="fc"),
        "own": dataclasses.replace(plain, own_head="digest"),
        "layers": plain.with_layers(32),
    }
    for name in ("2 x 2", "4 x 4"):
        feature = TokenFeature(lambda x: x.flatten(1), 48, name)
        trunks[name] = dataclasses.replace(plain, of_tokens=feature)
    said = {name: describe(trunk, "list", Geometry()) for name, trunk in trunks.items()}
    base = said.pop("plain")
    assert base == {
        "checkpoint": point.digest,
        "arch": point.arch,
        "stem": point.stem,
        "pixels": {
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "order": "RGB",
        },
        "images": "list",
        "geometry": {
            "resize": 256,
            "crop": 224,
            "interpolation": "bilinear",
            "square": False,
        },
        "precision": "fp32",
        "device": "cpu",
        "torch": torch.__version__.split("+")[0],
    }
    more = {name: set(about) - set(base) for name, about in said.items()}
    assert more == {
        "lphi": {"head"},
        "fc": {"head"},
        "own": {"own_head"},
        "layers": {"of_layers"},
        "2 x 2": {"of_tokens"},
        "4 x 4": {"of_tokens"},
    }
    cache = FeatureCache(Path("cache"), 0)
    assert len({cache.path(about) for about in (base, *said.values())}) == 7
    # Their widths are those of what follows
    widths = {name: trunk.dim for name, trunk in trunks.items()}
    assert (widths["plain"], widths["lphi"], widths["2 x 2"]) == (12, 3, 48)
    assert widths["layers"] == trunks["layers"].of_layers.dim


def test_a_name_does_not_depend_on_the_order_of_its_keys():
    cache = FeatureCache(Path("cache"), 0)
    path = cache.path({"a": 1, "b": 2})
    assert cache.path({"b": 2, "a": 1}) == path != cache.path({"a": 2, "b": 1})
    assert path.parent == Path("cache") and len(path.stem) == 32


# Images that were looked at


def test_a_hash_is_never_the_unknown_one(monkeypatch):
    images = SimpleNamespace(read=lambda index: b"")
    plain = feature_cache.file_hash(images, 0)
    assert -(2**63) <= plain < 2**63 and plain not in (0, 1)

    class Zeros:
        def digest(self):
            return bytes(32)

    monkeypatch.setattr(feature_cache.hashlib, "sha256", lambda data: Zeros())
    assert feature_cache.file_hash(images, 0) == 1


def named(count):
    return Named("x", list(range(10, 10 + count)), list(range(50, 50 + count)))


class Hashed:
    """Images whose contents are numbers."""

    def __init__(self, *values):
        self.values = values
        self.paths = tuple(f"{n}.png" for n in range(len(values)))
        self.looked = []

    def __len__(self):
        return len(self.values)


@pytest.fixture
def by_value(monkeypatch):
    def file_hash(images, index):
        images.looked.append(index)
        return images.values[index]

    monkeypatch.setattr(feature_cache, "file_hash", file_hash)


def test_files_that_have_moved_are_hashed_and_no_others(by_value):
    images = Hashed(7, 8, 9, 6)
    seen = feature_cache.not_yet_seen(named(4))
    assert seen.tolist() == [[10 + n, 50 + n, 0] for n in range(4)]
    seen[:, 2] = images.values
    assert feature_cache.changed_file(images, named(4), seen) is None
    assert images.looked == []
    # Another inode or another time of change: the same contents are the same file
    seen[1, 0] += 1
    seen[3, 1] += 1
    assert feature_cache.changed_file(images, named(4), seen) is None
    assert images.looked == [1, 3]
    seen[3, 2] = 5
    assert feature_cache.changed_file(images, named(4), seen) == "3.png"
    # What has no hash yet cannot be held against one, and a table may be shorter
    seen[3, 2] = feature_cache.UNKNOWN
    assert feature_cache.changed_file(images, named(4), seen) is None
    seen[1, 2] = 5
    assert feature_cache.changed_file(images, named(4), seen[:1]) is None
    assert feature_cache.changed_file(images, named(4), seen[:2]) == "1.png"


def test_an_array_has_no_files_that_could_change(by_value):
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    images = ArrayList(Path("/d"), ("0", "1"), (0, 1), ("a", "b"), pixels)
    seen = feature_cache.not_yet_seen(named(2)) + 9
    assert feature_cache.changed_file(images, named(2), seen) is None


def test_few_that_have_moved_are_all_hashed_and_of_many_a_sample(by_value, monkeypatch):
    monkeypatch.setattr(contents, "SAMPLE", 3)
    for count, looked in ((3, 3), (4, 3), (200, 4)):
        images = Hashed(*range(1, count + 1))
        seen = feature_cache.not_yet_seen(named(count))
        seen[:, 2] = images.values
        seen[:, 0] += 1
        assert feature_cache.changed_file(images, named(count), seen) is None
        assert len(set(images.looked)) == len(images.looked) == looked


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((4, 3), np.int32),
        np.zeros((4, 2), np.int64),
        np.zeros((3, 3), np.int64),
        np.zeros(12, np.int64),
        np.array([{}], dtype=object),
    ],
)
def test_a_table_of_another_form_is_none(tmp_path, table):
    file = tmp_path / "x.files"
    assert feature_cache._read_seen(file, 4) is None
    np.save(file.open("wb"), table)
    assert feature_cache._read_seen(file, 4) is None
    whole = np.arange(12).reshape(4, 3)
    feature_cache._write_seen(file, whole)
    np.testing.assert_array_equal(feature_cache._read_seen(file, 4), whole)
    file.write_bytes(file.read_bytes()[:-5])
    assert feature_cache._read_seen(file, 4) is None
    np.savez(file.open("wb"), x=whole)
    assert feature_cache._read_seen(file, 4) is None


# Entries


def entry(cache, name, rows, seen=None):
    """Keep rows as the entry of a name; return its description and path."""
    description = {"of": name}
    cache.folder.mkdir(exist_ok=True)
    part = cache.folder / "x.part"
    np.save(part.open("wb"), rows)
    if seen is None:
        seen = feature_cache.not_yet_seen(named(len(rows)))
    cache.finish(description, part, seen)
    return description, cache.path(description)


def test_an_entry_that_lacks_a_part_is_none(tmp_path, caplog):
    cache = FeatureCache(tmp_path / "c", 10**6)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    description, path = entry(cache, "a", rows)
    assert cache.open(description).tolist() == rows.tolist()
    assert cache.seen(description)[:, 0].tolist() == [10, 11, 12, 13]
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["shape"] == [4, 2]
    for key, wrong in (
        ("description", "text"),
        ("sha256", 3),
        ("shape", "4"),
        ("shape", [4]),
        ("shape", [4, 2, 1]),
    ):
        path.with_suffix(".json").write_text(json.dumps({**about, key: wrong}))
        caplog.clear()
        assert cache.seen(description) is None and cache.open(description) is None
        assert caplog.text.count("torn; its features are made anew") == 2
    for text in ("{}", "[]", "{", "null"):
        path.with_suffix(".json").write_text(text)
        assert cache.open(description) is None
    # Without the .json there is nothing to be said
    path.with_suffix(".json").unlink()
    caplog.clear()
    assert cache.open(description) is None and cache.seen(description) is None
    assert caplog.text == ""
    path.with_suffix(".json").write_text(json.dumps(about))
    path.unlink()
    assert cache.open(description) is None


def test_rows_of_another_shape_than_said_are_damaged(tmp_path):
    cache = FeatureCache(tmp_path / "c", 10**6)
    description, path = entry(cache, "a", np.zeros((4, 2), np.float32))
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, "shape": [2, 4]}))
    with pytest.raises(BadInput, match=f"{path}: the cached features are damaged"):
        cache.open(description)


def test_all_keys_that_differ_are_named(tmp_path):
    cache = FeatureCache(tmp_path / "c", 10**6)
    description, path = entry(cache, "a", np.zeros((4, 2), np.float32))
    about = json.loads(path.with_suffix(".json").read_text())
    about["description"] = {"of": "b", "more": 1}
    path.with_suffix(".json").write_text(json.dumps(about))
    with pytest.raises(BadInput, match="features of another more, of than asked for"):
        cache.open(description)


def aged(path, age):
    os.utime(path, (age, age))


def test_the_oldest_go_until_there_is_room_and_no_further(tmp_path):
    """Each entry has 96 bytes beside a header of 128; the time of a use is that of the .json."""
    cache = FeatureCache(tmp_path / "c", 1000)
    rows = np.zeros((8, 3), np.float32)
    paths = [entry(cache, name, rows)[1] for name in "abc"]
    size = paths[0].stat().st_size
    assert size == 224
    for path, age in zip(paths, (300, 100, 200)):
        aged(path, 10)
        aged(path.with_suffix(".json"), age)
    part = cache.folder / f"{'0' * 32}.part"
    part.write_bytes(bytes(100))
    aged(part, 150)
    for other in ("x.tmp", ".hidden.1.npy", "notes.txt"):
        (cache.folder / other).write_bytes(bytes(5000))
    _, second, third = paths

    def there():
        return [path.exists() for path in (*paths, part)]

    # 1. 772 bytes are there, and 228 more fit exactly
    cache.make_room(228, set())
    assert there() == [True] * 4
    # 2. One more byte, and the oldest goes
    cache.make_room(229, set())
    assert there() == [True, False, True, True]
    assert not second.with_suffix(".json").exists()
    assert not second.with_suffix(".files").exists()
    # 3. What is kept stays; then the next in age goes, whatever it is
    cache.make_room(1000 - 3 * 100, {third})
    assert there() == [False, False, True, False]
    # 4. As much as the limit is allowed, and nothing above it
    cache.make_room(1000, set())
    assert there() == [False] * 4
    with pytest.raises(BadInput, match="the features need"):
        cache.make_room(1001, set())
    big = FeatureCache(tmp_path / "c", int(2.54e9))
    said = r"the features need 7\.2 GB, the cache may have 2\.5; set BACKBENCH_CACHE_GB"
    with pytest.raises(BadInput, match=said):
        big.make_room(int(7.16e9), set())
    assert (cache.folder / "x.tmp").exists() and (cache.folder / "notes.txt").exists()


def test_a_lock_of_an_entry_clears_what_killed_writers_left(tmp_path):
    cache = FeatureCache(tmp_path / "c", 0)
    one, other = {"of": "a"}, {"of": "b"}
    cache.folder.mkdir()
    left = cache.folder / f".{cache.path(one).stem}.12.tmp"
    others = cache.folder / f".{cache.path(other).stem}.12.tmp"
    for file in (left, others):
        file.write_text("")
    with cache.try_lock([one]):
        assert not left.exists() and others.exists()
        # Of several, one that is taken is enough; the free one is given back
        assert cache.try_lock([other, one]) is None
        with cache.try_lock([other]) as held:
            assert held is not None
    with cache.try_lock([other, one]) as both:
        assert both is not None


# Unfinished parts


def begin(cache, count=6, *, still=lambda seen: True, keep=()):
    descriptions = [{"of": "a"}, {"of": "b"}]
    seen = feature_cache.not_yet_seen(named(count))
    return PartFiles(
        cache, descriptions, [2, 3], count, keep=keep, seen=seen, still=still
    )


def rows_of(begin, end):
    """Rows of both parts, and hashes of their images."""
    x = torch.arange(begin, end)[:, None].float()
    return [x.repeat(1, 2), -x.repeat(1, 3)], torch.arange(begin, end) + 100


def test_parts_go_on_where_they_were_saved_and_become_entries(tmp_path):
    cache = FeatureCache(tmp_path / "c", 10**6)
    cache.folder.mkdir()
    parts = begin(cache)
    assert parts.first == 0
    parts.write(0, 4, *rows_of(0, 4))
    parts.save(4)
    asked = []

    def still(seen):
        asked.append(seen[:, 2].tolist())
        return True

    again = begin(cache, still=still)
    assert again.first == 4 and asked == [[100, 101, 102, 103]]
    again.write(4, 6, *rows_of(4, 6))
    again.finish()
    (first, second), _ = rows_of(0, 6)
    assert torch.equal(cache.open({"of": "a"}), first)
    assert torch.equal(cache.open({"of": "b"}), second)
    for name in "ab":
        assert cache.seen({"of": name})[:, 2].tolist() == [100 + n for n in range(6)]
    left = {path.suffix for path in cache.folder.iterdir()}
    assert left == {".npy", ".json", ".files"}


@pytest.mark.parametrize(
    "spoil",
    [
        "images changed",
        "a part is gone",
        "the table is gone",
        "another count",
        "other parts",
        "no json",
    ],
)
def test_parts_that_cannot_be_trusted_begin_anew(tmp_path, spoil):
    cache = FeatureCache(tmp_path / "c", 10**6)
    cache.folder.mkdir()
    parts = begin(cache)
    parts.write(0, 4, *rows_of(0, 4))
    parts.save(4)
    marker = parts.marker
    count = 6
    if spoil == "a part is gone":
        parts.parts[1].unlink()
    elif spoil == "the table is gone":
        parts.table.unlink()
    elif spoil == "another count":
        count = 7
    elif spoil == "other parts":
        marker.write_text(json.dumps({"rows": 4, "parts": ["x.part"]}))
    elif spoil == "no json":
        marker.write_text("{")
    again = begin(cache, count, still=lambda seen: spoil != "images changed")
    assert again.first == 0 and not marker.exists()
    assert not again.seen[:, 2].any()
    assert all(not rows.any() for rows in again.rows)


def test_room_is_made_for_all_parts_beside_what_is_kept(tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path / "c", 10**6)
    cache.folder.mkdir()
    asked = []
    monkeypatch.setattr(FeatureCache, "make_room", lambda _, *of: asked.append(of))
    begin(cache, keep=[{"of": "a"}, {"of": "z"}])
    # Six rows of two and of three numbers, four bytes each
    assert asked == [(120, {cache.path({"of": "a"}), cache.path({"of": "z"})})]


# Trunks


@pytest.mark.parametrize(
    ("features", "unusable"),
    [
        ([[1.0, 2.0], [torch.nan, 0.0], [3.0, 3.0]], 1),
        ([[torch.inf, 2.0], [-torch.inf, 0.0], [3.0, 3.0]], 2),
        # Its square is not finite in single precision
        ([[1e20, 0.0], [1.0, 2.0], [2.0, 1.0]], 1),
    ],
)
def test_features_that_are_no_numbers_are_counted(features, unusable):
    said = f"'x': the features of {unusable} of 3 images are not finite, or too large"
    with pytest.raises(BadInput, match=said):
        refuse_unusable(torch.tensor(features), "x")


def test_features_that_all_images_share_are_refused():
    same = torch.ones(4, 3)
    with pytest.raises(
        BadInput, match="'x': its features of all 4 images are the same"
    ):
        refuse_unusable(same, "x")
    with pytest.raises(BadInput, match="of all 3 images are the same"):
        refuse_unusable(torch.zeros(3, 2), "x")
    refuse_unusable(same, "x", images_differ=False)
    refuse_unusable(same[:1], "x")
    refuse_unusable(same[:0], "x")
    # One of them in the middle is another, by more than rounding
    for amount, differs in ((1e-3, True), (1e-7, False)):
        other = same.clone()
        other[1, 2] += amount
        if differs:
            refuse_unusable(other, "x")
        else:
            with pytest.raises(BadInput, match="are the same"):
                refuse_unusable(other, "x")
    # A map has more than two dimensions
    refuse_unusable(torch.randn(3, 2, 2, 4), "x")


def test_a_watch_looks_at_the_first_batch_and_remembers_the_others():
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    other = pixels.clone()
    other[1] += 1
    same, apart = torch.ones(2, 3), torch.eye(2, 3)
    Watch().see(same, pixels, "x")  # equal pictures
    with pytest.raises(BadInput, match="are the same"):
        Watch().see(same, other, "x")
    Watch(may_collapse=True).see(same, other, "x")
    watch = Watch()
    watch.refuse("x")
    watch.see(apart, other, "x")
    watch.see(same, other, "x")  # of later batches nothing is looked at
    watch.refuse("x")
    watch.see(apart * torch.inf, other, "x")
    watch.see(apart, other, "x")
    with pytest.raises(
        BadInput, match="'x': the features of some images are not finite"
    ):
        watch.refuse("x")


def test_trunks_of_equal_pixels_share_their_images_and_padding_is_zero():
    point = of_vit()
    trunk = FrozenTrunk.build(point, device=CPU)
    grey = dataclasses.replace(point.pixels, mean=(0.1, 0.2, 0.3))
    other = FrozenTrunk.build(point.replace(pixels=grey), device=CPU)
    pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    given = []
    for each in (trunk, other):
        each.module.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    inside = torch.ones(2, 1, 32, 32, dtype=torch.bool)
    inside[:, :, 20:] = False
    first, second, third = forward_all([trunk, other, trunk], pixels, inside=inside)
    assert torch.equal(first, third) and not torch.equal(first, second)
    for x, point_ in zip(given, (trunk, other, trunk), strict=True):
        assert not x[:, :, 20:].any()
        mean = torch.tensor(point_.pixels.mean)[:, None, None]
        std = torch.tensor(point_.pixels.std)[:, None, None]
        torch.testing.assert_close(
            x[:, :, :20], ((pixels / 255 - mean) / std)[:, :, :20]
        )


def test_a_trunk_that_trains_or_moves_is_a_failure():
    trunk = FrozenTrunk.build(of_vit(), device=CPU)
    trunk.verify()
    trunk.module.train()
    with pytest.raises(Failed, match="the frozen trunk of 'random' has changed"):
        trunk.verify()
    trunk.module.eval()
    trunk.verify()
    assert not any(each.requires_grad for each in trunk.module.parameters())


# Kept heads


def test_of_several_heads_the_surest_name_is_taken():
    def of(name, width=4):
        return {f"{name}.0.weight": torch.full((2, width), float(len(name)))}

    found = build_projector({**of("mlp"), **of("a.fc"), **of("projection_head")}, 4)
    assert found[0].weight[0, 0] == len("projection_head")
    # One that does not fit, or has more below its name, is passed over
    found = build_projector({**of("mlp"), **of("projector", 5)}, 4)
    assert found[0].weight[0, 0] == len("mlp")
    more = {**of("projector"), "projector.scale": torch.ones(1)}
    assert build_projector(more, 4) is None
    assert build_projector({**more, **of("g")}, 4)[0].weight[0, 0] == 1
    # Of two by one name, the first in the alphabet
    found = build_projector({**of("bb.fc"), **of("a.fc")}, 4)
    assert found[0].weight[0, 0] == len("a.fc")
    assert build_projector(of("lphi"), 4) is None
    assert build_projector(of("lphi"), 4, ("lphi",)) is not None


def test_a_chain_of_linear_maps_has_relus_where_nothing_is_kept():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(6, 4, generator=generator)
    bias = torch.randn(6, generator=generator)
    last = torch.randn(3, 6, generator=generator)
    heads = {"projector.1.weight": first, "projector.1.bias": bias}
    heads |= {"projector.3.weight": last}
    built = build_projector(heads, 4)
    x = torch.randn(5, 4, generator=generator)
    expected = ((x.relu() @ first.T + bias).relu()) @ last.T
    torch.testing.assert_close(built(x), expected)
    assert output_dim(built) == 3
    assert not built.training and not any(p.requires_grad for p in built.parameters())
    # A norm behind it does not change the width
    norm = {f"projector.4.running_{name}": torch.ones(3) for name in ("mean", "var")}
    built = build_projector({**heads, **norm}, 4)
    expected = (expected - 1) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(built(x), expected)
    assert output_dim(built) == 3
    wide = {f"projector.4.running_{name}": torch.ones(4) for name in ("mean", "var")}
    assert build_projector({**heads, **wide}, 4) is None


def test_a_head_that_is_not_there_names_those_that_are():
    heads = {"b.0.weight": torch.zeros(2, 12), "a.0.weight": torch.zeros(2, 12)}
    point = of_vit(heads=heads, provenance={"name": "vit"})
    assert kept_head(point, "a")[0].weight.shape == (2, 12)
    with pytest.raises(BadInput) as error:
        kept_head(point, "lphi")
    assert str(error.value) == (
        "'vit' has no head 'lphi' (it keeps: a, b); use a protocol without `head`"
    )
