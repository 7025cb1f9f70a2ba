"""Images in place: one read of a span, words that name one, and what is said of a container."""

import os
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from backbench.containers import spans, table_cache
from backbench.containers.container import Container
from backbench.containers.scan_parquet_arrow_lmdb import scan_parquet
from backbench.containers.spans import (
    CODECS,
    SPAN,
    NamedImages,
    SpanList,
    bare_span,
    mark_of,
    plain_name,
    read_span,
    read_spelled,
    spelled,
)
from backbench.containers.tables import Table
from backbench.errors import BadInput


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x:y.tar"
    path.write_bytes(b"0123456789" * 3)
    return path


def read(file, span):
    return read_span(str(file), mark_of(file), span, "a/1.jpg")


def test_a_bare_image_is_its_bytes_in_place(file):
    assert read(file, bare_span(7, 5)) == b"78901"
    assert read(file, bare_span(25, 5)) == b"56789"
    assert read(file, bare_span(30, 0)) == b""
    with pytest.raises(BadInput) as refused:
        read(file, bare_span(26, 5))
    said = f"a/1.jpg: {file} ends in the middle of this image; get the file again"
    assert str(refused.value) == said


def packed(codec, data):
    if codec == "deflate":
        compressor = zlib.compressobj(wbits=-15)
        return compressor.compress(data) + compressor.flush()
    out = pyarrow.compress(data, codec=codec, asbytes=True)
    if codec == "snappy":
        # Without the length of the whole stream, which stands before it
        length = len(data)
        while length > 127:
            out, length = out[1:], length >> 7
        out = out[1:]
    return out


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "bare"])
@pytest.mark.parametrize("count", [1, 127, 128, 40_000])
def test_an_image_is_a_piece_of_what_is_unpacked(tmp_path, codec, count):
    """What unpacks to more or fewer bytes than are claimed is damaged."""
    block = np.random.default_rng(0).integers(0, 9, count, dtype=np.uint8).tobytes()
    stored = packed(codec, block)
    file = tmp_path / "x.parquet"
    file.write_bytes(b"head" + stored + b"tail")
    place = CODECS.index(codec)
    whole = (4, len(stored), place, 0, count, count)
    assert read(file, whole) == block
    inner = count // 3
    part = (4, len(stored), place, inner, count - inner, count)
    assert read(file, part) == block[inner:]
    for wrong in (count - 1, count + 1):
        with pytest.raises(BadInput, match=r"a/1\.jpg: damaged in .*x\.parquet \("):
            read(file, (4, len(stored), place, 0, 1, wrong))


@pytest.mark.parametrize("codec", ["gzip", "brotli", "lz4", "zstd", "snappy", "none"])
def test_parquets_pages_are_read_in_place_whatever_packs_them(tmp_path, codec):
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 9, 300 + n, dtype=np.uint8).tobytes() for n in range(9)]
    file = tmp_path / "x.parquet"
    options = {"data_page_size": 700, "write_batch_size": 1, "use_dictionary": False}
    table = pyarrow.table({"image": images, "label": list(range(9))})
    pyarrow.parquet.write_table(table, file, compression=codec, **options)
    found = scan_parquet(file)
    assert found.labels.tolist() == list(range(9))
    assert [read(file, span[1:]) for span in found.spans.tolist()] == images


def test_a_file_that_is_gone_or_changed_is_named(file, tmp_path):
    mark = mark_of(file)
    with pytest.raises(BadInput) as refused:
        read_span(str(tmp_path / "gone"), mark, bare_span(0, 1), "x")
    said = f"{tmp_path / 'gone'}: not readable (No such file or directory)"
    assert str(refused.value) == said
    for wrong in ((mark[0] + 1, *mark[1:]), (mark[0], mark[1] + 1, mark[2])):
        with pytest.raises(BadInput, match="has changed since this run looked into it"):
            read_span(str(file), wrong, bare_span(0, 1), "x")


def listed(file, *of_spans, kind="tar", notes=()):
    other = file.with_name("other.tar")
    other.write_bytes(b"abcdefghij")
    files = (str(file), str(other))
    paths = tuple(f"a/{n}.jpg" for n in range(len(of_spans)))
    return SpanList(
        file.parent,
        paths,
        (0,) * len(paths),
        ("a",),
        np.array(list(of_spans), SPAN),
        files,
        tuple(map(mark_of, files)),
        kind,
        notes,
    )


def test_a_list_reads_each_image_from_its_container(file):
    images = listed(
        file, (0, *bare_span(3, 4)), (1, *bare_span(2, 6)), (1, *bare_span(0, 1))
    )
    assert [images.read(i) for i in range(3)] == [b"3456", b"cdefgh", b"a"]
    assert images.ends(1, 2) == b"cdgh"
    assert images.ends(1, 6) == images.ends(1) == b"cdefgh" * 2
    turned = images.subset([2, 0])
    assert [turned.read(i) for i in range(2)] == [b"a", b"3456"]
    assert tuple(turned.paths) == ("a/2.jpg", "a/0.jpg")


