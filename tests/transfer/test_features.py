"""Frozen trunks are exact; the cache gives the features of the images as they are, or refuses."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from support.extraction import CPU, GEOMETRY, checkpoint, extractor
from support.interruptions import Killed, kill

from backbench.datasets.splits import Splits
from backbench.errors import BadInput, Failed, Preempted
from backbench.images import contents, image_list
from backbench.images.image_list import ImageList, scan_folder
from backbench.images.preprocess import (
    CIFAR_MEAN,
    CIFAR_STD,
    Pixels,
    eval_geometry,
    to_input,
)
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.transfer.features import cache as feature_cache
from backbench.transfer.features import extractor as extraction
from backbench.transfer.features.cache import FeatureCache, describe
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.features.frozen import FrozenTrunk, forward_all

DIM = 128  # numbers of a feature


@pytest.mark.parametrize("arch", ["resnet18,width=0.25", "resnet50,width=0.25"])
def test_folded_channels_last_is_the_trunk(arch):
    point = checkpoint(arch=arch)
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        expected = point.backbone().eval()(x)
    frozen = FrozenTrunk.build(point, device=CPU)
    found = frozen(x)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in frozen.module.modules())
    assert float((found - expected).norm() / expected.norm()) < 5e-6


def test_bf16_is_near_and_marked(images, cache):
    point = checkpoint()
    exact = extractor(cache, point)(images)[0]
    rough = extractor(cache, point, precision="bf16")(images)[0]
    error = float((rough - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1, "another entry of the cache, not the same numbers"


def test_features_are_those_of_the_plain_trunk(images, cache):
    points = [checkpoint(0), checkpoint(1, pixels=Pixels(CIFAR_MEAN, CIFAR_STD, "BGR"))]
    found = extractor(cache, *points, workers=2)(images)
    geometry = eval_geometry(resize=40, crop=32)
    for point, rows in zip(points, found):
        cut = [geometry(images.open(i)) for i in range(len(images))]
        pixels = torch.stack([to_input(image, point.pixels) for image in cut])
        with torch.no_grad():
            expected = point.backbone().eval()(pixels)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


def test_second_time_comes_from_the_cache(images, cache, decoder):
    first = extractor(cache, checkpoint())(images)[0]
    assert len(decoder.paths) == 10
    assert torch.equal(extractor(cache, checkpoint())(images)[0], first)
    assert len(decoder.paths) == 10, "nothing is decoded for what is there"
    both = extractor(cache, checkpoint(), checkpoint(1))(images)
    assert torch.equal(both[0], first) and not torch.equal(both[1], first)
    assert len(decoder.paths) == 20, "the other checkpoint needs the images"


def test_all_that_matters_is_in_the_key(images, cache):
    def frozen(*about, precision="fp32", **changes):
        return FrozenTrunk.build(
            checkpoint(*about, **changes), device=CPU, precision=precision
        )

    base = frozen()
    of = contents.named(images).digest
    described = [
        describe(base, of, GEOMETRY),
        describe(frozen(1), of, GEOMETRY),
        describe(frozen(pixels=Pixels(std=(0.228, 0.224, 0.225))), of, GEOMETRY),
        describe(frozen(precision="bf16"), of, GEOMETRY),
        describe(base, of, dataclasses.replace(GEOMETRY, interpolation="bicubic")),
        describe(base, of, dataclasses.replace(GEOMETRY, resize=41)),
        describe(base, contents.named(images.subset(range(9))).digest, GEOMETRY),
    ]
    images.file(0).write_bytes(images.file(1).read_bytes())
    described.append(describe(base, contents.named(images).digest, GEOMETRY))
    assert len({cache.path(description) for description in described}) == 8


def test_another_preprocessing_under_this_name_is_refused(images, cache):
    make = extractor(cache, checkpoint())
    make(images)
    (about,) = cache.folder.glob("*.json")
    text = json.loads(about.read_text())
    text["description"]["geometry"]["interpolation"] = "bicubic"
    about.write_text(json.dumps(text))
    said = "features of another geometry than asked for; remove the file"
    with pytest.raises(BadInput, match=said):
        make(images)


def test_damaged_rows_are_refused(images, cache):
    make = extractor(cache, checkpoint())
    make(images)
    (rows,) = cache.folder.glob("*.npy")
    data = rows.read_bytes()
    flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    cut = data[:-100]
    without_header = data[128:]
    said = "the cached features are damaged; remove the file"
    for damaged in (flipped, cut, without_header, b""):
        time.sleep(0.05)  # longer than a tick of the file system's clock
        rows.write_bytes(damaged)
        with pytest.raises(BadInput, match=said):
            make(images)


def test_rows_are_hashed_once_for_every_file_that_they_become(
    images, cache, monkeypatch
):
    hashed = []
    digest = feature_cache._file_digest

    def noted(path):
        hashed.append(path)
        return digest(path)

    monkeypatch.setattr(feature_cache, "_file_digest", noted)
    make = extractor(cache, checkpoint())
    first = make(images)[0]
    assert [p.suffix for p in hashed] == [".part"], "as they were written"
    make(images)
    assert len(hashed) == 1
    # A copy is another file, and is hashed once.
    copied = FeatureCache(cache.folder.parent / "copied", 10**8)
    shutil.copytree(cache.folder, copied.folder)
    for _ in range(2):
        assert torch.equal(extractor(copied, checkpoint())(images)[0], first)
    assert len(hashed) == 2
    # An entry from before files were noted is hashed, too.
    (about,) = cache.folder.glob("*.json")
    text = json.loads(about.read_text())
    del text["file"]
    about.write_text(json.dumps(text))
    make(images)
    assert len(hashed) == 3


def test_the_least_recently_used_goes_first_at_the_limit(images, tmp_path):
    small = FeatureCache(tmp_path / "small", 2 * (10 * DIM * 4 + 200))
    names = []
    for seed in (0, 1, 0, 2):
        extractor(small, checkpoint(seed))(images)
        names.append({p.name for p in small.folder.glob("*.npy")})
    assert names[0] < names[1]
    assert names[1] == names[2]
    assert names[0] < names[3]
    assert names[3] != names[1]
    assert sum(p.stat().st_size for p in small.folder.glob("*.npy")) <= small.limit
    small.make_room(small.limit, keep=set(small.folder.glob("*.npy")))
    assert {p.name for p in small.folder.glob("*.npy")} == names[3]
    with pytest.raises(BadInput, match="set BACKBENCH_CACHE_GB"):
        extractor(FeatureCache(tmp_path / "tiny", 1000), checkpoint())(images)


def test_the_limit_is_a_number_of_gigabytes(monkeypatch):
    for said, limit in (("", 50e9), ("0", 0), ("1.5", 1.5e9)):
        monkeypatch.setenv("BACKBENCH_CACHE_GB", said)
        assert FeatureCache.default().limit == limit
    for said in ("abc", "nan", "inf", "-1"):
        monkeypatch.setenv("BACKBENCH_CACHE_GB", said)
        refused = f"BACKBENCH_CACHE_GB={said}: expected gigabytes"
        with pytest.raises(BadInput, match=refused):
            FeatureCache.default()


def test_what_a_run_is_using_is_not_removed(images, tmp_path):
    """Rows that are mapped stay, and entries that somebody computes; what was killed goes first."""
    small = FeatureCache(tmp_path / "small", 2 * (10 * DIM * 4 + 200))
    rows = extractor(small, checkpoint(0))(images)[0]
    first = next(small.folder.glob("*.npy"))
    view = rows[3:]
    expected = view.clone()
    del rows
    (small.folder / f"{'0' * 32}.part").write_bytes(bytes(10_000))
    for seed in (1, 2):
        extractor(small, checkpoint(seed))(images)
        assert first.exists() and not list(small.folder.glob("*.part"))
    assert torch.equal(view, expected)
    with first.with_suffix(".lock").open("w") as lock:
        del view
        fcntl.flock(lock, fcntl.LOCK_EX)
        extractor(small, checkpoint(3))(images)
        assert first.exists()
    extractor(small, checkpoint(4))(images)
    assert not first.exists()


def test_room_is_made_over_nfs(images, tmp_path, monkeypatch):
    """NFS refuses a lock that excludes others to a file that is open for reading only."""
    flock = fcntl.flock

    def over_nfs(file, kind):
        if kind & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", over_nfs)
    small = FeatureCache(tmp_path / "small", 10 * DIM * 4 + 200)
    for seed in (0, 1):
        extractor(small, checkpoint(seed))(images)
    assert len(list(small.folder.glob("*.npy"))) == 1


def test_entries_are_locked_while_they_are_computed_and_mapped_after(
    images, cache, decoder
):
    """Another run gets no lock until the features are there."""
    point = checkpoint()
    frozen = FrozenTrunk.build(point, device=CPU)
    wanted = describe(frozen, contents.named(images).digest, GEOMETRY)
    seen = []

    def look():
        locks = cache.try_lock([wanted])
        seen.append(locks is None)
        if locks is not None:
            locks.close()

    decoder.at = {1: look, 10: look}
    extractor(cache, point)(images)
    assert seen == [True, True]
    look()
    assert seen[-1] is False


def test_a_cache_without_locks_is_refused(images, cache, monkeypatch):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(BadInput, match="set BACKBENCH_CACHE to another disk"):
        extractor(cache, checkpoint())(images)


def test_a_cache_where_no_folder_can_be_made_is_refused(images):
    nowhere = FeatureCache(Path("/proc/none/features"), 10**8)
    with pytest.raises(BadInput, match=r"not permitted.* set BACKBENCH_CACHE to"):
        extractor(nowhere, checkpoint())(images)


def test_what_another_run_computes_is_waited_for(images, cache, caplog, monkeypatch):
    monkeypatch.setattr("backbench.transfer.features.extractor.WAIT_SECONDS", 0.05)
    caplog.set_level("INFO", logger=log.name)
    make = extractor(cache, checkpoint())
    wanted = describe(make.trunks[0], contents.named(images).digest, GEOMETRY)
    held = cache.try_lock([wanted])
    stop = StopFlag()
    stop.requested = "SIGTERM"
    said = "stopped by SIGTERM while another run computed"
    with pytest.raises(Preempted, match=said):
        dataclasses.replace(make, stop=stop)(images)
    timer = threading.Timer(0.3, held.close)
    timer.start()
    assert make(images)[0].shape == (10, DIM)
    assert caplog.text.count("waiting for another run") == 2, "once each"


def test_stopped_at_a_batch_and_continued(images, cache, decoder):
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted, match="stopped by SIGTERM after 4 of 10 images"):
        extractor(cache, checkpoint(), stop=stop)(images)
    assert len(decoder.paths) == 4
    continued = extractor(cache, checkpoint())(images)[0]
    assert len(decoder.paths) == 10, "the first batch is not computed again"
    assert torch.equal(continued, fresh(images, cache.folder.parent))
    left = {p.suffix for p in cache.folder.iterdir()}
    # No part and no marker stays behind.
    assert left == {".npy", ".json", ".files", ".lock"}


def test_a_marker_that_is_left_over_vouches_for_nothing(images, cache, decoder):
    """A run is saved at image 4; a part vanishes, so both parts begin anew; that run is killed before
    it saves."""
    points = [checkpoint(seed) for seed in range(2)]
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        extractor(cache, *points, stop=stop)(images)
    next(cache.folder.glob("*.part")).unlink()
    decoder.paths.clear()
    decoder.at[1] = kill
    with pytest.raises(Killed):
        extractor(cache, *points)(images)
    found = extractor(cache, *points)(images)
    assert len(decoder.paths) == 10, "nothing was there"
    elsewhere = FeatureCache(cache.folder.parent / "other", 10**8)
    for one, whole in zip(found, extractor(elsewhere, *points)(images)):
        assert torch.equal(one, whole)


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (4, 0, 3)])
def test_rows_of_several_parts_are_one_table(sizes):
    whole = torch.arange(14.0).view(7, 2)
    rows = FeatureRows(whole.split(sizes))
    index = torch.tensor([6, 0, 3, 4, 3])
    assert len(rows) == 7
    assert torch.equal(rows.take(index), whole[index])
    blocks = list(rows.split(3))
    assert torch.equal(torch.cat(blocks), whole)
    assert max(map(len, blocks)) == 3
    storages = {part.untyped_storage().data_ptr() for part in blocks}
    assert storages == {whole.untyped_storage().data_ptr()}, "they are views"
    with pytest.raises(IndexError):
        rows.take(torch.tensor([7]))


def blackened(file):
    """Write another picture of the same size in bytes, and keep the file's time of change."""
    before = file.stat()
    Image.fromarray(np.zeros((50, 45, 3), np.uint8)).save(file)
    with file.open("ab") as end:
        end.write(bytes(before.st_size - file.stat().st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_whole_list_is_read_once_and_tells_two_exchanged_pictures(
    images, monkeypatch
):
    monkeypatch.setattr(contents, "SAMPLE", 2)
    unseen = [i for i in range(10) if i not in contents.chosen(10, 2)]
    a, b = (images.file(i) for i in unseen[:2])
    before = contents.whole(images)
    sampled = contents.sample(images)
    monkeypatch.setattr(ImageList, "read", None)  # nothing is read again
    assert contents.whole(images) == before
    monkeypatch.undo()
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    monkeypatch.setattr(contents, "SAMPLE", 2)
    assert contents.whole(images) != before
    assert contents.sample(images) == sampled


def fresh(images, tmp_path):
    return extractor(FeatureCache(tmp_path / "fresh", 10**8), checkpoint())(images)[0]


def test_another_folder_with_equal_names_sizes_and_times(images, cache, tmp_path):
    first = extractor(cache, checkpoint())(images)[0]
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    other = scan_folder(tmp_path / "other")
    blackened(other.file(3))
    found = extractor(cache, checkpoint())(other)[0]
    assert torch.equal(found, fresh(other, tmp_path))
    assert not torch.equal(found, first)


def test_a_file_outside_of_the_sample_overwritten(
    images, cache, tmp_path, monkeypatch, caplog
):
    """Its size and time are kept; the inode's time of change cannot be."""
    monkeypatch.setattr(contents, "SAMPLE", 2)
    index = next(i for i in range(10) if i not in contents.chosen(10, 2))
    first = extractor(cache, checkpoint())(images)[0]
    name = contents.named(images).digest
    blackened(images.file(index))
    assert contents.named(images).digest == name, "what names the list does not see it"
    found = extractor(cache, checkpoint())(images)[0]
    assert torch.equal(found, fresh(images, tmp_path))
    assert not torch.equal(found, first)
    assert f"{images.file(index)}: not what it was" in caplog.text


def test_a_copy_on_another_disk_is_recognised(images, cache, tmp_path, decoder):
    first = extractor(cache, checkpoint())(images)[0]
    (tmp_path / "disk").mkdir()
    for folder in "ab":
        here = tmp_path / "data" / folder
        there = tmp_path / "disk" / folder
        shutil.copytree(here, there, copy_function=shutil.copyfile)
    found = extractor(cache, checkpoint())(scan_folder(tmp_path / "disk"))[0]
    assert torch.equal(found, first)
    assert len(decoder.paths) == 10


def test_a_hit_reads_the_sample_and_of_moved_files_2_percent(tmp_path, monkeypatch):
    """It needs one stat a file."""
    folder = tmp_path / "data" / "a"
    folder.mkdir(parents=True)
    for i in range(2000):
        (folder / f"{i}.png").write_bytes(i.to_bytes(4, "little"))
    images = scan_folder(tmp_path / "data")
    monkeypatch.setattr(contents, "SAMPLE", 5)
    counts = {"read": 0, "stat": 0}
    read = ImageList.read

    def counted_read(*given):
        counts["read"] += 1
        return read(*given)

    def counted_stat(file):
        counts["stat"] += 1
        return Path(file).stat()

    counting_os = SimpleNamespace(**{**vars(os), "stat": counted_stat})
    monkeypatch.setattr(ImageList, "read", counted_read)
    monkeypatch.setattr(image_list, "os", counting_os)
    named = contents.named(images)
    assert counts == {"read": 5, "stat": 2000}
    seen = feature_cache.not_yet_seen(named)
    seen[:, 2] = [feature_cache.file_hash(images, i) for i in range(2000)]
    counts["read"] = 0
    assert feature_cache.changed_file(images, named, seen) is None
    assert counts["read"] == 0
    seen[:, 0] += 1  # other inodes, as on another disk
    assert feature_cache.changed_file(images, named, seen) is None
    assert counts["read"] == 40
    assert counts["stat"] == 2000
    seen[:, 2] += 1  # other hashes
    assert feature_cache.changed_file(images, named, seen) is not None


def test_swapped_between_a_stop_and_its_continuation(
    images, cache, tmp_path, monkeypatch
):
    """Rows of the old pictures and of the new ones never stand in one entry."""
    monkeypatch.setattr(contents, "sample", lambda _: "")
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        extractor(cache, checkpoint(), stop=stop)(images)
    for i in range(3):
        blackened(images.file(i))
    found = extractor(cache, checkpoint())(images)[0]
    assert torch.equal(found, fresh(images, tmp_path))


# Features from which no number can be computed


def diverged(scale):
    """A trunk whose first norm multiplies by `scale`: finite weights, features that overflow."""
    whole = checkpoint(0)
    state = dict(whole.state_dict)
    for key, value in whole.state_dict.items():
        if "bn1.weight" in key:
            state[key] = value * scale
    return whole.replace(state_dict=state)


def collapsed():
    """A trunk whose last norm gives each image the same."""
    whole = checkpoint(0)
    state = dict(whole.state_dict)
    state["layer4.1.bn2.weight"] = torch.zeros(DIM)
    state["layer4.0.bn2.weight"] = torch.zeros(DIM)
    state["layer4.0.downsample.1.weight"] = torch.zeros(DIM)
    state["layer4.0.downsample.1.bias"] = torch.ones(DIM)
    return whole.replace(state_dict=state)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: diverged(1e12), "not finite, or too large to be squared"),
        (lambda: diverged(1e5), "not finite, or too large to be squared"),
        (collapsed, "no image can be told from another"),
    ],
)
def test_features_without_a_meaning_are_refused(made, words, images, cache):
    made = made()
    with pytest.raises(BadInput, match=words) as error:
        extractor(cache, checkpoint(1), made)(images)
    assert f"'{made.name}'" in str(error.value)


