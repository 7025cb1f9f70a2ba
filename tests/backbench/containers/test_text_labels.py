"""Tables of one's own whose labels are texts: the list of the class folders of those names."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.layouts import class_folder

from backbench.containers import reading
from backbench.datasets import catalog, splits
from backbench.errors import BadInput

pytestmark = pytest.mark.usefixtures("scanned_here")

CLASSES = ("zebra", "Cat", "cat", "a dog")  # not in the order of their names


@pytest.fixture
def folder(tmp_path):
    base = tmp_path / "folder" / "mine"
    class_folder(base, classes=CLASSES, per=3)
    return base


def rows_of(folder, *, path="{name}", last_first=False):
    """Return the images of a class folder as rows of a table."""
    files = sorted(folder.glob("*/*"), reverse=last_first)
    rows = []
    for file in files:
        label = file.parent.name
        place = path.format(name=file.name, label=label)
        rows.append(({"bytes": file.read_bytes(), "path": place}, label))
    return rows


def table(rows, kind=None):
    images = pa.array([image for image, _ in rows])
    labels = pa.array([label for _, label in rows], kind or pa.string())
    return pa.table({"image": images, "label": labels})


def write(file, rows, kind=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(rows, kind), file)


def lists(base):
    """Return the classes, paths and digests of all splits."""
    found = catalog.load("mine", base.parent)
    by_split = {}
    for split, images in found.items():
        by_split[split] = (images.classes, tuple(images.paths), tuple(images.labels))
    assert found.test.read(0)
    return by_split, splits.digests(found), splits.digest(found.both())


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_texts_give_the_list_of_the_class_folders(folder, tmp_path, kind):
    base = tmp_path / "table" / "mine"
    for split in ("train", "test"):
        rows = rows_of(folder / split, last_first=True)
        write(base / f"{split}.parquet", rows, kind)
    assert lists(base) == lists(folder)


def test_arrow_files_of_texts_give_the_same_list(folder, tmp_path):
    base = tmp_path / "arrow" / "mine"
    base.mkdir(parents=True)
    for split in ("train", "test"):
        rows = table(rows_of(folder / split))
        with pa.ipc.new_stream(base / f"mine-{split}.arrow", rows.schema) as out:
            out.write_table(rows)
    assert lists(base) == lists(folder)


def test_each_file_of_a_split_may_have_other_classes_first(folder, tmp_path):
    """Labels of a file are numbered as its rows come; two files are one list."""
    base = tmp_path / "table" / "mine"
    for split in ("train", "test"):
        rows = rows_of(folder / split)
        parts = (rows[4:], rows[:4][::-1])
        for number, part in enumerate(parts):
            write(base / "data" / f"{split}-0000{number}-of-00002.parquet", part)
    assert lists(base) == lists(folder)


def test_all_splits_in_one_table(folder, tmp_path):
    rows = []
    for split in ("train", "test"):
        rows += rows_of(folder / split, path=f"{split}/{{label}}/{{name}}")
    write(tmp_path / "one" / "mine.parquet", rows)
    assert lists(tmp_path / "one" / "mine") == lists(folder)


def test_a_class_folder_beside_a_table(folder, tmp_path):
    expected = lists(folder)
    write(folder / "test.parquet", rows_of(folder / "test"))
    (folder / "test").rename(tmp_path / "elsewhere")
    assert lists(folder) == expected


def test_train_and_test_have_one_class_list(folder, tmp_path):
    """As with folders, a class that one of them lacks is refused."""
    base = tmp_path / "table" / "mine"
    write(base / "train.parquet", rows_of(folder / "train"))
    rows = [row for row in rows_of(folder / "test") if row[1] != "zebra"]
    write(base / "test.parquet", rows)
    with pytest.raises(BadInput, match=r"only in train: zebra\); give both the same"):
        lists(base)


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_an_empty_text_is_no_label(folder, tmp_path, nothing):
    base = tmp_path / "table" / "mine"
    image, _ = rows_of(folder / "train")[0]
    rows = rows_of(folder / "train")[1:]
    write(base / "train.parquet", [(image, nothing), *rows])
    found = reading.read_split(base, "train")
    assert found.classes == tuple(sorted(CLASSES))
    assert list(found.labels).count(-1) == 1
    # As of a number that is null
    names = sorted(CLASSES)
    numbered = [(each, names.index(label)) for each, label in rows]
    write(
        tmp_path / "numbers" / "train.parquet", [(image, None), *numbered], pa.int64()
    )
    plain = reading.read_split(tmp_path / "numbers", "train")
    assert [list(found.labels).index(-1)] == [list(plain.labels).index(-1)]
    write(base / "test.parquet", rows_of(folder / "test"))
    with pytest.raises(BadInput, match=r"has label -1; the class list allows 0\.\.3"):
        lists(base)


def test_texts_that_are_all_empty_state_no_classes(folder, tmp_path):
    base = tmp_path / "table" / "mine"
    for split in ("train", "test"):
        images = [image for image, _ in rows_of(folder / split, path="{label}{name}")]
        write(base / f"{split}.parquet", [(image, "") for image in images])
    with pytest.raises(BadInput, match=r"states no classes .* numbers or names"):
        lists(base)
    # The folders in the images' paths are their classes then, as without the column
    for split in ("train", "test"):
        images = [image for image, _ in rows_of(folder / split, path="{label}/{name}")]
        write(base / f"{split}.parquet", [(image, None) for image in images])
    assert lists(base) == lists(folder)


def test_a_text_that_contradicts_its_folder_is_refused(folder, tmp_path):
    rows = rows_of(folder / "train", path="{label}/{name}")
    write(tmp_path / "train.parquet", rows)
    found = reading.read_split(tmp_path, "train")
    expected = reading.read_split(folder, "train")
    assert splits.digest(found) == splits.digest(expected)
    image, _ = rows[0]
    write(tmp_path / "train.parquet", [(image, "zebra"), *rows[1:]])
    said = r"train\.parquet: Cat/000\.jpg has the label 'zebra' and lies in 'Cat'"
    with pytest.raises(BadInput, match=said):
        reading.read_split(tmp_path, "train")


def test_numbers_come_before_texts_and_are_not_mixed_with_them(folder, tmp_path):
    rows = rows_of(folder / "train")
    numbers = pa.array([sorted(CLASSES).index(label) for _, label in rows])
    both = table(rows).append_column("cls", numbers)
    file = tmp_path / "train-00000-of-00002.parquet"
    write(tmp_path / "train-00001-of-00002.parquet", rows)
    pq.write_table(both, file)
    with pytest.raises(BadInput, match=r"its classes are not those of train-00000-of"):
        reading.read_split(tmp_path, "train")


def test_files_that_count_unlike_classes_are_refused(folder, tmp_path):
    """The first file's names were given to all numbers."""
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        features = {"label": {"_type": "ClassLabel", "names": names}}
        text = json.dumps({"info": {"features": features}})
        rows = [(image, 0) for image, _ in rows_of(folder / "train")[:2]]
        file = tmp_path / f"train-0000{number}-of-00002.parquet"
        made = table(rows, pa.int64())
        pq.write_table(made.replace_schema_metadata({"huggingface": text}), file)
    with pytest.raises(BadInput, match=r"00001-of-00002\.parquet: its classes are not"):
        reading.read_split(tmp_path, "train")


@pytest.mark.parametrize("known", [True, False])
def test_imagenets_classes_are_synsets(tmp_path, known):
    """A text that is a synset is the class; another text is not asked, the name is."""
    synsets = ("n01440764", "n01443537")
    texts = synsets if known else ("tench", "goldfish")
    rows = []
    for label in (1, 0):
        name = "x.JPEG" if known else f"{synsets[label]}_7.JPEG"
        rows.append(({"bytes": bytes([label]), "path": name}, texts[label]))
    write(Path(tmp_path, "train.parquet"), rows)
    found = reading.read_split(tmp_path, "train", classes=synsets, every=synsets)
    assert found.classes == synsets
    assert [found.read(row) for row in range(2)] == [b"\0", b"\1"]
