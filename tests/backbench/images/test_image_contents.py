"""The name of a list of images by its contents: features and runs are found by it."""

import hashlib
import os

import numpy as np
import pytest

from backbench.images import contents
from backbench.images.image_list import ArrayList, ImageList, Stamp


def listed(folder, contents_of):
    for name, content in contents_of.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return ImageList(folder, tuple(contents_of), (0,) * len(contents_of), ("a",))


def sha(content):
    return hashlib.sha256(content)


@pytest.fixture
def three(tmp_path):
    files = {"a/1.jpg": b"one", "a/2.JPEG": b"second", "b/3.jpg": b"3"}
    return listed(tmp_path / "images", files)


DIGESTS = b"".join(sha(content).digest() for content in (b"one", b"second", b"3"))


def test_a_lists_name_is_of_paths_sizes_and_contents(three):
    sample = sha(DIGESTS).hexdigest()[:16]
    assert contents.sample(three) == sample
    paths = "a/1.jpg\na/2.JPEG\nb/3.jpg"
    found = contents.named(three)
    assert found.digest == sha(f"{paths}\n3\n6\n1{sample}".encode()).hexdigest()
    stats = [three.file(i).stat() for i in range(3)]
    assert list(found.inodes) == [about.st_ino for about in stats]
    assert list(found.changed) == [about.st_ctime_ns for about in stats]


def test_pictures_other_than_jpeg_have_another_name(tmp_path):
    mixed = listed(tmp_path, {"1.jpg": b"one", "2.png": b"two"})
    sample = contents.sample(mixed)
    wanted = sha(f"1.jpg\n2.png\npixels 2\n3\n3{sample}".encode()).hexdigest()
    assert contents.named(mixed).digest == wanted


def test_an_inode_of_64_bits_is_kept_as_a_positive_number(three):
    class Large(ImageList):
        def stamps(self):
            return iter(
                [Stamp(3, 2**63 + 5, 7), Stamp(6, 2**63 - 1, 8), Stamp(1, 2, 9)]
            )

    found = contents.named(Large(three.root, three.paths, three.labels, ("a",)))
    assert list(found.inodes) == [5, 2**63 - 1, 2]
    assert list(found.changed) == [7, 8, 9]


def test_an_arrays_name_is_of_all_its_pixels(tmp_path):
    pixels = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    rows = ArrayList(tmp_path, ("x/0", "x/1"), (0, 1), ("p", "q"), pixels)
    found = contents.named(rows)
    assert found.digest == sha(b"x/0\nx/1" + pixels.tobytes()).hexdigest()
    assert list(found.inodes) == list(found.changed) == [0, 0]
    assert contents.whole(rows) == sha(pixels.tobytes()).hexdigest()[:16]


def test_of_many_images_the_same_64_are_read(tmp_path):
    files = {f"{i}.jpg": str(i).encode() for i in range(70)}
    images = listed(tmp_path, files)
    read = contents.chosen(70, 64)
    assert read == sorted(set(read)) and len(read) == 64
    assert set(read) <= set(range(70))
    assert contents.chosen(70, 64) == read
    assert contents.chosen(64, 64) == list(range(64))
    assert contents.chosen(3, 64) == [0, 1, 2]
    digests = b"".join(sha(str(i).encode()).digest() for i in read)
    before = contents.sample(images)
    assert before == sha(digests).hexdigest()[:16]
    (unread, *_) = set(range(70)) - set(read)
    images.file(unread).write_bytes(b"x")
    assert contents.sample(images) == before
    images.file(read[-1]).write_bytes(b"x")
    assert contents.sample(images) != before


def test_an_image_that_is_gone_leaves_a_sample_of_the_others(three):
    three.file(1).unlink()
    digests = sha(b"one").digest() + sha(b"3").digest()
    assert contents.sample(three) == sha(digests).hexdigest()[:16]


def test_all_contents_are_read_once(three, monkeypatch):
    wanted = sha(DIGESTS).hexdigest()[:16]
    assert contents.whole(three) == wanted
    cached = contents.cache_folder() / "contents"
    (kept,) = cached.iterdir()
    assert kept.read_text() == wanted
    # What is kept is believed only where it is a digest
    kept.write_text("0123456789abcdef")
    assert contents.whole(three) == "0123456789abcdef"
    for damaged in ("", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"):
        kept.write_text(damaged)
        assert contents.whole(three) == wanted
    # Another size, another time and another order are other files
    three.file(2).write_bytes(b"33")
    assert contents.whole(three) not in (wanted, "0123456789abcdef")
    turned = three.subset([1, 0])
    one, second = sha(b"one").digest(), sha(b"second").digest()
    assert contents.whole(turned) == sha(second + one).hexdigest()[:16]
    assert contents.whole(three.subset([0])) == sha(one).hexdigest()[:16]


def test_links_of_one_file_are_told_apart_by_their_paths(three):
    os.link(three.file(0), three.root / "a" / "4.jpg")
    images = ImageList(three.root, ("a/1.jpg", "a/4.jpg"), (0, 0), ("a",))
    first, second = images.stamps()
    assert (first.size, first.inode) == (second.size, second.inode)
    assert first.place != second.place
    one = sha(b"one").digest()
    assert contents.whole(images) == sha(one + one).hexdigest()[:16]


def test_each_split_has_its_sample(three):
    splits = [("train", three), ("test", three.subset([2]))]
    assert contents.of_splits(splits) == {
        "train": contents.sample(three),
        "test": sha(sha(b"3").digest()).hexdigest()[:16],
    }


def test_the_images_chosen_of_a_count_are_the_same_ones_always():
    """Digests in old results name images by this choice; it may not move."""
    assert contents.chosen(100, 5) == [62, 65, 67, 87, 92]
