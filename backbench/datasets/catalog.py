"""Finds, reads, checks and records the datasets: the shipped rows, those of installed packages, and
class folders of any name.

A dataset lies in ROOT/<name> (torchvision's root), or in ROOT itself. No images are downloaded. The
table alone imports no numpy and no torch."""

import contextlib
import importlib.resources
import itertools
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from backbench import plugins
from backbench.containers import finding, reading
from backbench.containers.container import refuse_misspelled, split_of
from backbench.datasets import (
    box_labels,
    hub_tables,
    imagenet_sets,
    readers,
    splits,
    walk,
)
from backbench.datasets.boxes import box_folders
from backbench.datasets.row import Dataset, HubTables, tables_below
from backbench.datasets.splits import Splits
from backbench.errors import BadInput, nearest, no_folder
from backbench.images.file_names import is_image, passed_over, unusable_in
from backbench.images.folder_walk import refuse_broken_links, subfolders
from backbench.images.image_list import ImageList, scan_folder
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

RECORD = "backbench-splits.json"
# Notes that were logged: a process reads a dataset several times, and says once what was drawn
_SAID: set[str] = set()
SPLIT_FOLDERS = ("train", "val", "test")
MOST_ABOVE = 5  # folders of one folder each that may stand above the classes
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst")


def class_folder(name: str) -> Dataset:
    """Return the row of a class folder ROOT/<name>/{train,val,test}/<class>/<image>.

    Without val, a fifth of train is held out for it. Without test, val is scored. Without splits
    (ROOT/<name>/<class>/<image>), a test split is drawn, too."""

    def read(root: Path, seed: int) -> Splits:
        with _unless_boxes(root / name):
            return divided(root, seed)

    def divided(root: Path, seed: int) -> Splits:
        base = _class_folder_base(name, root)
        # 1. With splits of its own
        parts = {split: reading.read_split(base, split) for split in splits_of(base)}
        if parts:
            deeper = _deeper(parts["train"], base / "train")
        if "test" in parts:
            return splits.with_hold_out(
                parts["train"],
                parts["test"],
                parts.get("val"),
                seed=seed,
                notes=deeper,
            )
        if parts:
            note = f"{base} has no test folder: val is scored, and a fifth of train chooses"
            return splits.with_hold_out(
                parts["train"], parts["val"], seed=seed, notes=(note, *deeper)
            )
        # 2. Undivided, as folders or in one container
        container = finding.whole(base)
        everything: ImageList
        if container is None:
            everything = scan_folder(base)
        else:
            everything = reading.read(container, base)
            if len(everything.classes) < 2:
                only = "".join(everything.classes[:1])
                file = container.files[0]
                around = ""
                if all(path.count("/") > 1 for path in everything.paths):
                    around = f" if that is a folder around the classes, call the file {only}{file.suffix};"
                raise BadInput(
                    f"{file}: one class alone, '{only}';{around} the classes must be the first"
                    " folders in it, or below train/ and test/"
                )
        refuse_misspelled(everything.classes, base)
        most = max(Counter(everything.labels).values(), default=0)
        if 0 < most < 3:
            raise BadInput(
                f"{base}: {most} images of a class at most; a class needs three, as train, val and"
                " test are drawn from them"
            )
        # 3. Its test list is drawn by one seed, whatever the run's is: all seeds and checkpoints
        #    are scored on one list
        rest, test = splits.hold_out(everything, seed=0)
        note = (
            f"{base} has no train and test folders: a fifth of each class ({len(test)} of"
            f" {len(everything)} images) is drawn for test, by sha256 of '0 <path>'"
        )
        notes = (note, *_is_a_split(base), *_deeper(everything, base))
        train = everything.subset(rest)
        return splits.with_hold_out(
            train, everything.subset(test), seed=seed, notes=notes
        )

    return Dataset(name=name, classes=None, sizes=(None, None, None), read=read)


