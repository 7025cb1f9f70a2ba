"""`backbench data`: lists datasets, checks and packs them, and fetches SimCLR's lists."""

import gzip
import hashlib
import shlex
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backbench.containers import finding
from backbench.containers.container import SPLIT_WORDS
from backbench.containers.names_by_contents import digest_of
from backbench.containers.spans import SpanList
from backbench.datasets import (
    availability,
    catalog,
    copies,
    detection_check,
    packing,
    splits,
    walk,
)
from backbench.datasets.boxes import box_folders
from backbench.datasets.copies import Look
from backbench.datasets.splits import Splits
from backbench.errors import BadInput, no_folder
from backbench.images import image_list
from backbench.images.dense import DenseList
from backbench.images.image_list import ImageList
from backbench.images.multilabel import PRESENT, MultiLabelList
from backbench.recipes import config
from backbench.requests.data import (
    DataCheckRequest,
    DataListRequest,
    DataPackRequest,
    FetchSplitsRequest,
)
from backbench.requests.options import Outcome
from backbench.runs import atomic
from backbench.runs.run_progress import QUIET_SECONDS, Progress
from backbench.untrusted import opening

# Files beside class folders that tell of a dataset, by their names without the ending
NOTES = ("changelog", "citation", "licence", "license", "readme")


def run_list(request: DataListRequest) -> Outcome:
    """Print a line for each dataset below ROOT."""
    return Outcome(document=_list(request.data))


def run_check(request: DataCheckRequest) -> Outcome:
    """Read one dataset whole and print what is wrong with it."""
    problems: list[str] = []
    status = _check(request, problems)
    return Outcome(status=status, document={"name": request.name, "problems": problems})


def run_pack(request: DataPackRequest) -> Outcome:
    """Write one dataset into another kind of container."""
    packing.pack(request.name, request.data, request.to, request.out)
    return Outcome()


def run_fetch_splits(request: FetchSplitsRequest) -> None:
    """Download SimCLR's lists of labels."""
    _fetch(request.out)


# data list


def _list(root: Path) -> list[dict[str, object]]:
    """Print a line for each dataset; return the rows."""
    line = "{:<21} {:>7} {:>9} {:>6} {:>6}  {:<14} {:<8} {}"
    print(
        line.format(
            "name", "classes", "train", "val", "test", "metric", "on disk", "licence"
        )
    )
    rows = availability.listed(root)
    for row in rows:
        train, val, test = row.get("images", (None, None, None))
        # Without a val split of its own, a dataset's val is held out of train
        counts = (
            row.get("classes"),
            train,
            "held" if train and val is None else val,
            test,
        )
        cells = ["-" if count is None else str(count) for count in counts]
        metric, licence = row.get("metric", ""), row.get("licence", "")
        print(
            line.format(row["name"], *cells, metric, row["on_disk"], licence).rstrip()
        )
        if row["wrong"]:
            print(f"{'':<21} {row['wrong']}")
        if row.get("container"):
            print(f"{'':<21} found: {row['container']}")
    if not root.is_dir():
        print(f"--data {root}: {no_folder(root)}, so every dataset is missing")
    print(
        "Any other name is a class folder: ROOT/NAME/{train,val,test}/<class>/<image>, or"
    )
    print(
        "ROOT/NAME/<class>/<image>, of which a fifth is drawn for test; or a folder of boxes"
    )
    print("(docs/boxes.md).")
    return rows


# data check