def test_a_list_says_what_a_read_costs(file):
    bare = listed(file, (0, *bare_span(3, 4)), notes=("first", "second"))
    assert bare.described == (
        "tar, 2 files, bare: 1.00 bytes read for each byte of an image; first; second"
    )
    mixed = listed(file, (0, 0, 30, 2, 5, 4, 90), (1, *bare_span(0, 8)), kind="parquet")
    assert mixed.described == (
        "parquet, 2 files, bare, snappy: 3.17 bytes read for each byte of an image"
    )
    assert listed(file).described.endswith("0.00 bytes read for each byte of an image")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_stamp_is_of_the_container_and_the_place_in_it(file, kind):
    same = (0, 0, 30, 2, 5, 4, 90)
    images = listed(
        file, same, same, (0, 0, 30, 2, 6, 4, 90), (1, *bare_span(0, 8)), kind=kind
    )
    one, again, beside, other = images.stamps()
    for stamp, container in ((one, file), (other, file.with_name("other.tar"))):
        about = container.stat()
        assert (stamp.inode, stamp.changed) == (about.st_ino, about.st_ctime_ns)
    assert (one.size, other.size) == (4, 8)
    # A hard link in a tar is an image of its own; in a zip the same bytes are one
    assert (one.place == again.place) == (kind == "zip")
    assert one.place != beside.place
    file.unlink()
    with pytest.raises(BadInput, match=r"not readable \(No such file"):
        list(images.stamps())


def test_a_spelled_image_is_read_by_its_word_alone(file):
    images = listed(file, (0, *bare_span(3, 4)), (1, *bare_span(2, 6)))
    words = [spelled(images, i) for i in range(2)]
    assert [read_spelled(word) for word in words] == [b"3456", b"cdefgh"]
    assert plain_name(words[0]) == f"{file}!/a/0.jpg"
    assert plain_name("a/b:c.jpg") == "a/b:c.jpg"
    assert read_spelled("a/b.jpg") is None
    plain = file.with_name("plain.jpg")
    plain.write_bytes(b"plain")
    named = NamedImages(file.parent, (words[1], str(plain), words[0]), (0,) * 3, ())
    assert [named.read(i) for i in range(3)] == [b"cdefgh", b"plain", b"3456"]
    assert named.containers == {path: mark_of(path) for path in images.containers}
    assert [(stamp.size, stamp.inode) for stamp in named.stamps()] == [
        (6, file.with_name("other.tar").stat().st_ino),
        (5, plain.stat().st_ino),
        (4, file.stat().st_ino),
    ]


def test_a_container_that_is_written_while_it_is_scanned_is_named(
    tmp_path, monkeypatch
):
    files = tuple(tmp_path / f"train-00{n}.tar" for n in range(2))
    for file in files:
        file.write_bytes(b"0123456789")

    def scan(container, left):
        assert list(left) == list(files)
        for file in left:
            with file.open("ab") as end:
                end.write(b"x")
            yield Table.of([("1.jpg", -1, bare_span(0, 4))])

    monkeypatch.setattr(table_cache, "_scan", scan)
    with pytest.raises(BadInput) as refused:
        table_cache.tables_of(Container("tar", files))
    said = f"{files[0]}: somebody is writing it; wait until it is whole"
    assert str(refused.value) == said


def test_only_what_is_not_kept_is_scanned_and_by_its_columns(tmp_path, monkeypatch):
    files = tuple(tmp_path / f"train-00{n}.tar" for n in range(3))
    for number, file in enumerate(files):
        file.write_bytes(b"0123456789" * (number + 1))
    scanned = []

    def scan(container, left):
        for file in left:
            scanned.append(file.name)
            yield Table.of([(f"{file.stem}.jpg", -1, bare_span(0, 4))])

    monkeypatch.setattr(table_cache, "_scan", scan)
    found, marks = table_cache.tables_of(Container("tar", files))
    assert scanned == [file.name for file in files]
    assert marks == [mark_of(file) for file in files]
    scanned.clear()
    os.utime(files[1])
    again, _ = table_cache.tables_of(Container("tar", files))
    assert scanned == ["train-001.tar"]
    assert [table.names for table in again] == [table.names for table in found]
    scanned.clear()
    table_cache.tables_of(Container("tar", files, labels=("fine",)))
    assert len(scanned) == 3
    monkeypatch.setattr(table_cache, "MOST_FILES", 2)
    with pytest.raises(BadInput) as refused:
        table_cache.tables_of(Container("tar", files))
    assert str(refused.value) == f"{tmp_path}: 3 container files are too many"
    monkeypatch.setattr(table_cache, "MOST_FILES", 3)
    table_cache.tables_of(Container("tar", files))


def test_open_containers_are_kept_for_the_next_read(file):
    spans._open_container.cache_clear()
    for start in range(5):
        read(file, bare_span(start, 1))
    about = spans._open_container.cache_info()
    assert (about.misses, about.hits, about.maxsize) == (1, 4, 64)
