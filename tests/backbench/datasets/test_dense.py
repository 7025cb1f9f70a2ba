"""Data sets with label maps: their layouts, the meaning of each value, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from backbench.cli import main
from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.dense import IGNORED

# Data set -> sizes of the made tree, and what the values of its first map become
KNOWN = {
    "voc2012": ((4, 1), {0, 15, IGNORED}),
    "voc2012aug": ((5, 1), {0, 20}),
    "ade20k": ((4, 2), {IGNORED, 0, 149}),
    "cityscapes": ((4, 2), {IGNORED, 0, 18}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_layouts_are_read_as_their_owners_unpack_them(trees, name, capsys):
    root = trees(name)
    found = catalog.load(name, root, dense=True)
    (train, test), values = KNOWN[name]
    assert (len(found.train) + len(found.val), len(found.test)) == (train, test)
    assert len(found.val) == 1 and found.held_out
    picture, labels = found.train.pair(0)
    assert set(np.unique(labels)) == values and labels.shape == picture.size[::-1]
    assert main(["data", "check", name, "--data", str(root)]) == 1  # of another size than published
    said = capsys.readouterr().out
    problems = [line for line in said.splitlines() if "PROBLEM" in line]
    assert len(problems) == 2 and all("images, not" in line for line in problems)
    with pytest.raises(BadInput, match="seg_linear"):
        catalog.load(name, root)


def test_every_value_of_a_map_means_what_the_owners_say(trees):
    values = {name: catalog.load(name, trees(name), dense=True).train.values for name in KNOWN}
    voc = {**{v: v for v in range(21)}, 255: IGNORED}
    assert values["voc2012"] == values["voc2012aug"] == voc
    # 0 is ignored: subtracting 1 would give 255 in uint8 alone, and turn a 255 into 254
    assert values["ade20k"] == {0: IGNORED, **{v: v - 1 for v in range(1, 151)}}
    scored = [v for v, label in values["cityscapes"].items() if label != IGNORED]
    assert sorted(values["cityscapes"]) == list(range(34)) and len(scored) == 19
    assert [values["cityscapes"][v] for v in scored] == list(range(19))


def test_check_reads_every_map(trees, capsys):
    root = trees("ade20k")
    images = catalog.load("ade20k", root, dense=True).test
    file = images.root / images.maps[0]
    Image.open(file).resize((10, 8)).save(file)
    assert main(["data", "check", "ade20k", "--data", str(root)]) == 1
    assert f"PROBLEM: test: {file}: 10 x 8 pixels" in capsys.readouterr().out


def test_other_label_maps_of_the_same_images_are_other_data(trees):
    images = catalog.load("ade20k", trees("ade20k"), dense=True).test
    before = contents.whole(images), contents.sample(images)
    file = images.root / images.maps[0]
    Image.fromarray(np.asarray(Image.open(file)) // 2).save(file)
    assert not {contents.whole(images), contents.sample(images)} & set(before)


def test_classes_of_images_are_no_label_maps(trees):
    said = r"classes: has images of classes.*voc2012, voc2012aug, ade20k"
    with pytest.raises(BadInput, match=said):
        catalog.load("classes", trees("classes"), dense=True)
