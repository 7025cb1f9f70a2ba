"""Data sets in other layouts than their owner's, damaged containers: one line with what to do."""

import gzip
import operator
import shutil

import numpy as np
import pytest
from PIL import Image
from support.containers import packed

from backbench.datasets import catalog
from backbench.errors import BadInput


def gone(path):
    def damage(root):
        for file in sorted(root.glob(path)) or [root / path]:
            shutil.rmtree(file) if file.is_dir() else file.unlink()

    return damage


def written(path, content):
    """The first file that fits, with this content, or with what a function makes of its own."""

    def damage(root):
        file = min(root.glob(path))
        data = content(file.read_bytes()) if callable(content) else content
        file.write_bytes(data)

    return damage


def edited(path, old, new):
    return written(path, lambda data: data.replace(old, new, 1))


def cut(path, share=0.5):
    return written(path, lambda data: data[: int(share * len(data))])


def moved(path, name):
    return lambda root: (root / path).rename((root / path).with_name(name))


def copied(path, name):
    return lambda root: shutil.copy(root / path, (root / path).with_name(name))


def mapped(path, change):
    """Replace the first label map that fits by what `change` makes of it."""

    def damage(root):
        file = min(root.glob(path))
        change(Image.open(file)).save(file)

    return damage


def of_other_value(image):
    return Image.fromarray(np.full(image.size[::-1], 200, np.uint8))


