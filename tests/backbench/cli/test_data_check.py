"""`data check` on folders of one's own: what it counts, what it calls a problem, and its list."""

import hashlib
import io
import urllib.error

import numpy as np
import pytest
from PIL import Image

from backbench.cli import data, program


@pytest.fixture
def mine(tmp_path):
    """A folder of two classes: eight pictures to train on, two for val and four for test."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 1), ("test", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "mine" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "mine"


def check(mine, capsys, *more):
    status = program.main(
        ["data", "check", "mine", "--data", str(mine.parent), *map(str, more)]
    )
    out = capsys.readouterr().out.splitlines()
    problems = [line.partition("PROBLEM: ")[2] for line in out if "PROBLEM: " in line]
    return status, problems, out


def test_a_sound_folder_is_all_right(mine, capsys):
    status, problems, out = check(mine, capsys)
    assert (status, problems) == (0, [])
    assert out[-1] == "mine: all right"
    assert any(
        line.startswith("mine train: 8 images, sha256 of the list ") for line in out
    )
    assert any(line.startswith("mine test: 4 images") for line in out)


@pytest.mark.parametrize(("count", "more"), [(5, 0), (7, 2)])
def test_five_pictures_that_cannot_be_read_are_named(mine, capsys, count, more):
    for number in range(count):
        (mine / "train" / "cat" / f"bad{number}.png").write_bytes(b"no picture")
    status, problems, out = check(mine, capsys)
    assert status == 1
    named = [line for line in problems if line.startswith("train: unreadable ")]
    assert len(named) == 5 and all("bad" in line for line in named)
    rest = [line for line in problems if "more unreadable" in line]
    assert rest == ([f"train: {more} more unreadable images"] if more else [])
    assert out[-1] == f"mine: {len(problems)} problems"


def copy(mine, source, target, **options):
    Image.open(mine / source).save(mine / target, **options)


def test_copies_are_told_the_worst_first(mine, capsys, tmp_path):
    # The same pixels in other bytes
    copy(mine, "train/cat/0.png", "test/cat/9.png", compress_level=0)
    copy(mine, "train/dog/1.png", "val/dog/9.png", compress_level=0)
    copy(mine, "train/cat/2.png", "train/cat/9.png", compress_level=0)
    status, problems, _ = check(mine, capsys, "--copies", tmp_path / "copies.tsv")
    assert status == 1
    assert [line for line in problems if "copies of other" in line] == [
        "train holds 1 copies of other images of it"
    ]
    shared = [line for line in problems if " share " in line]
    assert [line.partition(":")[0] for line in shared] == [
        "train and test share 1 images",
        "train and val share 1 images",
    ]
    assert "cat/0.png is cat/9.png" in shared[0]
    lines = (tmp_path / "copies.tsv").read_text().splitlines()
    assert lines == ["cat/9.png\tcopy\tcat/0.png"]


def test_a_list_of_no_copies_is_not_written(mine, capsys, tmp_path):
    file = tmp_path / "copies.tsv"
    status, _, out = check(mine, capsys, "--copies", file)
    assert status == 0 and not file.exists()
    assert (
        f"{file}: not written, no test image is a copy of a labelled one"
        in "\n".join(out)
    )


def test_files_that_no_evaluation_looks_at_are_counted(mine, capsys):
    for name in ("a.txt", "b.TXT", "c.xml", "readme"):
        (mine / "train" / "cat" / name).touch()
    _, problems, out = check(mine, capsys)
    said = [line for line in [*out, *problems] if "files are ignored" in line]
    assert any(
        "train: 4 files are ignored (2 .txt, 1 .xml, 1 without a suffix), " in line
        for line in said
    )


# SimCLR's lists


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """lists(answers): fetch two lists; the first is b"one", and answers says what the net gives."""
    parts = {}
    for percent, content in (("1", b"one\n"), ("10", b"ten\n")):
        digest = hashlib.sha256(content).hexdigest()
        parts[percent] = {"list": {"sha256": digest, "lines": 1}}
    monkeypatch.setattr(data.config, "read_recipe", lambda *_: {"parts": parts})
    asked = []

    def fetch(answers):
        def urlopen(url, timeout):
            asked.append(url)
            answer = answers[url.rpartition("/")[2]]
            if answer is None:
                raise urllib.error.URLError("no net")
            return io.BytesIO(answer)

        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        status = program.main(
            ["data", "fetch-splits", "--out", str(tmp_path / "lists")]
        )
        return status, asked

    return fetch


def test_lists_are_fetched_once(lists, tmp_path, capsys):
    right = {"1percent.txt": b"one\n", "10percent.txt": b"ten\n"}
    status, asked = lists(right)
    assert status == 0
    assert len(asked) == 2 and all("google-research/simclr" in url for url in asked)
    assert (tmp_path / "lists" / "1percent.txt").read_bytes() == b"one\n"
    assert (tmp_path / "lists" / "10percent.txt").read_bytes() == b"ten\n"
    assert lists({})[0] == 0
    assert len(asked) == 2
    assert capsys.readouterr().out.count("there already, 1 lines") == 2
    # One that was changed is fetched again
    (tmp_path / "lists" / "1percent.txt").write_bytes(b"other")
    assert lists(right)[0] == 0
    assert (tmp_path / "lists" / "1percent.txt").read_bytes() == b"one\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"another\n", "not the published list (sha256 differs); nothing was written"),
        (None, "cannot be fetched (<urlopen error no net>); copy the file to"),
    ],
)
def test_a_list_that_is_not_the_published_one_is_not_written(
    lists, tmp_path, capsys, answer, says
):
    status, _ = lists({"1percent.txt": answer})
    assert status == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "lists" / "1percent.txt").exists()