def _check(request: DataCheckRequest, problems: list[str]) -> int:
    """Print what is there and what is wrong, which goes to `problems`, too; 1 if anything is."""
    name = request.name
    root = request.data
    if request.copies is not None and request.copies.exists():
        raise BadInput(
            f"--copies {request.copies}: is there already; name a file that is not"
        )
    own = name not in catalog.known() and name not in box_folders.NAMED_BY_CONFIGS
    if own:
        _refuse_path(name, root)
    if own and box_folders.looks_like_boxes(root / name):
        return _check_boxes(request, problems)
    dense = name in catalog.DATASETS and catalog.DATASETS[name].dense
    if name not in catalog.known() or dense:
        wrong = detection_check.check(name, root, _inspected)
        if wrong is not None and (wrong or not dense):
            _refuse_for_boxes(request)
            problems += wrong
            return 1 if wrong else 0
    # 1. What makes the data unusable is refused, as every evaluation would refuse it.
    dataset = catalog.find(name)
    found = catalog.read_lists(dataset, root)
    if not request.record:
        catalog.compare_record(name, root, found, 0)
    # 2. What can be used is described, and everything odd about it is a problem.
    problems += catalog.odd_sizes(dataset, found)
    classes = found.train.classes
    print(f"{name}: {len(classes)} classes, {classes[0]} .. {classes[-1]}")
    for note in found.notes:
        print(f"{name}: {note}")
    if name not in catalog.known():
        problems += _ignored(root / name)
    # Test image that is a copy -> the image of train or val
    shared: dict[str, str] = {}
    problems += _content_problems(name, found, shared)
    problems += _map_problems(found)
    for line in problems:
        print(f"{name}: PROBLEM: {line}")
    # 3. The record is what there is, problems included: it is there to tell a change, not to judge.
    if request.record:
        file = catalog.record_file(name, root)
        atomic.write_json(file, {"seed": 0, "splits": catalog.record_of(found)})
        print(
            f"{name}: recorded in {file}, the images' names by contents in {_record(found, file)}"
        )
    if request.copies is not None:
        _write_copies(request.copies, shared, _refused(name, found))
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: all right")
    return 1 if problems else 0


def _check_boxes(request: DataCheckRequest, problems: list[str]) -> int:
    """Print what a folder of boxes of one's own holds, and what is wrong with it."""
    # Detection imports torch, which other datasets do without.
    from backbench.detection import own_check

    _refuse_for_boxes(request)
    name = request.name
    said, wrong = own_check.check(request.data / name)
    problems += wrong
    for line in said:
        print(f"{name}: {line}")
    for line in wrong:
        print(f"{name}: PROBLEM: {line}")
    print(f"{name}: {len(wrong)} problems" if wrong else f"{name}: all right")
    return 1 if wrong else 0


def _refuse_for_boxes(request: DataCheckRequest) -> None:
    """Raise BadInput for --copies and --record, which boxes do not have."""
    if request.record:
        raise BadInput(
            f"--record: {request.name} is boxes, whose lists are not recorded; leave --record out"
        )
    if request.copies is not None:
        raise BadInput(
            f"--copies {request.copies}: {request.name} is boxes, and `rescore` scores classes;"
            " leave --copies out"
        )