def _is_a_split(base: Path) -> list[str]:
    """Say of a folder that is called like a split, and has other splits beside it, which folder is
    the dataset."""
    own = split_of(base.name)
    if own is None:
        return []
    beside = [
        name for name in subfolders(base.parent) if split_of(name) not in (None, own)
    ]
    if not beside:
        return []
    return [
        f"{base} lies beside {', '.join(beside)}; if they are splits of one dataset, give"
        f" {base.parent} instead"
    ]


@contextlib.contextmanager
def _unless_boxes(base: Path) -> Iterator[None]:
    """Say of a folder that cannot be read as classes that it holds boxes, if it does or almost
    does."""
    try:
        yield
    except BadInput as error:
        box_folders.refuse(base)
        if hint := box_folders.almost(base):
            raise BadInput(f"{error}; if boxes are meant: {hint}") from None
        raise


def splits_of(base: Path) -> list[str]:
    """List a class folder's splits; none where folders of these names are classes.

    A `train` that holds images but no class folders is a class called train."""
    in_containers = finding.splits_of(base)
    folders: dict[str, Path] = {}
    if base.is_dir():
        named = [name for name in subfolders(base) if split_of(name) is not None]
        if in_containers or any(subfolders(base / name) for name in named):
            folders = finding.split_folders(base, in_containers)
    return [
        split for split in SPLIT_FOLDERS if split in in_containers or split in folders
    ]


def _class_folder_base(name: str, root: Path) -> Path:
    """Return ROOT/<name>. BadInput says what its layout lacks to be a class folder."""
    base = root / name
    if not root.is_dir():
        raise BadInput(f"{root}: {no_folder(root)}; it holds one folder per dataset")
    contained = finding.whole(base) is not None
    if not base.is_dir() and not contained:
        why = finding.refusal(base, "train")
        if why:
            raise BadInput(why)
        hint = nearest(name, [*known(), *subfolders(root)])
        raise BadInput(
            f"{base}: {no_folder(base)}; expected {base}/train/<class>/<image>,"
            f" or a known dataset: {hint}"
        )
    character = unusable_in(name)
    if character is not None:
        raise BadInput(
            f"{printable.shown(str(base))}: a dataset's name has no control character, as"
            f" {character}; rename it"
        )
    if base.is_dir():
        refuse_broken_links(base)
    expected = (
        f"expected {base}/{{train,val,test}}/<class>/<image> or {base}/<class>/<image>"
    )
    there = splits_of(base)
    # 1. Divided: train and one more
    if "train" in there and len(there) > 1:
        return base
    if there:
        why = finding.refusal(base, "train")
        if why:
            raise BadInput(why)
        lacks = "'test' or 'val'" if "train" in there else "'train'"
        raise BadInput(
            f"{base}: no folder {lacks} beside '{there[0]}'; {expected} (without a split, a"
            " fifth of each class is drawn for test)"
        )
    # 2. Undivided: a container, or several class folders
    if contained:
        return base
    folders = subfolders(base)
    datasets = [each for each in folders if splits_of(base / each)]
    if datasets:
        raise BadInput(
            f"{base}: holds datasets ({', '.join(datasets[:5])}), no classes; name one of them, as"
            f" {base / datasets[0]}"
        )
    if folders and all(split_of(folder) is not None for folder in folders):
        raise BadInput(f"{base}: no class folders in {base / folders[0]}; {expected}")
    refuse_misspelled(folders, base)
    if len(folders) < 2:
        raise BadInput(f"{base}: {_instead_of_classes(base, folders)}; {expected}")
    return base


def is_class_folder(base: Path) -> bool:
    """Return True if a folder holds splits or several classes, as folders or in containers."""
    return (
        bool(splits_of(base))
        or (base.is_dir() and len(subfolders(base)) > 1)
        or bool(finding.whole(base))
    )


