"""Finds, reads, checks and records the datasets; each is a row. torchvision's root is ROOT/<name>,
but ROOT is tried, too. No images are downloaded; the table alone imports no numpy and no torch."""

import contextlib
import importlib.resources
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from backbench import plugins
from backbench.containers import containers
from backbench.datasets import imagenet_sets, readers, splits, walk
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput, nearest
from backbench.images.image_list import ImageList, is_image, scan_folder
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

RECORD = "backbench-splits.json"


_SAID: set[str] = (
    set()
)  # a process reads a dataset several times, and says what is drawn once
SPLIT_FOLDERS = ("train", "val", "test")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst")


def class_folder(name: str) -> Dataset:
    """Return the row of a class folder ROOT/<name>/{train,val,test}/<class>/<image>, without val,
    without test (val is scored then), or ROOT/<name>/<class>/<image> (a test split is drawn)."""

    def read(root: Path, seed: int) -> Splits:
        base = _class_folder_base(name, root)
        parts = {
            split: containers.read_split(base, split) for split in _splits_of(base)
        }
        if "test" in parts:
            return splits.with_hold_out(
                parts["train"], parts["test"], parts.get("val"), seed=seed
            )
        if parts:
            note = f"{base} has no test folder: val is scored, and a fifth of train chooses"
            return splits.with_hold_out(
                parts["train"], parts["val"], seed=seed, notes=(note,)
            )
        container = containers.whole(base)
        everything: ImageList
        if container is None:
            everything = scan_folder(base, classes=_folders_in(base))
        else:
            everything = containers.read(container, base)
            if len(everything.classes) < 2:
                only = "".join(everything.classes[:1])
                raise BadInput(
                    f"{container.files[0]}: one class alone, '{only}'; the classes must be the first"
                    " folders in it, or below train/ and test/"
                )
        # Drawn once, whatever the run's seed: all seeds and checkpoints are scored on one test list
        rest, test = splits.hold_out(everything, seed=0)
        note = (
            f"{base} has no train and test folders: a fifth of each class ({len(test)} of"
            f" {len(everything)} images) is drawn for test, by sha256 of '0 <path>'"
        )
        train = everything.subset(rest)
        return splits.with_hold_out(
            train, everything.subset(test), seed=seed, notes=(note,)
        )

    return Dataset(name=name, classes=None, sizes=(None, None, None), read=read)


def _folders_in(base: Path) -> list[str]:
    return sorted(
        p.name for p in base.iterdir() if p.is_dir() and not p.name.startswith(".")
    )


def _splits_of(base: Path) -> list[str]:
    """List a class folder's splits. A `train` with images but no class folders is a class."""
    held = containers.splits_of(base)
    there = [
        split for split in SPLIT_FOLDERS if split in held or (base / split).is_dir()
    ]
    return there if held or any(_folders_in(base / split) for split in there) else []


def _class_folder_base(name: str, root: Path) -> Path:
    """ROOT/<name>, where it is laid out as a class folder."""
    base = root / name
    if not root.is_dir():
        raise BadInput(f"{root}: no such folder; it holds one folder per dataset")
    contained = containers.whole(base) is not None
    if not base.is_dir() and not contained:
        if why := containers.refusal(base, "train"):
            raise BadInput(why)
        hint = nearest(name, [*known(), *_folders_in(root)])
        raise BadInput(
            f"{base}: no such folder; expected {base}/train/<class>/<image>,"
            f" or a known dataset: {hint}"
        )
    expected = (
        f"expected {base}/{{train,val,test}}/<class>/<image> or {base}/<class>/<image>"
    )
    folders, there = [] if contained else _folders_in(base), _splits_of(base)
    if contained and not there:
        return base
    if there:
        if "train" not in there or len(there) < 2:
            lacks = "test' or 'val" if "train" in there else "train"
            if why := containers.refusal(base, "train"):
                raise BadInput(why)
            raise BadInput(
                f"{base}: no folder '{lacks}' beside '{there[0]}'; {expected} (without a split, a"
                " fifth of each class is drawn for test)"
            )
    elif datasets := [each for each in folders if _splits_of(base / each)]:
        raise BadInput(
            f"{base}: holds datasets ({', '.join(datasets[:5])}), no classes; name one of them, as"
            f" {base / datasets[0]}"
        )
    elif folders and set(folders) <= set(SPLIT_FOLDERS):
        raise BadInput(f"{base}: no class folders in {base / folders[0]}; {expected}")
    elif len(folders) < 2:
        raise BadInput(f"{base}: {_instead_of_classes(base, folders)}; {expected}")
    return base