OF_COLOURS = operator.methodcaller("convert", "RGB")
OF_OTHER_SIZE = operator.methodcaller("resize", (10, 8))
VOC = "voc2012/VOCdevkit/VOC2012"
ADE = "ade20k/ADEChallengeData2016"
REAL = "imagenet/val"
MAPPINGS = "objectnet/objectnet-1.0/mappings"
UNREADABLE = "not in the layout that torchvision reads"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        # Data set, or the layout in which `classes` is packed; the damage below ROOT; what is said
        (
            "aircraft",
            gone("aircraft/*/data/variants.txt"),
            r"variants\.txt is missing; get fgvc",
        ),
        (
            "aircraft",
            gone("aircraft/*/data/images_variant_val.txt"),
            r"images_variant_val\.txt",
        ),
        (
            "birdsnap",
            gone("birdsnap/birdsnap/species.txt"),
            r"species\.txt is missing; get birdsnap",
        ),
        (
            "birdsnap",
            gone("birdsnap/*/images/Zebra_Finch/*"),
            "no image of 1 species, 'Zebra_Finch'",
        ),
        (
            "birdsnap",
            edited("birdsnap/*/species.txt", b"\n3\t", b"\n9\t"),
            "species that is not list",
        ),
        (
            "caltech101",
            gone("caltech101/caltech101"),
            "101_ObjectCategories is missing; get",
        ),
        (
            "cars",
            gone("cars/stanford_cars/devkit/cars_meta.mat"),
            r"cars_meta\.mat is missing; get",
        ),
        ("cars", cut("cars/stanford_cars/devkit/cars_meta.mat"), UNREADABLE),
        (
            "cifar10",
            gone("cifar10/*/data_batch_3"),
            "data_batch_3: no such file; unpack",
        ),
        (
            "cifar10",
            cut("cifar10/*/data_batch_3"),
            "the checksum of data_batch_3 differs.*unpack",
        ),
        (
            "cifar10",
            edited("cifar10/*/batches.meta", b"class 1", b"class 9"),
            r"batches\.meta differs",
        ),
        (
            "cifar100",
            gone("cifar100/cifar-100-python/train"),
            "train: no such file; unpack",
        ),
        (
            "stl10",
            gone("stl10/stl10_binary/test_X.bin"),
            r"test_X\.bin is missing; get stl10",
        ),
        (
            "stl10",
            cut("stl10/stl10_binary/test_X.bin"),
            r"checksum of test_X\.bin differs.*unpack",
        ),
        ("dtd", gone("dtd/dtd/dtd/labels/val1.txt"), r"val1\.txt"),
        (
            "dtd",
            gone("dtd/dtd/dtd/images/banded/banded_test0001.jpg"),
            r"1\.jpg is missing \(1 of 6",
        ),
        (
            "dtd",
            edited("dtd/dtd/dtd/labels/val1.txt", b"banded/", b"../"),
            "outside of it",
        ),
        (
            "flowers",
            gone("flowers/flowers-102/setid.mat"),
            r"setid\.mat is missing; get",
        ),
        ("food", gone("food/food-101/meta/test.json"), r"test\.json is missing; get"),
        ("food", written("food/food-101/meta/test.json", b"{"), UNREADABLE),
        (
            "pets",
            gone("pets/oxford-iiit-pet/annotations/test.txt"),
            r"test\.txt is missing; get",
        ),
        (
            "places365",
            gone("places365/places365_val.txt"),
            r"places365_val\.txt is missing; get",
        ),
        (
            "places365",
            gone("places365/data_256_standard"),
            "no data_256_standard or .*; get train_256",
        ),
        (
            "places205",
            gone("places205/data"),
            r"images256 is missing; get imagesPlaces205_resize\.tar\.gz",
        ),
        (
            "places205",
            edited("places205/trainvalsplit_places205/val_places205.csv", b" 2", b" x"),
            "is no path and number of a class; get",
        ),
        (
            "places205",
            edited("places205/trainvalsplit_places205/val_places205.csv", b" 2", b" 1"),
            "yard/gsun_val0.jpg is of class 1, a/apartment_building/outdoor; get",
        ),
        (
            "inat18",
            edited("inat18/val2018.json", b'"category_id": 2', b'"category_id": 5'),
            "no list of images with a category each .*; get val2018",
        ),
        (
            "inat18",
            edited("inat18/train2018.json", b"train_val2018/Aves", b"../train_val2018"),
            "outside of it",
        ),
        (
            "sun397",
            gone("sun397/Partitions/Testing_01.txt"),
            r"Testing_01\.txt is missing; get",
        ),
        (
            "sun397",
            edited("sun397/Partitions/Testing_01.txt", b"/a/abbey", b"/a/x"),
            "is of no class",
        ),
        (
            "sun397",
            edited("sun397/Partitions/Testing_01.txt", b"sun", b"\x1b"),
            "control character",
        ),
        ("voc2012", gone(f"{VOC}/ImageSets/*/val.txt"), r"val\.txt"),
        (
            "voc2012",
            gone(f"{VOC}/SegmentationClass/2007_000039.png"),
            r"\.png is missing \(1 label",
        ),
        (
            "voc2012",
            mapped(f"{VOC}/SegmentationClass/*", OF_COLOURS),
            "8-bit indices, this one is RGB",
        ),
        (
            "voc2012",
            mapped(f"{VOC}/SegmentationClass/*", of_other_value),
            "label 200 is none",
        ),
        (
            "voc2012",
            mapped(f"{VOC}/SegmentationClass/*", OF_OTHER_SIZE),
            "10 x 8 pixels, its image",
        ),
        ("voc2012", cut(f"{VOC}/SegmentationClass/*", 0.3), "corrupt image"),
        (
            "voc2012aug",
            edited(
                f"voc2012aug{VOC[7:]}/*/*/trainaug.txt", b"2008_000007", b"2007_000033"
            ),
            "1 images of train are test images, JPEGImages/2007_000033.*take them out",
        ),
        (
            "ade20k",
            gone(f"{ADE}/images/validation/*1.jpg"),
            r"1\.jpg is missing \(1 of 2 images",
        ),
        (
            "ade20k",
            gone(f"{ADE}/annotations/validation"),
            "the test split is empty .*put images",
        ),
        (
            "ade20k",
            mapped(f"{ADE}/annotations/training/*", of_other_value),
            "label 200 is none",
        ),
        ("cityscapes", gone("cityscapes/gtFine/train/*"), "the train split is empty"),
        (
            "cityscapes",
            gone("cityscapes/leftImg8bit/val/*/*"),
            r"\.png is missing \(2 of 2 images",
        ),
        (
            "cityscapes",
            mapped("cityscapes/gtFine/val/*/*Ids.png", OF_COLOURS),
            "8-bit indices",
        ),
        (
            "imagenet-a",
            gone("imagenet-a/*/n01498041"),
            "1 of 200 class folders are missing, 'n0149",
        ),
        (
            "imagenet-a",
            gone("imagenet-a/*/n01498041/*"),
            "n01498041: class folder without images",
        ),
        (
            "imagenet-a",
            moved("imagenet-a/imagenet-a", "imagenet_a"),
            "200 of 200 class folders are",
        ),
        (
            "imagenet-real",
            edited("imagenet/real.json", b"1", b"2"),
            "not the published labels; get",
        ),
        (
            "imagenet-real",
            copied(
                f"{REAL}/n15075141/ILSVRC2012_val_00000001.JPEG",
                "ILSVRC2012_val_00050001.JPEG",
            ),
            "no image of val, or a second copy of one; remove it",
        ),
        (
            "objectnet",
            gone(f"{MAPPINGS}/imagenet_to_label_2012_v2"),
            "2012_v2 is missing; unpack",
        ),
        (
            "objectnet",
            written(f"{MAPPINGS}/folder_to*", b"[]"),
            "no mapping; unpack the archive again",
        ),
        (
            "objectnet",
            cut(f"{MAPPINGS}/pytorch*"),
            "not in the layout of this data set",
        ),
        (
            "objectnet",
            written(f"{MAPPINGS}/objectnet_to*", b'{"Mug": 3}'),
            "not in the layout of",
        ),
        (
            "objectnet",
            gone("objectnet/*/images/mug"),
            "class folders are missing, 'mug' first",
        ),
        ("tar", cut("classes/test.tar"), r"test\.tar: not readable .*end of data"),
        (
            "tar",
            written("classes/test.tar", gzip.compress),
            "not readable as an uncompressed tar",
        ),
        (
            "tar_of_tars",
            cut("classes/ILSVRC2012_img_test.tar"),
            r"test\.tar: .*(cut|unexpected end)",
        ),
        (
            "per_class",
            gone("classes/test/square.tar"),
            "no class folders in .*; sort the images",
        ),
        (
            "wds",
            edited("classes/own-test-0000.tar", b'{"label": ', b'{"label":['),
            "whole number",
        ),
        (
            "wds",
            cut("classes/own-test-0001.tar"),
            r"own-test-0001\.tar: .*(cut|unexpected end)",
        ),
        ("zip", cut("classes/test.zip"), r"test\.zip: not readable as a zip file"),
        (
            "zip",
            copied("classes/test.zip", "test-1.zip"),
            "'test' is there twice, .*; move one away",
        ),
        (
            "zip",
            moved("classes/train.zip", "train.tfrecord"),
            "TFRecord is not read; use",
        ),
        (
            "parquet of 2026",
            cut("classes/data/test*"),
            "test-00000.*not readable as parquet",
        ),
        (
            "parquet of 2023",
            gone("classes/data/test-00001*"),
            "is one of 2 files, and 1 are there",
        ),
        (
            "arrow",
            cut("classes/own-test.arrow"),
            r"own-test\.arrow: not readable as arrow",
        ),
        (
            "lmdb",
            cut("classes/test.lmdb/data.mdb", 0.2),
            r"data\.mdb: not readable as lmdb",
        ),
    ],
)
def test_a_damaged_layout_is_one_line(trees, name, damage, said):
    known = name in catalog.DATASETS
    root = trees(name) if known else packed(trees("classes"), "classes", name)
    damage(root)
    dense = known and catalog.DATASETS[name].dense
    dataset = name if known else "classes"
    with pytest.raises(BadInput, match=said) as error:
        for _, images in catalog.load(dataset, root, dense=dense).items():
            for index in range(len(images)):
                if dense:
                    images.pair(index)
                else:
                    images.array(index)
    assert "\n" not in str(error.value) and str(root) in str(error.value)