def _instead_of_classes(base: Path, folders: list[str]) -> str:
    """Say what a folder holds that has fewer than two class folders."""
    why = finding.refusal(base, "train")
    if why:
        return why.partition(": ")[2]
    files = sorted(p.name for p in base.iterdir() if p.is_file())
    packed = [name for name in files if name.lower().endswith(ARCHIVES)]
    if packed:
        return f"holds the archive {packed[0]}, which must be unpacked there"
    pictures = [name for name in files if is_image(name)]
    if pictures:
        return f"{len(pictures)} images lie in no class folder ({pictures[0]} first)"
    if folders:
        alone = f"one class folder alone, '{folders[0]}'"
        below = _classes_below(base / folders[0])
        return f"{alone}; did you mean {below}?" if below else alone
    return "no class folders in it"


def _classes_below(folder: Path) -> Path | None:
    """Return the folder of classes that `folder` is, or to which folders of one folder each lead."""
    for _ in range(MOST_ABOVE):
        if splits_of(folder):
            return folder
        inner = subfolders(folder)
        if len(inner) > 1:
            return folder if all_hold_images(folder) else None
        if not inner:
            return None
        folder = folder / inner[0]
    return None


def _deeper(images: ImageList, base: Path) -> tuple[str, ...]:
    """Ask whether the folders below the class folders are the classes, where no picture lies in a
    class folder itself and there are more of them."""
    below: set[tuple[str, str]] = set()
    for path, label in zip(images.paths, images.labels):
        folder, _, rest = path.partition("/")
        inner, slash, _ = rest.partition("/")
        # A table's paths need not begin with the class
        if not slash or folder != images.classes[label]:
            return ()
        below.add((folder, inner))
    if len(below) <= len(images.classes):
        return ()
    folder, inner = min(below)
    return (
        f"{base}: all pictures lie in folders below the class folders, as {folder}/{inner}, and are"
        f" read as of class {folder}; if the {len(below)} folders below are the classes, move them up",
    )


def own_folders(root: Path) -> dict[str, str]:
    """Return each unknown class folder below ROOT -> what is wrong with its layout, or ''."""
    out: dict[str, str] = {}
    known_too = {*known(), "coco", "scenes"}
    names = set(subfolders(root)) if root.is_dir() else set()
    for ending in itertools.chain(*finding.ENDINGS.values()):
        files = [p.name for p in root.glob(f"*{ending}") if not passed_over(p.name)]
        names |= {name.removesuffix(ending) for name in files}
    for name in sorted(names - known_too):
        try:
            base = _class_folder_base(name, root)
            if finding.whole(base) or splits_of(base) or all_hold_images(base):
                out[name] = ""
        except BadInput as error:
            # Without splits it may be no dataset at all, so nothing is said. Whether it has splits
            # may be what is wrong with it
            try:
                divided = bool(splits_of(root / name))
            except BadInput:
                divided = True
            if divided:
                out[name] = str(error)
    return out


def all_hold_images(base: Path) -> bool:
    """Return True if all folders in BASE hold images: a folder of runs looks like one of classes, too."""
    return all(
        any(is_image(p.name) for p in (base / folder).iterdir())
        for folder in subfolders(base)
    )


def _shipped() -> dict[str, Dataset]:
    """Read the rows of catalog.toml, which says what their keys mean, and add their readers."""
    file = importlib.resources.files("backbench.datasets").joinpath("catalog.toml")
    rows = {}
    for name, about in tomllib.loads(file.read_text()).items():
        # The sizes are three keys of the file and one field of Dataset.
        train = about.pop("train", None)
        val = about.pop("val", None)
        test = about.pop("test", None)
        for key in ("needs", "folders", "rules"):
            about[key] = tuple(about.get(key, ()))
        read = imagenet_sets.READERS.get(name) or getattr(readers, name)
        read_split = getattr(readers, f"{name}_split", None)
        tables = about.pop("parquet", None)
        if tables is not None:
            labels = tuple(tables.pop("labels", ("label",)))
            beside = tuple(tables.pop("beside", ()))
            tables = HubTables(labels=labels, beside=beside, **tables)
        rows[name] = Dataset(
            name=name,
            sizes=(train, val, test),
            read=read,
            read_split=read_split,
            parquet=tables,
            **about,
        )
    return rows