def _inspected(file: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Read an annotation file as `detect` does; return what is wrong, and what is worth saying."""
    # Detection imports torch, which other datasets do without.
    from backbench.detection.data import images, reading, sides
    from backbench.detection.data.split import DatasetFiles
    from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN

    if file.stem.startswith("person_keypoints_"):
        task = KEYPOINT_RCNN
    elif not file.stem.startswith("instances_"):
        return [], []
    elif b'"segmentation"' in opening.read_bytes(file, most=detection_check.LARGEST):
        task = MASK_RCNN
    else:
        task = FASTER_RCNN
    try:
        split = reading.read(DatasetFiles(file.stem, file, folder), task)
        looked = images.check_files(split.records)
    except BadInput as error:
        return [str(error)], []
    wrong = [f"{file.name}: {note}" for note in split.notes]
    said = []
    turned = sum(image.turned for image in looked)
    if turned:
        said.append(
            f"{file.name}: {turned} of {len(looked)} images have an EXIF orientation; they are read "
            "as shown, so their boxes must be those of the image as shown"
        )
    if split.keypoints:
        said.append(f"{file.name}: {sides.said(split.keypoints, split.flip)}")
        alone = sides.unpaired(split.keypoints)
        if alone:
            wrong.append(
                f"{file.name}: keypoints without a partner of the other side: {', '.join(alone)}"
            )
    return wrong, said


def _record(found: Splits, beside: Path) -> Path:
    """Write (split on disk, path, digest of the bytes) of every image; no image is in it."""
    lines = []
    for _, images in found.items():
        split = images.root.name if images.root.name in SPLIT_WORDS else ""
        for index, path in enumerate(images.paths):
            lines.append(f"{split}\t{path}\t{digest_of(images.read(index))}\n")
    file = beside.with_name("contents.tsv.gz")
    atomic.write_bytes(file, gzip.compress("".join(sorted(lines)).encode(), mtime=0))
    return file


def _refuse_path(name: str, root: Path) -> None:
    """Refuse the path of a dataset where its name is due, and its own folder as ROOT."""
    if (root / name).exists() and "/" not in name.rstrip("/"):
        return
    folder = None
    if Path(name).is_dir():
        folder = Path(name)
    elif root.is_dir() and root.absolute().name == name:
        folder = root
    if folder is None:
        return
    command = ["backbench", "data", "check", folder.absolute().name]
    command += ["--data", str(folder.parent)]
    raise BadInput(
        f"{name}: a dataset is named by its folder below ROOT; write `{shlex.join(command)}`"
    )


def _ignored(base: Path) -> list[str]:
    """Return a line per split with files that no evaluation looks at; one line where there are no
    splits."""
    folders = {}
    for split in catalog.splits_of(base):
        if finding.find(base, split) is None:
            folders[f"{split}: "] = finding.split_folder(base, split)
    if not catalog.splits_of(base) and finding.whole(base) is None:
        folders[""] = base
    out = []
    for split, folder in folders.items():
        left = [name for name in image_list.ignored(folder) if not _is_note(name)]
        if left:
            kinds = Counter(
                Path(name).suffix.lower() or "without a suffix" for name in left
            )
            counts = ", ".join(
                f"{count} {kind}" for kind, count in sorted(kinds.items())
            )
            out.append(
                f"{split}{len(left)} files are ignored ({counts}), {left[0]} first"
            )
    return out


def _is_note(name: str) -> bool:
    """Return True for a file beside the class folders that tells of the dataset."""
    return name == catalog.RECORD or name.partition(".")[0].lower() in NOTES


def _refused(name: str, found: Splits) -> set[str]:
    """Return the test images that an evaluation refuses, as the same file is in train or val."""
    # Official splits hold known duplicates, and are scored with them
    if name in catalog.known():
        return set()
    return set(walk.same_files(found, walk.look(name, found)))


def _write_copies(file: Path, shared: dict[str, str], refused: set[str]) -> None:
    """Write the list of test images that are copies, as `backbench rescore` reads it."""
    lines = [f"{test}\tcopy\t{other}\n" for test, other in sorted(shared.items())]
    if not lines:
        print(f"{file}: not written, no test image is a copy of a labelled one")
        return
    atomic.write_text(file, "".join(lines))
    if refused:
        print(
            f"{file}: {len(lines)} test images that are copies, {len(refused)} of them byte for"
            " byte, which no evaluation takes; remove those that it lists from test, then measure"
        )
        return
    print(
        f"{file}: {len(lines)} test images that are copies; `backbench rescore RUNS --list"
        f" {shlex.quote(str(file))}`"
        " scores without them"
    )


def _content_problems(
    name: str, found: Splits, shared_with_test: dict[str, str]
) -> list[str]:
    """Reads every image: a line per problem within a split, then of two splits together.

    `shared_with_test` is filled with the test images that are copies -> an image of train or val."""
    problems = []
    seen: dict[str, tuple[ImageList, list[Look | None]]] = {}
    for which, images in found.items():
        if found.imagenet is not None and which != "test":  # a set of test images alone
            seen[which] = images, []
            continue
        print(
            f"{name} {which}: {len(images)} images, sha256 of the list {splits.digest(images)}"
        )
        if isinstance(images, SpanList):
            print(f"{name} {which}: {images.described}")
        problems += _list_problems(which, images)
        looks, unreadable = _read_all(f"{name} {which}", images)
        seen[which] = images, looks
        problems += [f"{which}: unreadable {line}" for line in unreadable[:5]]
        if len(unreadable) > 5:
            problems.append(f"{which}: {len(unreadable) - 5} more unreadable images")
    by_content: dict[str, dict[tuple[Look, bytes], str]] = {}
    all_contents = copies.contents(seen)
    for which, by_path in all_contents.items():
        by_content[which] = {content: path for path, content in by_path.items()}
        if twice := len(by_path) - len(by_content[which]):
            problems.append(f"{which} holds {twice} copies of other images of it")
    # The worst first: what a model has trained on must not be what it is scored on.
    for a, b in (("train", "test"), ("val", "test"), ("train", "val")):
        shared = sorted(by_content[a].keys() & by_content[b].keys())
        if shared:
            one, other = by_content[a][shared[0]], by_content[b][shared[0]]
            problems.append(f"{a} and {b} share {len(shared)} images: {one} is {other}")
        again = copies.rewritten(*seen[b], *seen[a])
        if again:
            other, one = again[0]
            problems.append(
                f"{a} and {b} share {len(again)} images in another format: {one} shows {other}"
            )
        if b == "test":
            for path, content in all_contents[b].items():
                if content in by_content[a]:
                    shared_with_test.setdefault(path, by_content[a][content])
            for path, labelled in again:
                shared_with_test.setdefault(path, labelled)
    return problems


def _map_problems(found: Splits) -> list[str]:
    """Reads every label map beside its image; a line for each that does not fit."""
    problems = []
    for which, images in found.items():
        if not isinstance(images, DenseList):
            continue
        for index in range(len(images)):
            try:
                images.pair(index)
            except BadInput as error:
                problems.append(f"{which}: {error}")
    return problems


def _list_problems(which: str, images: ImageList) -> list[str]:
    """Return the problems of a split's list, before any image is read."""
    problems = []
    shown = set(images.labels)
    if isinstance(images, MultiLabelList):
        shown = set((images.table() == PRESENT).any(0).nonzero()[0].tolist())
    empty = sorted(set(range(len(images.classes))) - shown)
    if empty and not isinstance(images, DenseList):
        first = images.classes[empty[0]]
        problems.append(
            f"{which} has no image of {len(empty)} classes, '{first}' first"
        )
    twice = [path for path, count in Counter(images.paths).items() if count > 1]
    if twice:
        problems.append(f"{which} lists {len(twice)} images twice, {twice[0]} first")
    return problems


def _read_all(title: str, images: ImageList) -> tuple[list[Look | None], list[str]]:
    """Return the look of every image, None where it cannot be decoded, and a line for each of
    those."""
    progress = Progress(
        None, len(images), f"{title}: reading", unit="image", after=QUIET_SECONDS
    )

    def read(index: int) -> Look | str:
        try:
            # As PIL reads it: what OpenCV fills up with gray must not pass for whole
            return copies.look_at(images.open(index))
        except BadInput as error:
            return str(error)

    rows = []
    with ThreadPoolExecutor(8) as pool:
        # A pool makes an object of each image at once, so they go in thousands
        for begin in range(0, len(images), 1000):
            for row in pool.map(read, range(begin, min(begin + 1000, len(images)))):
                rows.append(row)
                progress.advance()
    looks = [row if isinstance(row, Look) else None for row in rows]
    return looks, [row for row in rows if isinstance(row, str)]


# data fetch-splits

LISTS_URL = "https://raw.githubusercontent.com/google-research/simclr/master/imagenet_subsets/{percent}percent.txt"


def _fetch(out: Path) -> None:
    """SimCLR's lists, verified before they are written."""
    import urllib.request

    # The protocol says what the lists must be: a run that uses
    # another one is refused by the same hash.
    parts = config.read_recipe(config.find_recipe("semisup", "transfer"))["parts"]
    for percent, part in parts.items():
        wanted = part["list"]
        file = out / f"{percent}percent.txt"
        if (
            file.exists()
            and hashlib.sha256(file.read_bytes()).hexdigest() == wanted["sha256"]
        ):
            print(f"{file}: there already, {wanted['lines']} lines")
            continue
        url = LISTS_URL.format(percent=percent)
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = answer.read()
        except OSError as error:
            raise BadInput(
                f"{url}: cannot be fetched ({error}); copy the file to {file} by other means"
            ) from None
        if hashlib.sha256(data).hexdigest() != wanted["sha256"]:
            raise BadInput(
                f"{url}: not the published list (sha256 differs); nothing was written"
            )
        atomic.write_bytes(file, data)
        print(f"{file}: {wanted['lines']} lines")
