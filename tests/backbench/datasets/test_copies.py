"""`data check` finds what two splits share, whatever the files' formats are."""

import pytest
from support.pictures import picture
from support.strangers import door


@pytest.fixture
def root(tmp_path):
    """ROOT/shapes with three splits of two classes; all pictures are different JPEGs."""
    numbers = iter(range(100))
    for split, count in (("train", 8), ("val", 3), ("test", 3)):
        for label in ("a", "b"):
            folder = tmp_path / "shapes" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                picture(next(numbers), 48).save(folder / f"{i}.jpg", quality=90)
    return tmp_path


def problems(root):
    said = door("data", "check", "shapes", "--data", root)
    lines = [line for line in said.out.splitlines() if "PROBLEM" in line]
    assert said.status == (1 if lines else 0), said.err
    return lines


def test_different_pictures_are_no_copies(root):
    assert not problems(root)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp"])
@pytest.mark.parametrize("split", ["test", "val"])
def test_a_training_image_in_another_format(root, split, suffix):
    from PIL import Image

    with Image.open(root / "shapes" / "train" / "a" / "3.jpg") as image:
        image.save(root / "shapes" / split / "b" / f"copy.{suffix}")
    (line,) = problems(root)
    assert "a/3.jpg" in line and f"b/copy.{suffix}" in line
    assert f"train and {split} share 1 images" in line


def test_a_test_image_saved_as_jpeg(root):
    """The original is in test, and what was trained on lost a little."""
    one = picture(200, 48)
    one.save(root / "shapes" / "test" / "a" / "original.png")
    one.save(root / "shapes" / "train" / "b" / "again.jpg", quality=75)
    (line,) = problems(root)
    assert "in another format" in line and "again.jpg" in line and "original.png" in line