DATASETS = _shipped()
TWELVE = tuple(DATASETS)[:12]  # LORAC's Table 2, in its order


def names(text: str) -> list[str]:
    """Parse `all` (the 12 of LORAC's Table 2) or a comma-separated list, without repetitions."""
    if text == "all":
        return list(TWELVE)
    out = [name.strip() for name in text.split(",") if name.strip()]
    if not out:
        raise BadInput(f"--datasets '{text}': give names, or `all`")
    return list(dict.fromkeys(out))


def known() -> list[str]:
    """List the names of all rows: the shipped ones, and those of installed packages (plugins.py)."""
    return [*DATASETS, *plugins.names(plugins.DATASETS, DATASETS)]


def row(name: str) -> Dataset | None:
    """Return the row of that name, or None.

    Other installed packages may be broken, so they are not loaded."""
    if name in DATASETS:
        return DATASETS[name]
    if name in plugins.installed(plugins.DATASETS):
        return plugins.load(plugins.DATASETS, name, Dataset)
    return None


def find(name: str) -> Dataset:
    """Return a known row, or that of a class folder of this name."""
    return row(name) or class_folder(name)


def boxes_as_labels(name: str) -> Dataset:
    """Return the row of ROOT/<name>, a folder of boxes from which a reading takes only the classes."""
    return Dataset(
        name=name,
        classes=None,
        sizes=(None, None, None),
        metric="map",
        read=lambda root, seed: box_labels.read(root / name, seed),
    )


def find_multilabel(name: str) -> Dataset:
    """Return a known row, or that of a folder of boxes of this name."""
    return row(name) or boxes_as_labels(name)


def present(name: str, root: Path, *, multilabel: bool = False) -> None:
    """Refuse a dataset that ROOT does not have, without reading any."""
    found = row(name)
    if found is None and multilabel:
        box_folders.must_find(root / name)
    elif found is None:
        with _unless_boxes(root / name):
            _class_folder_base(name, root)
    else:
        found.base(root)


# Reading


def refuse_taken_name(folder: Path, given: str) -> None:
    """Raise BadInput for a class folder of one's own that has the name of a known dataset."""
    name = folder.name
    if row(name) is None or not is_class_folder(folder):
        return
    try:
        present(name, folder.parent)
    except BadInput:
        raise BadInput(
            f"{given}: has the name of the known dataset {name}, and not its files;"
            " rename the folder"
        ) from None


def open_split(root: Path, name: str, split: str) -> ImageList:
    """Read ROOT/<name>/<split> for pretraining, labelled or not. BadInput names what is missing."""
    found = row(name)
    with _refusing_other_layouts(root / name):
        if found is not None and found.parquet and tables_below(root / name):
            return hub_tables.read_split(found, root / name, split)
        if found is not None and found.read_split is not None:
            return found.read_split(root, split)
        try:
            return reading.read_split(root / name, split)
        except BadInput:
            pictures = box_folders.pictures_of(root / name)
            if pictures is None:
                raise
            raise BadInput(
                f"{root / name}: holds boxes, no folder {split} of pictures; `backbench pretrain"
                f" METHOD --images {shlex.quote(str(pictures))}` trains on its pictures"
            ) from None


