"""Tiny trees in each dataset's true layout on disk, annotation files included, and tiny trunks."""

import functools
import hashlib
import importlib.resources
import io
import json
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import scipy.io
import torch
from PIL import Image

from backbench.datasets.readers import VOC07_CLASSES, class_list
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint


def picture(path, seed, *, size=(20, 16), mode="RGB"):
    """Write a small random picture; equal seeds give equal pixels."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.write_bytes(_encoded(path.suffix.lower(), seed, size, mode))


@functools.lru_cache(
    maxsize=4096
)  # every test's tree has the pictures of another one's
def _encoded(suffix, seed, size, mode):
    width, height = size
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    draw = np.random.Generator(np.random.PCG64(seed))
    pixels = draw.integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    kind = Image.registered_extensions()[suffix]
    Image.fromarray(pixels, mode=mode).save(file, kind)
    return file.getvalue()


def class_folder(base, *, classes=("cat", "dog"), per=4):
    """Write BASE/{train,test}/<class>/<number>.jpg: `per` pictures of each class and split."""
    seed = 0
    for split in ("train", "test"):
        for name in classes:
            for number in range(per):
                seed += 1
                picture(base / split / name / f"{number:03d}.jpg", seed)


class Trees:
    """`trees(name)` makes ROOT/<name> as its owner's archives unpack, `per` images each."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.monkeypatch = monkeypatch
        self.count = 0  # of pictures so far, which makes each another one
        self._encoded = []  # what `_jpeg` begins with
        self._few = []  # pictures that `_link` gives again and again

    def __call__(self, name, **options):
        base = self.root / name
        base.mkdir(parents=True, exist_ok=True)
        getattr(self, name.replace("-", "_").replace(".", "_"))(base, **options)
        return self.root

    def _picture(self, path, **options):
        self.count += 1
        picture(path, self.count, **options)

    def _link(self, path):
        """Give the path one of five pictures. Links take a quarter of the time of files, which counts
        where there are thousands."""
        self.count += 1
        if len(self._few) < 5:
            self._picture(path)
            self._few.append(path)
        else:
            os.link(self._few[self.count % 5], path)

    def _lines(self, path, lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))

    def _md5(self, path):
        return hashlib.md5(path.read_bytes()).hexdigest()

    def aircraft(self, base):
        data = base / "fgvc-aircraft-2013b" / "data"
        classes = ("707-320", "A330 200", "An-12")
        self._lines(data / "variants.txt", classes)
        for split in ("train", "val", "test"):
            lines = []
            for name in 2 * classes:
                self._picture(data / "images" / f"{self.count:07d}.jpg")
                lines.append(f"{self.count - 1:07d} {name}")
            self._lines(data / f"images_variant_{split}.txt", sorted(lines))

    def birdsnap(self, base):
        """Write 11 of the 13 listed images of each species."""
        folder = base / "birdsnap"
        species = ("Acadian_Flycatcher", "Zebra_Finch", "Abert's_Towhee")
        rows = ["id\tcommon\tscientific\tdir"]
        images = ["url\tmd5\tpath\tspecies_id\tbb_x1"]
        for i, name in enumerate(species, 1):
            rows.append(f"{i}\t{name.replace('_', ' ')}\tAvis {i}\t{name}")
            for j in range(13):
                path = f"{name}/{i}{j:04d}.jpg"
                images.append(f"http://example.org/{path}\t{'0' * 32}\t{path}\t{i}\t3")
                if j >= 2:
                    self._picture(folder / "images" / path)
        self._lines(folder / "species.txt", rows)
        self._lines(folder / "images.txt", images)
        self._lines(folder / "test_images.txt", ["path"])

    def caltech101(
        self, base, classes=("BACKGROUND_Google", "Faces", "accordion"), per=32
    ):
        folder = base / "caltech101" / "101_ObjectCategories"
        for name in classes:
            for i in range(per):
                mode = "L" if i % 8 == 0 else "RGB"  # the real set has gray images
                self._picture(folder / name / f"image_{i + 1:04d}.jpg", mode=mode)

    def cars(self, base):
        classes = ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
        folder = base / "stanford_cars"
        (folder / "devkit").mkdir(parents=True)
        names = {"class_names": np.array(classes, dtype=object)}
        scipy.io.savemat(folder / "devkit" / "cars_meta.mat", names)
        annotations = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat")
        for split, file in zip(("train", "test"), annotations):
            kinds = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
            rows = np.empty((3 * len(classes),), dtype=kinds)
            for i in range(len(rows)):
                rows[i] = (1, i % len(classes) + 1, f"{i + 1:05d}.jpg")
                self._picture(folder / f"cars_{split}" / f"{i + 1:05d}.jpg")
            scipy.io.savemat(folder / file, {"annotations": rows})

    def cifar10(self, base, per=6):
        self._cifar(
            base / "cifar-10-batches-py",
            "CIFAR10",
            key="labels",
            names="label_names",
            meta="batches.meta",
            classes=10,
            count=per,
        )

    def cifar100(self, base, per=6):
        self._cifar(
            base / "cifar-100-python",
            "CIFAR100",
            key="fine_labels",
            names="fine_label_names",
            meta="meta",
            classes=100,
            count=max(per, 200),
        )

    def _cifar(self, folder, kind, *, key, names, meta, classes, count):
        """Write batches of `count` images, and tell torchvision's class their checksums."""
        from torchvision import datasets as tv

        folder.mkdir(parents=True)
        cls = getattr(tv, kind)
        draw = np.random.Generator(np.random.PCG64(len(kind)))
        lists = {}
        for which in ("train_list", "test_list"):
            entries = []
            for file, _ in getattr(cls, which):
                labels = [i % classes for i in range(count)]
                data = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
                (folder / file).write_bytes(pickle.dumps({"data": data, key: labels}))
                entries.append([file, self._md5(folder / file)])
            lists[which] = entries
        class_names = [f"class {i}" for i in range(classes)]
        (folder / meta).write_bytes(pickle.dumps({names: class_names}))
        for which, entries in lists.items():
            self.monkeypatch.setattr(cls, which, entries)
        about = {**cls.meta, "md5": self._md5(folder / meta)}
        self.monkeypatch.setattr(cls, "meta", about)

    def stl10(self, base, per=20):
        from torchvision.datasets import STL10

        folder = base / "stl10_binary"
        folder.mkdir()
        draw = np.random.Generator(np.random.PCG64(10))
        (folder / "class_names.txt").write_text(
            "".join(f"class {i}\n" for i in range(10))
        )
        (folder / "unlabeled_X.bin").write_bytes(b"")
        for split in ("train", "test"):
            images = draw.integers(0, 256, (per, 3, 96, 96), dtype=np.uint8)
            images.tofile(folder / f"{split}_X.bin")
            labels = np.arange(per, dtype=np.uint8) % 10 + 1
            labels.tofile(folder / f"{split}_y.bin")
        for which in ("train_list", "test_list"):
            entries = [
                [file, self._md5(folder / file)] for file, _ in getattr(STL10, which)
            ]
            self.monkeypatch.setattr(STL10, which, entries)

    def dtd(self, base):
        folder = base / "dtd" / "dtd"
        for split in ("train", "val", "test"):
            lines = []
            for name in ("banded", "blotchy", "braided"):
                for i in range(2):
                    lines.append(f"{name}/{name}_{split}{i:04d}.jpg")
                    self._picture(folder / "images" / lines[-1])
            self._lines(folder / "labels" / f"{split}1.txt", lines)

    def flowers(self, base, per=2):
        from torchvision.datasets import Flowers102

        folder = base / "flowers-102"
        folder.mkdir()
        labels = [label for _ in range(3 * per) for label in (1, 2, 102)]
        ids = np.arange(1, len(labels) + 1)
        for i in ids:
            self._picture(folder / "jpg" / f"image_{i:05d}.jpg")
        third = len(labels) // 3
        scipy.io.savemat(folder / "imagelabels.mat", {"labels": np.array([labels])})
        parts = {
            "trnid": ids[:third],
            "valid": ids[third : 2 * third],
            "tstid": ids[2 * third :],
        }
        scipy.io.savemat(folder / "setid.mat", {k: v[None] for k, v in parts.items()})
        files = dict(Flowers102._file_dict)
        for key, name in (("label", "imagelabels.mat"), ("setid", "setid.mat")):
            files[key] = (name, self._md5(folder / name))
        self.monkeypatch.setattr(Flowers102, "_file_dict", files)

    def food(self, base):
        folder = base / "food-101"
        for split in ("train", "test"):
            listed = {}
            for name in ("apple_pie", "waffles"):
                listed[name] = [f"{name}/{split}{i}" for i in range(3)]
                for path in listed[name]:
                    self._picture(folder / "images" / f"{path}.jpg")
            self._lines(folder / "meta" / f"{split}.json", [json.dumps(listed)])

    def pets(self, base):
        folder = base / "oxford-iiit-pet"
        (folder / "annotations" / "trimaps").mkdir(parents=True)
        for split, first in (("trainval", 1), ("test", 4)):
            lines = []
            for label, name in enumerate(("Abyssinian", "american_bulldog"), 1):
                for i in range(first, first + 3):
                    self._picture(folder / "images" / f"{name}_{i}.jpg")
                    lines.append(f"{name}_{i} {label} {1 + name[0].islower()} 1")
            self._lines(folder / "annotations" / f"{split}.txt", lines)

    def places365(self, base):
        from torchvision.datasets import Places365

        categories = []
        train = []
        val = []
        for i, name in enumerate(("/a/airfield", "/a/alley", "/z/zen_garden")):
            categories.append(f"{name} {i}")
            for j in range(3):
                path = f"{name}/{j + 1:08d}.jpg"
                train.append(f"{path} {i}")
                self._picture(base / "data_256_standard" / path.lstrip("/"))
                file = f"Places365_val_{len(val) + 1:08d}.jpg"
                val.append(f"{file} {i}")
                self._picture(base / "val_256" / file)

        def listed(name, lines):
            self._lines(base / name, lines)
            return name, self._md5(base / name)

        files = {
            **Places365._FILE_LIST_META,
            "train-standard": listed("places365_train_standard.txt", train),
            "val": listed("places365_val.txt", val),
        }
        classes = listed("categories_places365.txt", categories)
        self.monkeypatch.setattr(Places365, "_FILE_LIST_META", files)
        self.monkeypatch.setattr(Places365, "_CATEGORIES_META", classes)

    def places205(self, base, folder="data/vision/torralba/deeplearning/images256"):
        for split, count in (("train", 3), ("val", 2)):
            lines = []
            for i, name in enumerate(
                ("a/abbey", "a/apartment_building/outdoor", "y/yard")
            ):
                for j in range(count):
                    path = f"{name}/gsun_{split}{j}.jpg"
                    lines.append(f"{path} {i}")
                    self._picture(base / folder / path)
            file = base / "trainvalsplit_places205" / f"{split}_places205.csv"
            self._lines(file, lines)

    def inat18(self, base):
        for split, count in (("train", 3), ("val", 2)):
            images = []
            annotations = []
            # Numbers do not follow the alphabet, and images not their classes
            for j in range(count):
                for name, number in (("Aves", 10), ("Plantae", 2), ("Aves", 0)):
                    path = f"train_val2018/{name}/{number}/{split}{j}.jpg"
                    images.append({"id": len(images) + 7, "file_name": path})
                    about = {"id": len(images), "image_id": images[-1]["id"]}
                    annotations.insert(0, {**about, "category_id": number})
                    self._picture(base / path)
            categories = [{"id": number, "name": "x"} for number in (0, 2, 10)]
            about = {"images": images, "annotations": annotations}
            text = json.dumps({**about, "categories": categories})
            (base / f"{split}2018.json").write_text(text)

    def sun397(self, base):
        classes = ("/a/abbey", "/a/apse/indoor", "/z/zoo")
        self._lines(base / "SUN397" / "ClassName.txt", classes)
        for file in ("Training_01.txt", "Testing_01.txt"):
            lines = []
            for name in classes:
                for i in range(3):
                    lines.append(f"{name}/sun_{file[:4].lower()}{i}.jpg")
                    self._picture(base / "SUN397" / lines[-1][1:])
            self._lines(base / "Partitions" / file, lines)

    def imagenet(self, base, classes=None, per=2):
        for name in classes or class_list("imagenet"):
            for split, count in (("train", per), ("val", 1)):
                for i in range(count):
                    path = base / split / name / f"{name}_{split}_{i}.JPEG"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._jpeg())

    def imagenet_v2_matched(self, base):
        for number in range(1000):
            folder = base / "imagenetv2-matched-frequency-format-val" / str(number)
            folder.mkdir(parents=True)
            for i in range(10):
                self._link(folder / f"{number * 10 + i:040x}.jpeg")

    def imagenet_a(self, base, name="imagenet_a", folder="imagenet-a", per=1, add=None):
        add = add or self._picture
        for label, synset in enumerate(class_list(name)):
            (base / folder / synset).mkdir(parents=True)
            for i in range(per):
                add(base / folder / synset / f"0.{label}_{i}.jpg")
        for beside in ("README.txt", ".DS_Store"):
            (base / folder / beside).write_text("no picture")

    def imagenet_r(self, base):
        self.imagenet_a(base, "imagenet_r", "imagenet-r")

    def imagenet_sketch(self, base):
        self.imagenet_a(base, "imagenet", "sketch", add=self._link)

    def imagenet_real(self, base, numbers=(1, 2, 3, 293, 50000)):
        """Write val's files of these numbers, in its last class folders, and the real labels."""
        labels = (
            importlib.resources.files("timm.data")
            / "_info"
            / "imagenet_real_labels.json"
        )
        val = base.parent / "imagenet" / "val"
        for number, synset in zip(numbers, reversed(class_list("imagenet"))):
            self._picture(val / synset / f"ILSVRC2012_val_{number:08d}.JPEG")
        (val.parent / "real.json").write_text(labels.read_text())

    def objectnet(self, base, lines=None):
        """Write four classes, which have one name, two names or none of ImageNet's.

        Line l of ImageNet's list of names is class l - 7."""
        base = base / "objectnet-1.0"
        labels = {
            "mug": "Mug",
            "alarm_clock": "Alarm clock",
            "air": "Air",
            "bib": "Bib",
        }
        names = {
            "Mug": "coffee mug",
            "Alarm clock": "analog clock; digital clock",
            "Bib": "bib",
        }
        order = [f"name {i}" for i in range(1000)]
        places = {
            504: "coffee mug",
            409: "analog clock",
            530: "digital clock",
            443: "bib",
        }
        for place, name in places.items():
            order[place + 7] = name
        for name in labels:
            for i in range(2):
                self._picture(base / "images" / name / f"{i}{name}.png", size=(30, 24))
        self._lines(base / "mappings" / "imagenet_to_label_2012_v2", order)
        mappings = {
            "folder_to_objectnet_label": labels,
            "objectnet_to_imagenet_1k": names,
            "pytorch_to_imagenet_2012_id": {
                str(i): (i + 7) % 1000 for i in range(1000)
            },
        }
        for name, content in mappings.items():
            (base / "mappings" / f"{name}.json").write_text(json.dumps(content))

    def _jpeg(self):
        """Return other bytes each time of a few pictures that are encoded once: a number follows
        their end."""
        self.count += 1
        if not self._encoded:
            for red in range(0, 250, 50):
                buffer = io.BytesIO()
                Image.new("RGB", (8, 8), (red, 120, 200)).save(buffer, "JPEG")
                self._encoded.append(buffer.getvalue())
        return self._encoded[self.count % 5] + str(self.count).encode()

    def _pair(self, image, labels, values, *, size=(20, 16), palette=False):
        """Write a picture and a label map of blocks with these values."""
        self._picture(image, size=size)
        labels.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.resize(np.repeat(np.array(values, np.uint8), 4), size[::-1])
        label_map = Image.fromarray(pixels)
        if palette:
            label_map.putpalette([255 - value // 3 for value in range(768)])
        label_map.save(labels)

    def voc2007(self, base, per=2):
        """Write the lists of each class, and images of one class each."""
        folder = base / "VOCdevkit" / "VOC2007"
        for split in ("train", "val", "test"):
            stems = [f"{split}{i:03d}" for i in range(per * len(VOC07_CLASSES))]
            for stem in stems:
                self._picture(folder / "JPEGImages" / f"{stem}.jpg")
            for label, name in enumerate(VOC07_CLASSES):
                lines = []
                for i, stem in enumerate(stems):
                    shows = 1 if i % len(VOC07_CLASSES) == label else -1
                    lines.append(f"{stem} {shows:>2}")
                lists = folder / "ImageSets" / "Main"
                self._lines(lists / f"{name}_{split}.txt", lines)

    def voc2012(
        self, base, train=("2007_000032", "2007_000039", "2008_000002", "2008_000003")
    ):
        folder = base / "VOCdevkit" / "VOC2012"
        lists = folder / "ImageSets" / "Segmentation"
        for name, stems in (("train", train), ("val", ("2007_000033",))):
            self._lines(lists / f"{name}.txt", stems)
            for stem in stems:
                labels = folder / "SegmentationClass" / f"{stem}.png"
                image = folder / "JPEGImages" / f"{stem}.jpg"
                self._pair(image, labels, (0, 0, 15, 255), palette=True)
        return folder

    def voc2012aug(self, base, more=("2008_000007",)):
        folder = self.voc2012(base)
        lists = folder / "ImageSets" / "Segmentation"
        stems = [*(lists / "train.txt").read_text().split(), *more]
        (lists / "trainaug.txt").write_text("\n".join(stems))
        for stem in stems:
            labels = folder / "SegmentationClassAug" / f"{stem}.png"
            self._pair(folder / "JPEGImages" / f"{stem}.jpg", labels, (0, 20))

    def ade20k(self, base, train=4, val=2):
        folder = base / "ADEChallengeData2016"
        for part, short, count in (
            ("training", "train", train),
            ("validation", "val", val),
        ):
            for n in range(1, count + 1):
                stem = f"ADE_{short}_{n:08d}"
                image = folder / "images" / part / f"{stem}.jpg"
                labels = folder / "annotations" / part / f"{stem}.png"
                self._pair(image, labels, (0, 1, 150))

    def cityscapes(self, base):
        towns = (("train", "aachen"), ("train", "bochum"), ("val", "munster"))
        for part, town in towns:
            for n in range(2):
                stem = f"{part}/{town}/{town}_{n:06d}_000019"
                image = base / "leftImg8bit" / f"{stem}_leftImg8bit.png"
                labels = base / "gtFine" / f"{stem}_gtFine_labelIds.png"
                self._pair(image, labels, (0, 7, 33), size=(32, 16))

    def classes(
        self,
        base,
        classes=("circle", "square"),
        sizes=(("train", 6), ("val", 3), ("test", 4)),
    ):
        """Write a class folder whose classes differ in brightness."""
        for split, count in sizes:
            for label, name in enumerate(classes):
                folder = base / split / name
                folder.mkdir(parents=True, exist_ok=True)
                level = 40 + 170 * label // max(1, len(classes) - 1)
                for i in range(count):
                    self.count += 1
                    draw = np.random.Generator(np.random.PCG64(self.count))
                    pixels = np.clip(draw.normal(level, 25, (32, 32, 3)), 0, 255)
                    Image.fromarray(pixels.astype(np.uint8)).save(
                        folder / f"{i:03d}.png"
                    )


SMALL = "resnet18,width=0.25"  # 128 features, a fifteenth of the weights


@functools.cache
def random_trunk(seed, arch):
    """Make a random trunk; its batch norm statistics are not the initial ones."""
    torch.manual_seed(seed)
    trunk = build_trunk(arch).train()
    with torch.no_grad():
        for _ in range(3):
            trunk(torch.randn(16, 3, 32, 32))
    return Checkpoint(
        state_dict=trunk.state_dict(),
        arch=arch,
        method="random",
        provenance={"name": f"random{seed}"},
    )


@functools.cache
def _bytes_of_trunk(seed, arch):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trunk.safetensors"
        random_trunk(seed, arch).save(file)
        return file.read_bytes()


def trunk_file(path, seed=0, *, arch=SMALL, **changes):
    """Write a random trunk as a checkpoint file. It is drawn once for all tests."""
    path = Path(path)
    if changes:
        random_trunk(seed, arch).replace(**changes).save(path)
    else:
        path.write_bytes(_bytes_of_trunk(seed, arch))
    # What a test draws next must not depend on whether the trunk was drawn before
    torch.manual_seed(seed)
    return path