def is_class_folder(base: Path) -> bool:
    """True where a folder holds splits or several classes, in whichever way."""
    return (
        bool(_splits_of(base))
        or len(_folders_in(base)) > 1
        or bool(containers.whole(base))
    )


def _instead_of_classes(base: Path, folders: list[str]) -> str:
    """The content of a folder that has fewer than two class folders, for messages."""
    if why := containers.refusal(base, "train"):
        return why.partition(": ")[2]
    files = sorted(p.name for p in base.iterdir() if p.is_file())
    packed = [name for name in files if name.lower().endswith(ARCHIVES)]
    if packed:
        return f"holds the archive {packed[0]}, which must be unpacked there"
    pictures = [name for name in files if is_image(name)]
    if pictures:
        return f"{len(pictures)} images lie in no class folder ({pictures[0]} first)"
    return (
        f"one class folder alone, '{folders[0]}'"
        if folders
        else "no class folders in it"
    )


def own_folders(root: Path) -> dict[str, str]:
    """Return each unknown class folder below ROOT -> what its layout shows to be wrong, or ''."""
    out: dict[str, str] = {}
    known_too = {*known(), "coco", "scenes"}
    names = set(_folders_in(root)) if root.is_dir() else set()
    for ending in itertools.chain(*containers.WHOLE.values()):
        names |= {p.name.removesuffix(ending) for p in root.glob(f"*{ending}")}
    for name in sorted(names):
        if name in known_too:
            continue
        try:
            base = _class_folder_base(name, root)
            # Without a split, any folder of folders (runs, say) looks like one: images decide
            contained = containers.whole(base)
            classes = [] if contained else [base / each for each in _folders_in(base)]
            if (
                contained
                or _splits_of(base)
                or all(
                    any(is_image(p.name) for p in each.iterdir()) for each in classes
                )
            ):
                out[name] = ""
        except BadInput as error:
            with contextlib.suppress(BadInput):  # it may be the same again
                if not _splits_of(root / name):
                    continue
            out[name] = str(error)
    return out


def _shipped() -> dict[str, Dataset]:
    """The rows of catalog.toml, which says what their keys mean, with their readers."""
    text = (
        importlib.resources.files("backbench.datasets")
        .joinpath("catalog.toml")
        .read_text()
    )
    rows = {}
    for name, about in tomllib.loads(text).items():
        sizes = tuple(about.pop(split, None) for split in ("train", "val", "test"))
        for key in ("needs", "folders", "rules"):
            about[key] = tuple(about.get(key, ()))
        read = imagenet_sets.READERS.get(name) or getattr(readers, name)
        read_split = getattr(readers, f"{name}_split", None)
        rows[name] = Dataset(
            name=name, sizes=sizes, read=read, read_split=read_split, **about
        )
    return rows


DATASETS = _shipped()
TWELVE = tuple(DATASETS)[:12]  # LORAC's Table 2, in its order


def names(text: str) -> list[str]:
    """`all` (the 12 of LORAC's Table 2) or a comma-separated list."""
    if text == "all":
        return list(TWELVE)
    out = [name.strip() for name in text.split(",") if name.strip()]
    if not out:
        raise BadInput(f"--datasets '{text}': give names, or `all`")
    return list(dict.fromkeys(out))


def known() -> list[str]:
    """The names of all rows: the shipped ones, and those of installed packages (plugins.py)."""
    return [*DATASETS, *plugins.names(plugins.DATASETS, DATASETS)]


def row(name: str) -> Dataset | None:
    """Return that row, or None. Other installed packages may be broken, so they are not loaded."""
    if name in DATASETS:
        return DATASETS[name]
    if name in plugins.installed(plugins.DATASETS):
        return plugins.load(plugins.DATASETS, name, Dataset)
    return None


def find(name: str) -> Dataset:
    """A known row, or that of a class folder of this name."""
    return row(name) or class_folder(name)


def present(name: str, root: Path) -> None:
    """BadInput where ROOT has no such dataset, without reading any."""
    found = row(name)
    if found is None:
        _class_folder_base(name, root)
    else:
        found.base(root)


# Reading


def open_split(root: Path, name: str, split: str) -> ImageList:
    """Read ROOT/<name>/<split> for pretraining, labelled or not. BadInput names what is missing."""
    found = row(name)
    with _layout_of(root / name):
        if found is not None and found.read_split is not None:
            return found.read_split(root, split)
        return containers.read_split(root / name, split)