def load(
    name: str,
    root: Path,
    *,
    seed: int = 0,
    dense: bool = False,
    multilabel: bool = False,
) -> Splits:
    """Read and check a dataset's splits; `dense` asks for images with label maps, `multilabel` for
    images of several classes.

    BadInput if it is unusable. A split of another size than the row's and a class without test
    images give a warning, and a note in every result."""
    dataset = find_multilabel(name) if multilabel else find(name)
    if multilabel != dataset.multilabel:
        several = [each for each, about in DATASETS.items() if about.multilabel]
        if multilabel:
            raise BadInput(
                f"{name}: has no images of several classes; take one of {', '.join(several)}, or a"
                " folder of boxes"
            )
        raise BadInput(
            f"{name}: its images show several classes each, this reading takes images of one; use"
            " `backbench linear --protocol multilabel`"
        )
    if dense and not dataset.dense:
        maps = [each for each, about in DATASETS.items() if about.dense]
        raise BadInput(
            f"{name}: has images of classes, this reading takes images with label maps;"
            f" take one of {', '.join(maps)}"
        )
    if dataset.dense and not dense:
        raise BadInput(
            f"{name}: has images with label maps, this reading takes images of classes;"
            " use --protocol seg_linear"
        )
    # 1. Labels and lists, then the files, and only then what is in them: each costs more
    found, looked = _looked_at(dataset, root, seed)
    # Official splits hold known duplicates, which `data check` reports
    if name not in known():
        walk.refuse_shared(name, root, found, looked)
        for note in found.notes:
            line = f"{name}: {note}"
            if line not in _SAID:
                log.info(line)
                _SAID.add(line)
    # 2. The same splits as when they were recorded
    compare_record(name, root, found, seed)
    # 3. What may be used all the same
    odd = odd_sizes(dataset, found)
    if unscored := splits.unscored(found):
        more = f" and {len(unscored) - 1} more" if len(unscored) > 1 else ""
        odd.append(
            f"class '{unscored[0]}'{more} has no test image, so no number says how well it is"
            " recognised; add one, or remove the class"
        )
    for line in odd:
        log.warning(f"{name}: {line}")
    return replace(found, notes=(*found.notes, *odd))


def read_lists(dataset: Dataset, root: Path, seed: int = 0) -> Splits:
    """Read a dataset's splits and check that their files are there, without looking into them.

    BadInput for another layout, labels out of range or missing files."""
    return _looked_at(dataset, root, seed)[0]


def _looked_at(dataset: Dataset, root: Path, seed: int) -> tuple[Splits, walk.Looked]:
    base = dataset.base(root)
    with _refusing_other_layouts(base):
        found = hub_tables.read(dataset, base, seed)
    splits.check(dataset.name, found)
    return found, walk.look(dataset.name, found)


@contextlib.contextmanager
def _refusing_other_layouts(base: Path) -> Iterator[None]:
    """Turn what an unexpected list, table or name raises into BadInput that names the folder."""
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
        text = f"{type(error).__name__}: {error}"
        one_line = printable.shown(" ".join(text.split()), 150)
        raise BadInput(
            f"{base}: not in the layout of this data set ({one_line})"
        ) from error


def odd_sizes(dataset: Dataset, found: Splits) -> list[str]:
    """Return a line for each split whose size is not the row's."""
    counts = {which: len(images) for which, images in found.items()}
    if found.held_out:
        # The row counts the official train split, which what was held out belongs to
        counts["train"] += counts["val"]
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
    """Return, by split, what ROOT/<name>/backbench-splits.json keeps: size and manifest's sha256."""
    return {
        which: {"images": len(images), "sha256": splits.digest(images)}
        for which, images in found.items()
    }


def compare_record(name: str, root: Path, found: Splits, seed: int) -> None:
    """Refuse splits that are not the recorded ones. Without a record of this seed, all are taken."""
    file = record_file(name, root)
    if not file.exists():
        return
    try:
        then = jsons.read(file)
        of_this_seed = then["seed"] == seed
        was_of = {
            which: dict(then["splits"][which]) for which in ("train", "val", "test")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}: damaged ({error!r:.60}); remove it, or record it anew"
        ) from None
    if not of_this_seed:
        return
    for which, now in record_of(found).items():
        was = was_of[which]
        if was != now:
            raise BadInput(
                f"{name}: the {which} split is not the recorded one ({now['images']} images,"
                f" {was.get('images')} in {file}); restore the data, or record it again with"
                " `backbench data check --record`"
            )
