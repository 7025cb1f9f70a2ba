"""Tar and zip files, member by member: names, labels, links, and what is passed over."""

import io
import json
import stat
import tarfile
import zipfile
import zlib

import pytest
from support.containers import add

from backbench.containers import scan_tar_zip
from backbench.errors import BadInput


def tarred(file, members):
    """Write a tar file. `members` are (name, bytes), or headers of tarfile's."""
    with tarfile.open(file, "w") as out:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                out.addfile(member)
            else:
                add(out, *member)
    return file


def special(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


def scanned(file):
    """name -> (label, bytes) of each image, and the notes."""
    (table,) = scan_tar_zip.scan_tars([file])
    content = file.read_bytes()
    found = {}
    for name, label, span in zip(
        table.names, table.labels.tolist(), table.spans.tolist()
    ):
        _, start, stored, codec, inner, size, block = span
        assert (stored, codec, inner, block) == (size, 0, 0, size)
        found[name] = label, content[start : start + size]
    return found, table.notes


def test_a_sample_has_the_label_of_its_key_in_its_folder(tmp_path):
    members = [
        ("./a/1.jpg", b"one"),
        ("a/1.cls", b"7"),
        ("a/2.json", json.dumps({"label": 3, "cls": 9}).encode()),
        ("a/2.seg.png", b"second"),  # a key ends at the first dot
        ("b/1.jpg", b"third"),  # of another folder
        ("b/4.json", json.dumps({"cls": 999_999}).encode()),
        ("b/4.jpg", b"4"),
        ("b/5.json", b"{}"),
        ("b/5.jpg", b"fifth"),
        ("b/5.cls", b"1"),  # the first of two counts
        ("6.cls", b"-1"),
        ("6.jpg", b"6"),
        ("8.cls", b"0"),
        ("8.jpg", b"8"),
        (".cls", b"5"),
    ]
    found, notes = scanned(tarred(tmp_path / "x.tar", members))
    assert found == {
        "a/1.jpg": (7, b"one"),
        "a/2.seg.png": (3, b"second"),
        "b/1.jpg": (-1, b"third"),
        "b/4.jpg": (999_999, b"4"),
        "b/5.jpg": (-1, b"fifth"),
        "6.jpg": (-1, b"6"),
        "8.jpg": (0, b"8"),
    }
    assert notes == ("1 hidden members passed over",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cls", b"1000000"),
        ("cls", b"-2"),
        ("cls", b"true"),
        ("cls", b"1.0"),
        ("cls", b"cat"),
        ("json", b"[1]"),
        ("json", b'{"label": "1"}'),
        ("json", b"{"),
    ],
)
def test_a_label_is_a_whole_number(tmp_path, name, text):
    file = tarred(tmp_path / "x.tar", [("a/1.jpg", b"one"), (f"a/1.{name}", text)])
    with pytest.raises(BadInput) as refused:
        scanned(file)
    said = f"{file}: the label in a/1.{name} is not a whole number below 1000000"
    assert str(refused.value) == said


def test_what_is_passed_over_is_counted_by_kind(tmp_path):
    members = [
        ("a/1.txt", b"x"),
        ("a/._1.jpg", b"x"),
        ("a/1.jpg", b"one"),
        special("a/pipe", tarfile.FIFOTYPE),
        special("a/dir", tarfile.DIRTYPE),
        ("@eaDir/1.jpg", b"x"),
        special("a/device", tarfile.CHRTYPE),
        ("b/readme", b"x"),
        (".hidden/2.jpg", b"x"),
    ]
    found, notes = scanned(tarred(tmp_path / "x.tar", members))
    assert found == {"a/1.jpg": (-1, b"one")}
    assert notes == (
        "3 hidden members passed over",
        "2 other members passed over",
        "2 sparse files or devices passed over",
    )


def test_an_image_must_be_a_file_with_its_bytes_in_place(tmp_path):
    file = tarred(tmp_path / "x.tar", [special("a/1.jpg", tarfile.CHRTYPE)])
    with pytest.raises(BadInput) as refused:
        scanned(file)
    assert str(refused.value) == (
        f"{file}: a/1.jpg is a sparse file or a device, whose bytes cannot be read in place; pack"
        " it without --sparse"
    )


