"""Reads a config's datasets: finds them by Detectron2's names, parses them, finds each image."""

import os
from pathlib import Path

from fvcore.common.config import CfgNode

from backbench.containers import reading
from backbench.containers.spans import spelled
from backbench.detection.data import coco, voc
from backbench.detection.data.split import DatasetFiles, Split, join
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput, nearest
from backbench.runs.garbage import many_objects
from backbench.untrusted import opening, printable

DATASETS = coco.DATASETS | voc.DATASETS
# What the configs for boxes of one's own name
OWN = ("own_train", "own_test")

COCO_FOLDERS = "coco/{annotations,train2017,val2017}"


def root_folder(data: Path | None, holds: str = COCO_FOLDERS) -> Path:
    """Return --data, or else Detectron2's $DETECTRON2_DATASETS. BadInput where there is neither says
    what the folder `holds`."""
    root = data or os.environ.get("DETECTRON2_DATASETS")
    if not root:
        raise BadInput(
            f"no data: give --data ROOT with ROOT/{holds} (or $DETECTRON2_DATASETS)"
        )
    return Path(root)


def read_splits(
    config: Path, names: CfgNode, root: Path, task: DetectionTask
) -> tuple[Split, Split]:
    """Read the training and the test images that a config's DATASETS (`names`) name."""
    for part in ("TRAIN", "TEST"):
        if not names[part]:
            raise BadInput(f"{config}: DATASETS.{part} is empty")
    if len(names.TEST) != 1:
        raise BadInput(
            f"{config}: DATASETS.TEST {list(names.TEST)}: one dataset is scored in a run"
        )
    train = join([read(find(name, root), task) for name in names.TRAIN])
    test = read(find(names.TEST[0], root), task)
    return train, test


def find(name: str, root: Path) -> DatasetFiles:
    """Find the files of a dataset; coco_2017_val_100 is the first 100 images of coco_2017_val."""
    base, _, tail = name.rpartition("_")
    limit = None
    if tail.isdigit() and base in coco.DATASETS:
        limit = int(tail)
    key = base if limit else name
    if key in OWN:
        raise BadInput(
            f"DATASETS: '{name}' is a folder of boxes of your own; name it with --dataset NAME"
        )
    if key not in DATASETS:
        raise BadInput(f"DATASETS: unknown dataset '{name}'; {nearest(name, DATASETS)}")
    file, images = DATASETS[key]
    return DatasetFiles(name, root / file, root / images, limit)


@many_objects()
def read(files: DatasetFiles, task: DetectionTask) -> Split:
    """Read and check a dataset. Raises BadInput, one line, for what would train wrongly."""
    layout = voc if files.name in voc.DATASETS else coco
    if layout is voc and (task.outlines or task.keypoints):
        raise BadInput(
            f"{files.name}: VOC has boxes only; the {task.name} task needs COCO"
        )
    file = files.file
    try:
        text = opening.read_bytes(file, most=layout.LARGEST_FILE)
        split = layout.parse(text, files, task)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BadInput(f"{file}: no such file; {layout.LAYOUT}") from None
    except OSError as error:
        raise BadInput(f"{file}: {printable.shown(str(error), 100)}") from None
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None
    find_images(split)
    return split


def find_images(split: Split) -> None:
    """Replace each record's file name by its image's path, or its place in FOLDER.zip or FOLDER.tar.

    Raises BadInput for missing images, and for a path outside the dataset's folder, which may be an
    image of another split.
    """
    folder = split.folder
    records = split.records
    # 1. Images in an archive
    archived = reading.read_archived_folder(
        folder, [record["file_name"] for record in records]
    )
    if archived is not None:
        for index, record in enumerate(records):
            record["file_name"] = spelled(archived, index)
        return
    # 2. Images in a folder. Its path is not resolved: `link/..` may be another folder than without
    #    the link.
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such image folder (dataset {split.name})")
    root = str(folder)
    # The folder is listed once, and only what the listing lacks (an image in a subfolder, say) is
    # looked up: 118,000 look-ups take long on a network disk.
    listed = {str(path) for path in Path(root).iterdir()}
    missing = []
    for record in records:
        name = record["file_name"]
        relative = os.path.relpath(name, root) if name.startswith("/") else name
        relative = os.path.normpath(relative)
        if relative in (".", "..") or relative.startswith("../"):
            raise BadInput(f"{split.file}: file_name '{name}' is outside of {folder}")
        path = f"{root}/{relative}"
        if path not in listed and not os.path.isfile(path):  # noqa: PTH113 - any name at all
            missing.append(name)
        record["file_name"] = path
    if missing:
        raise BadInput(
            f"{folder}: {len(missing)} of {len(records)} images of {split.file.name} "
            f"are missing, first {missing[0]}"
        )
