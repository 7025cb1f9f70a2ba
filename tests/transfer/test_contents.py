"""Contents decide whose features are in the cache and whose run is continued, not what the file
system says; and ImageNet is not read twice for it."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.extraction import checkpoint, extractor

from backbench.errors import Preempted
from backbench.images import contents, image_list
from backbench.images.image_list import ImageList, scan_folder
from backbench.runs.state import StopFlag
from transfer import feature_cache
from transfer.feature_cache import FeatureCache


def blackened(file):
    """Another picture of the same size in bytes, its time of change kept."""
    before = file.stat()
    Image.fromarray(np.zeros((50, 45, 3), np.uint8)).save(file)
    with file.open("ab") as end:
        end.write(bytes(before.st_size - file.stat().st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_whole_list_is_read_once_and_tells_two_exchanged_pictures(images, monkeypatch):
    monkeypatch.setattr(contents, "SAMPLE", 2)
    unseen = [i for i in range(10) if i not in contents.chosen(10, 2)]
    a, b = (images.file(i) for i in unseen[:2])
    before, sampled = contents.whole(images), contents.sample(images)
    monkeypatch.setattr(ImageList, "read", None)  # nothing is read again
    assert contents.whole(images) == before
    monkeypatch.undo()
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    monkeypatch.setattr(contents, "SAMPLE", 2)
    assert contents.whole(images) != before and contents.sample(images) == sampled


def fresh(images, tmp_path):
    return extractor(FeatureCache(tmp_path / "fresh", 10**8), checkpoint())(images)[0]


def test_another_folder_with_equal_names_sizes_and_times(images, cache, tmp_path):
    first = extractor(cache, checkpoint())(images)[0]
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    other = scan_folder(tmp_path / "other")
    blackened(other.file(3))
    found = extractor(cache, checkpoint())(other)[0]
    assert (found == fresh(other, tmp_path)).all() and not (found == first).all()


def test_a_file_outside_of_the_sample_overwritten(images, cache, tmp_path, monkeypatch, caplog):
    """Its size and time are kept; the inode's time of change cannot be."""
    monkeypatch.setattr(contents, "SAMPLE", 2)
    index = next(i for i in range(10) if i not in contents.chosen(10, 2))
    first = extractor(cache, checkpoint())(images)[0]
    name = contents.named(images).digest
    blackened(images.file(index))
    assert contents.named(images).digest == name, "what names the list does not see it"
    found = extractor(cache, checkpoint())(images)[0]
    assert (found == fresh(images, tmp_path)).all() and not (found == first).all()
    assert f"{images.file(index)}: not what it was" in caplog.text


def test_a_copy_on_another_disk_is_recognised(images, cache, tmp_path, decoder):
    first = extractor(cache, checkpoint())(images)[0]
    (tmp_path / "disk").mkdir()
    for folder in "ab":
        shutil.copytree(
            tmp_path / "data" / folder, tmp_path / "disk" / folder, copy_function=shutil.copyfile
        )
    found = extractor(cache, checkpoint())(scan_folder(tmp_path / "disk"))[0]
    assert (found == first).all() and len(decoder.paths) == 10


def test_what_a_hit_reads(tmp_path, monkeypatch):
    """In place the sample, moved 2% of the files more; one stat a file."""
    for i in range(2000):
        (tmp_path / "data" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "a" / f"{i}.png").write_bytes(i.to_bytes(4, "little"))
    images = scan_folder(tmp_path / "data")
    monkeypatch.setattr(contents, "SAMPLE", 5)
    counts = {"read": 0, "stat": 0}
    read = ImageList.read
    monkeypatch.setattr(
        ImageList, "read", lambda *a: counts.update(read=counts["read"] + 1) or read(*a)
    )

    def counted_stat(file):
        counts["stat"] += 1
        return Path(file).stat()

    monkeypatch.setattr(image_list, "os", SimpleNamespace(**{**vars(os), "stat": counted_stat}))
    named = contents.named(images)
    assert counts == {"read": 5, "stat": 2000}
    seen = feature_cache.not_yet_seen(named)
    seen[:, 2] = [feature_cache.file_hash(images, i) for i in range(2000)]
    counts["read"] = 0
    assert feature_cache.changed_file(images, named, seen) is None and counts["read"] == 0
    seen[:, 0] += 1
    assert feature_cache.changed_file(images, named, seen) is None and counts["read"] == 40
    assert counts["stat"] == 2000
    seen[:, 2] += 1
    assert feature_cache.changed_file(images, named, seen) is not None


def test_swapped_between_a_stop_and_its_continuation(images, cache, tmp_path, monkeypatch):
    """Rows of the old pictures and of the new ones never stand in one entry."""
    monkeypatch.setattr(contents, "SAMPLE", 0)
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        extractor(cache, checkpoint(), stop=stop)(images)
    monkeypatch.setattr(contents, "SAMPLE", 10)  # of those that a moved list reads
    for i in range(3):
        blackened(images.file(i))
    monkeypatch.setattr(contents, "sample", lambda _: "")
    found = extractor(cache, checkpoint())(images)[0]
    assert (found == fresh(images, tmp_path)).all()