def load(name: str, root: Path, *, seed: int = 0, dense: bool = False) -> Splits:
    """Read and check a dataset's splits; `dense`: images with label maps. BadInput if it is
    unusable. A split of another size than the row's gives a warning, and a note in every result."""
    # 1. Labels and lists, then the files, and only then what is in them: each costs more.
    dataset = find(name)
    if dataset.dense != dense:
        has = ["images of classes", "images with label maps"]
        maps = [each for each, about in DATASETS.items() if about.dense]
        raise BadInput(
            f"{name}: has {has[dataset.dense]}, this reading takes {has[dense]}; "
            + (
                f"take one of {', '.join(maps)}"
                if dense
                else "use --protocol seg_linear"
            )
        )
    found, sizes = _looked_at(dataset, root, seed)
    if (
        name not in known()
    ):  # official splits hold known duplicates, which `data check` reports
        walk.refuse_shared(name, found, sizes)
        for line in (f"{name}: {note}" for note in found.notes):
            if line not in _SAID:
                log.info(line)
            _SAID.add(line)
    # 2. The same splits as when they were recorded.
    compare_record(name, root, found, seed)
    # 3. What may be used all the same.
    odd = tuple(odd_sizes(dataset, found))
    for line in odd:
        log.warning(f"{name}: {line}")
    return replace(found, notes=(*found.notes, *odd))


def read_lists(dataset: Dataset, root: Path, seed: int = 0) -> Splits:
    """Read a dataset's splits and check that their files are there; what is in these is not looked
    at. BadInput for another layout, other labels or fewer files."""
    return _looked_at(dataset, root, seed)[0]


def _looked_at(dataset: Dataset, root: Path, seed: int) -> tuple[Splits, walk.Sizes]:
    base = dataset.base(root)
    with _layout_of(base):
        found = dataset.read(base, seed)
    splits.check(dataset.name, found)
    return found, walk.look(dataset.name, found)


@contextlib.contextmanager
def _layout_of(base: Path) -> Iterator[None]:
    """Turn any error of an unforeseen list, table or name into BadInput that names the folder."""
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if isinstance(error, FileNotFoundError) and error.filename:
            file = printable.shown(str(error.filename), 300)
            raise BadInput(f"{file} is missing; unpack the archive again") from None
        said = printable.shown(
            " ".join(f"{type(error).__name__}: {error}".split()), 150
        )
        raise BadInput(
            f"{base}: not in the layout of this data set ({said})"
        ) from error


def odd_sizes(dataset: Dataset, found: Splits) -> list[str]:
    """A line for each split whose size is not the row's."""
    # A row counts the official train split, so what was held out of it counts with it.
    trained = len(found.train) + (len(found.val) if found.held_out else 0)
    counts = {"train": trained, "val": len(found.val), "test": len(found.test)}
    out = []
    for (which, count), size in zip(counts.items(), dataset.sizes):
        if size not in (None, count):
            out.append(f"{which} has {count} images, not {size}")
    if dataset.classes is not None and len(found.train.classes) != dataset.classes:
        out.append(f"{len(found.train.classes)} classes, not {dataset.classes}")
    return out


# The record of what the splits were


def record_file(name: str, root: Path) -> Path:
    return root / name / RECORD


def record_of(found: Splits) -> dict[str, dict[str, int | str]]:
    """By split, what ROOT/<name>/backbench-splits.json keeps of it; the sha256 is the manifest's."""
    return {
        which: {"images": len(images), "sha256": splits.digest(images)}
        for which, images in found.items()
    }


def compare_record(name: str, root: Path, found: Splits, seed: int) -> None:
    """Refuse splits that are not the recorded ones; without a record of this seed all are taken."""
    file = record_file(name, root)
    if not file.exists():
        return
    try:
        then = jsons.read(file)
        recorded, others = then["splits"], then["seed"] != seed
        was_of = {which: dict(recorded[which]) for which in ("train", "val", "test")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}: damaged ({error!r:.60}); remove it, or record it anew"
        ) from None
    if others:
        return
    for which, now in record_of(found).items():
        was = was_of[which]
        if was != now:
            raise BadInput(
                f"{name}: the {which} split is not the recorded one ({now['images']} images,"
                f" {was.get('images')} in {file})"
                "; restore the data, or record it again with `backbench data check --record`"
            )