def test_features_without_a_meaning_are_refused_from_the_cache(
    images, cache, monkeypatch
):
    """They may have been computed by a version that did not look."""
    made = collapsed()
    of_made = extractor(cache, made)
    with monkeypatch.context() as blind:
        for module in ("frozen", "extractor"):
            name = f"backbench.transfer.features.{module}.refuse_unusable"
            blind.setattr(name, lambda *_, **__: None)
        of_made(images)
    with pytest.raises(BadInput, match="no image can be told"):
        extractor(cache, made)(images)


def test_a_trunk_that_overflows_on_a_later_batch_alone_is_refused_at_the_end():
    """Of later batches nothing is looked at until `verify`: a look would wait for a GPU."""
    trunk = FrozenTrunk.build(checkpoint(0), device=CPU)
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    forward_all([trunk], pixels)
    trunk.verify()
    trunk.watch.see(torch.full((4, DIM), float("nan")), pixels, "x")
    with pytest.raises(BadInput, match="not finite"):
        trunk.verify()


def test_features_of_splits_are_of_trunks_that_stayed_as_they_were(images, cache):
    of_both = extractor(cache, checkpoint(0), checkpoint(1))
    found = Splits(train=images, val=images, test=images, held_out=True)
    assert [len(each) for each in of_both.of_splits(found, "set")] == [2, 2, 2]
    with torch.no_grad():
        next(of_both.trunks[1].module.parameters()).add_(1)
    with pytest.raises(Failed, match=r"the frozen trunk of .* has changed"):
        of_both.of_splits(found, "set")


