"""Reads what a finished run detected, and the boxes that it was scored on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from backbench.detection.data import own, reading, voc
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.data.split import Split
from backbench.detection.run import DETECTIONS_FILE
from backbench.detection.task_rows import DETECTION_TASKS
from backbench.errors import BadInput
from backbench.records.result_line import Result
from backbench.untrusted import opening, printable

_FIELDS = {"image_id", "category_id", "bbox", "score"}


def read(run: Path) -> list[Detection] | None:
    """Return the detections of a run, in COCO's format; None where they were not kept."""
    file = run / DETECTIONS_FILE
    try:
        detections = json.loads(opening.read_bytes(file, most=opening.GIGABYTE))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(f"{file}: not readable ({said}); measure it again") from None
    if not isinstance(detections, list):
        raise BadInput(f"{file}: holds no list of detections; measure it again")
    for number, detection in enumerate(detections, 1):
        if not isinstance(detection, dict) or not detection.keys() >= _FIELDS:
            raise BadInput(
                f"{file}: its entry {number} is no detection; measure it again"
            )
    return cast(list[Detection], detections)


def refuse_others(run: Path, split: Split, detections: Sequence[Detection]) -> None:
    """Raise BadInput for detections of images or classes that the boxes at hand number otherwise, as
    the same boxes do in another layout, or exported again."""
    known: dict[str, set[int | str]] = {
        "image_id": {record["image_id"] for record in split.records},
        "category_id": set(split.ids),
    }
    for detection in cast(Sequence[Mapping[str, object]], detections):
        for key, ids in known.items():
            id = detection[key]
            if not isinstance(id, int | str) or id not in ids:
                shown = printable.shown(str(id), 60)
                raise BadInput(
                    f"{run / DETECTIONS_FILE}: no {key} {shown} is in {split.file}, though the boxes"
                    " are the same: they have other ids now; give the files that were measured on,"
                    " or measure it again"
                )


def refuses(row: Result) -> str:
    """Say why the detections of a row have no errors by COCO's rules; "" where they do."""
    name = str(row.facts.get("val", "")).partition(":")[0]
    if name in voc.DATASETS:
        return (
            "VOC's own AP is not COCO's; measure it with --dataset VOC2007 (or VOC2012)"
        )
    return ""


def scored_split(row: Result, run: Path, data: Path | None) -> Split:
    """Read the boxes that a row of a run was scored on. BadInput where those at hand are others."""
    val = str(row.facts["val"])
    name = val.partition(":")[0]
    task = DETECTION_TASKS[row.task]
    if name.startswith("own_"):
        root = reading.root_folder(data, holds=printable.shown(row.dataset, 40))
        # ROOT, or the folder of the boxes itself, which may be "."
        root = root.absolute()
        base = root if root.name == row.dataset else root / row.dataset
        split = own.read(base, task)[1]
    else:
        root = reading.root_folder(data)
        split = reading.read(reading.find(name, root), task)
    if split.fingerprint != val:
        raise BadInput(
            f"{split.file}: these boxes are {split.fingerprint}, and those that"
            f" {printable.shown(row.name, 40)} was scored on {printable.shown(val, 100)}; give the"
            " folder that holds those by --data, or leave out"
            f" {printable.shown(str(run), 300)}"
        )
    return split
