"""Files of strangers: which are opened, and which are found below a folder."""

import errno
import os
from pathlib import Path

import pytest

from backbench.untrusted import opening, walking


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    return path


def test_a_file_is_read_up_to_its_limit(file):
    assert opening.read_bytes(file, most=6) == b"abcdef"
    with pytest.raises(
        OSError, match="6 bytes, more than any such file has"
    ) as refused:
        opening.read_bytes(file, most=5)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(file))
    with opening.open_regular(file) as opened:
        assert opened.read() == b"abcdef"
        assert not os.get_inheritable(opened.fileno())


def test_the_ends_of_a_file(file):
    assert opening.ends(str(file), 2) == b"abef"
    assert opening.ends(str(file), 4) == b"abcdcdef"
    assert opening.ends(str(file), 6) == b"abcdef" * 2
    assert opening.ends(str(file), 9) == b"abcdef" * 2


def test_what_is_no_file_is_refused_unopened(tmp_path, monkeypatch):
    opened = []  # a device may act when it is opened
    monkeypatch.setattr(opening.os, "open", lambda path, flags: opened.append(path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for read in (opening.open_regular, lambda path: opening.ends(str(path), 2)):
        with pytest.raises(IsADirectoryError) as refused:
            read(tmp_path)
        assert refused.value.filename == str(tmp_path)
        with pytest.raises(OSError, match="not a regular file") as refused:
            read(fifo)
        assert (refused.value.errno, refused.value.filename) == (
            errno.EINVAL,
            str(fifo),
        )
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent")
    assert opened == []


def test_what_was_exchanged_before_it_was_opened_is_refused_and_closed(
    file, tmp_path, monkeypatch
):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    looked_at = file.stat()
    monkeypatch.setattr(opening.os, "stat", lambda path: looked_at)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for read in (opening.open_regular, lambda path: opening.ends(str(path), 2)):
        with pytest.raises(OSError, match="not a regular file"):
            read(fifo)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_all_files_below_a_folder_are_found(tmp_path):
    for name in ("b/2", "b/1", "a/c/3", "a/b", "c"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "empty").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in walking.files(tmp_path)]
    assert sorted(found) == ["a/b", "a/c/3", "b/1", "b/2", "c"]
    assert list(walking.files(tmp_path / "absent")) == []


def test_links_to_folders_are_taken_once_and_only_if_asked(tmp_path):
    inside = tmp_path / "root" / "inside"
    inside.mkdir(parents=True)
    (inside / "file").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "other").touch()
    root = tmp_path / "root"
    (root / "again").symlink_to(inside)
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "inside" / "up").symlink_to(root)
    (root / "self").symlink_to("self")

    def found(**options):
        names = walking.names(root, **options)
        return sorted(os.path.relpath(name, root) for name in names)

    assert found() == ["again", "away", "inside/file", "inside/up", "self"]
    # The folder of `again` and `inside` is one, known by its first name; `up` leads back to the root
    assert found(follow=True) == ["again/file", "away/other", "self"]