def test_one_image_and_equal_images_are_no_collapse(tmp_path, cache):
    for name in ("a", "b"):
        file = tmp_path / "one" / name / "0.png"
        file.parent.mkdir(parents=True)
        Image.new("RGB", (40, 40), (9, 99, 200)).save(file)
    one = scan_folder(tmp_path / "one").subset([0])
    (rows,) = extractor(cache, checkpoint(0))(one)
    assert len(rows) == 1


# Where a killed extraction goes on, and how its rows are cut


@pytest.mark.parametrize("case", [(1, 2), (2, 2), (3, 10), (20, 10)])
def test_a_killed_extraction_goes_on_at_the_last_batches_that_were_saved(
    images, cache, decoder, monkeypatch, case
):
    """Ten images in batches of four; it is killed at the ninth, with eight behind it."""
    every, again = case
    monkeypatch.setattr(extraction, "SAVE_EVERY", every)
    decoder.at[9] = kill
    with pytest.raises(Killed):
        extractor(cache, checkpoint())(images)
    decoder.paths.clear()
    found = extractor(cache, checkpoint())(images)[0]
    assert len(decoder.paths) == again
    assert torch.equal(found, fresh(images, cache.folder.parent))


def test_entries_that_are_there_are_named_and_the_missing_are_computed_alone(
    images, cache, decoder
):
    """Of three trunks the second one's features are there."""
    points = [checkpoint(seed) for seed in range(3)]
    (second,) = extractor(cache, points[1])(images)
    decoder.paths.clear()
    made = extractor(cache, *points)
    passed = []
    for trunk in made.trunks:
        trunk.module.register_forward_pre_hook(
            lambda _, given, mark=trunk.digest: passed.append(mark)
        )
    found = made(images)
    assert len(decoder.paths) == 10
    assert set(passed) == {points[0].digest, points[2].digest}
    assert torch.equal(found[1], second)
    for rows, point in zip(found, points):
        alone = FeatureCache(cache.folder.parent / point.digest[:6], 10**8)
        torch.testing.assert_close(rows, extractor(alone, point)(images)[0])