def test_tars_in_a_tar_are_folders(tmp_path):
    def inner(*members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as out:
            for member in members:
                add(out, *member)
        return buffer.getvalue()

    deeper = inner(("4.jpg", b"4"))
    members = [
        (
            "first/x/n01.tar",
            inner(("1.jpg", b"one"), ("1.cls", b"5"), ("n01/2.jpg", b"2")),
        ),
        ("0.jpg", b"zero"),
        ("n02.tar", inner(("3.jpg", b"three"), ("deep.tar", deeper), ("note", b"x"))),
        ("note", b"x"),
    ]
    found, notes = scanned(tarred(tmp_path / "x.tar", members))
    assert found == {
        "n01/1.jpg": (5, b"one"),
        "n01/2.jpg": (-1, b"2"),
        "n02/3.jpg": (-1, b"three"),
        "0.jpg": (-1, b"zero"),
    }
    assert notes == ("3 other members passed over",)


def chain(links):
    """An image behind so many links, one behind the other."""
    names = [f"a/{n}.jpg" for n in range(links)]
    targets = [*names[1:], "a/image.jpg"]
    out = []
    for name, target in zip(names, targets):
        out.append(special(name, tarfile.LNKTYPE, target))
    return [("a/image.jpg", b"one"), ("a/image.cls", b"3"), *out]


def test_links_lead_to_images_also_one_behind_the_other(tmp_path):
    found, _ = scanned(tarred(tmp_path / "x.tar", chain(11)))
    assert found["a/image.jpg"] == (3, b"one")
    assert [found[f"a/{n}.jpg"] for n in range(11)] == [(-1, b"one")] * 11
    with pytest.raises(BadInput, match=r"a/0\.jpg is a link to a/11\.jpg, which is no"):
        scanned(tarred(tmp_path / "x.tar", chain(12)))


def test_a_link_goes_from_its_own_folder(tmp_path):
    members = [
        ("a/1.jpg", b"one"),
        special("b/2.jpg", tarfile.SYMTYPE, "../a/1.jpg"),
        special("b/3.jpg", tarfile.LNKTYPE, "./a/1.jpg"),
        ("a/note", b"x"),
        special(
            "b/note", tarfile.SYMTYPE, "../a/note"
        ),  # not of an image: nothing is lost
    ]
    found, _ = scanned(tarred(tmp_path / "x.tar", members))
    assert list(found) == ["a/1.jpg", "b/2.jpg", "b/3.jpg"]
    assert {content for _, content in found.values()} == {b"one"}
    for name, target in (
        ("b/2.jpg", "1.jpg"),
        ("b/2.jpg", "../a/note"),
        ("b/folder", "../a"),
        ("b/2.jpg", "../../1.jpg"),
    ):
        link = special(name, tarfile.SYMTYPE, target)
        file = tarred(tmp_path / "y.tar", [*members[:1], members[3], link])
        with pytest.raises(
            BadInput, match=f"y.tar: {name} is a link to .*, which is no image"
        ):
            scanned(file)


def test_a_tar_of_each_file_is_scanned(tmp_path):
    files = [tarred(tmp_path / f"{n}.tar", [(f"{n}.jpg", b"x")]) for n in range(3)]
    tables = list(scan_tar_zip.scan_tars(files))
    assert [table.names for table in tables] == [["0.jpg"], ["1.jpg"], ["2.jpg"]]
    (tmp_path / "1.tar").write_bytes(b"nothing of the kind")
    with pytest.raises(BadInput, match=r"1\.tar: not readable as an uncompressed tar"):
        list(scan_tar_zip.scan_tars(files))


def zip_table(file):
    (table,) = scan_tar_zip.scan_zips([file])
    return table


def test_a_zips_images_stored_and_deflated(tmp_path):
    file = tmp_path / "x.zip"
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("b/", "")
        out.writestr("./b/2.jpg", b"stored")
        out.writestr("a/note.txt", b"x")
        out.writestr("ü/1.jpg", bytes(900), zipfile.ZIP_DEFLATED)
        out.writestr("__MACOSX/._1.jpg", b"x")
        out.writestr("a/readme", b"x")
        out.writestr("c.png", b"last")
    table = zip_table(file)
    assert table.names == ["b/2.jpg", "ü/1.jpg", "c.png"]
    assert table.labels.tolist() == [-1] * 3
    assert table.notes == (
        "1 hidden members passed over",
        "2 other members passed over",
    )
    stored, deflated, last = (span[1:] for span in table.spans.tolist())
    content = file.read_bytes()
    for span, data in ((stored, b"stored"), (last, b"last")):
        start, size = span[:2]
        assert content[start : start + size] == data
        assert span == (start, len(data), 0, 0, len(data), len(data))
    start, packed, codec, inner, size, block = deflated
    assert (codec, inner, size, block) == (1, 0, 900, 900)
    assert zlib.decompress(content[start : start + packed], -15) == bytes(900)


CENTRAL, LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def claiming(file, size, stored=b"x" * 40, method=zipfile.ZIP_STORED):
    """Write a zip file whose directory claims an image of so many bytes."""
    with zipfile.ZipFile(file, "w", method) as out:
        out.writestr("a/1.jpg", stored)
    data = bytearray(file.read_bytes())
    at = data.index(CENTRAL) + 24
    data[at : at + 4] = size.to_bytes(4, "little")
    file.write_bytes(bytes(data))
    return file


def test_a_zip_claims_at_most_a_thousand_times_what_it_stores(tmp_path):
    file = claiming(tmp_path / "x.zip", 40_000)
    with pytest.raises(BadInput, match=r"a/1\.jpg is stored in 40 bytes, not 40000"):
        zip_table(file)
    file = claiming(tmp_path / "x.zip", 40_001)
    with pytest.raises(BadInput, match=r"a/1\.jpg claims 40001 bytes"):
        zip_table(file)
    # Of no bytes, as many as of one
    with pytest.raises(BadInput, match="is stored in 0 bytes, not 1000"):
        zip_table(claiming(tmp_path / "x.zip", 1000, b""))
    with pytest.raises(BadInput, match="claims 1001 bytes"):
        zip_table(claiming(tmp_path / "x.zip", 1001, b""))


def test_a_link_in_a_zip_is_refused_with_its_name(tmp_path):
    link = zipfile.ZipInfo("a/1.jpg")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as out:
        out.writestr("a/0.jpg", b"x")
        out.writestr(link, "0.jpg")
    with pytest.raises(BadInput, match=r"a/1\.jpg is a link; pack the file itself"):
        zip_table(tmp_path / "x.zip")


def test_members_one_behind_the_other_do_not_overlap(tmp_path):
    """Sorted by where they lie, which is not the directory's order."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as out:
        for n in range(4):
            out.writestr(f"{n}.jpg", b"x" * (n + 1))
        out.filelist.reverse()
    assert zip_table(tmp_path / "x.zip").names == ["3.jpg", "2.jpg", "1.jpg", "0.jpg"]
