"""The verbs inspect, import and export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.published import published
from backbench.requests.options import Outcome
from backbench.requests.weights import ExportRequest, ImportRequest, InspectRequest
from backbench.runs.terminal import log
from backbench.untrusted.printable import shown
from backbench.weights import absent, exporting, hub_files
from backbench.weights.checkpoint import PIXELS_FROM
from backbench.weights.importing import read
from backbench.weights.inspecting import (
    Allows,
    EncoderReport,
    Report,
    inspect,
    untrained_signs,
)
from backbench.weights.tensor_names import first_names
from backbench.weights.tensor_tables import tables_of
from backbench.weights.weight_file import open_file

if TYPE_CHECKING:
    from backbench.weights.checkpoint import Checkpoint
    from backbench.weights.families.picture_check import PictureCheck


def run_inspect(request: InspectRequest) -> Outcome:
    report = inspect(request.file)
    if not request.json:
        _print_report(report)
    return Outcome(document=report)


def _print_report(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{report['file']}  {report['bytes'] / 1e6:.1f} MB, {report['container']}"
    )
    also = f" (files that look the same: {report['also']})" if report["also"] else ""
    console.print(f"format    {report['format'] or 'not recognised'}{also}")
    table = Table(
        "encoder", "prefix", "arch", "stem", "trunk", "", box=box.SIMPLE, pad_edge=False
    )
    remarks = []
    for row in report["encoders"]:
        prefix = f"{row['table']}: {row['prefix']}" if row["table"] else row["prefix"]
        trunk = f"{row['matched']}/{row['expected']}"
        taken = "taken by default" if row["default"] else ""
        cells = (row["encoder"], shown(prefix), row["arch"], row["stem"], trunk, taken)
        table.add_row(*map(escape, cells))
        remarks += [f"{row['encoder']}: {note}" for note in _notes(row)]
    if report["encoders"]:
        console.print(table, soft_wrap=False)
    else:
        console.print("trunk     none recognised")
    for remark in remarks:
        console.print(remark)
    where = "beside" if report["encoders"] else "holds"
    for left in report["leftovers"]:
        size = f"{left['tensors']} tensors, {left['elements']} elements"
        console.print(
            f"{where:9} {left['group']}: {size} ({shown(str(left['example']))})"
        )
    if not report["importable"]:
        console.print(f"cannot be imported as it is: {report['why_not']}")
        return
    pixels = report["pixels"]
    for line in _allowed(report["allows"]):
        console.print(line)
    console.print(
        f"pixels    {pixels['order']}, mean {pixels['mean']}, std {pixels['std']}"
    )
    # 0 epochs are known: a random trunk has them
    epochs = "not in the file" if report["epochs"] is None else report["epochs"]
    console.print(f"method    {report['method']}, epochs {epochs}")
    console.print(f"digest    {report['digest']}")


def _allowed(allows: Allows) -> list[str]:
    """Return the uses of the trunk, a line each."""
    out = [f"reading   {allows['reading']}: {allows['feature_dim']} numbers an image"]
    if allows["size"] is not None:
        rule = allows["positions"] or "RULE"
        by = f"; of others with `import --pos {rule}`" if allows["positions"] else ""
        out.append(
            f"takes     images of {allows['size']} x {allows['size']} pixels{by}"
        )
    elif allows["divisor"] > 1:
        out.append(f"takes     images of any size, in multiples of {allows['divisor']}")
    else:
        out.append("takes     images of any size")
    if allows["strides"]:
        strides = ", ".join(map(str, allows["strides"]))
        out.append(f"detection on maps at strides {strides}")
    else:
        out.append("detection none: it has no maps")
    return out


def _notes(row: EncoderReport) -> list[str]:
    """Remarks about one trunk."""
    notes = []
    for what, keys in row["problems"].items():
        notes.append(f"{len(keys)} {what}: {first_names(keys)}")
    if row["missing_statistics"] == "all":
        notes.append("no batch-norm statistics")
    if row["absent_counters"]:
        notes.append(
            f"{row['absent_counters']} batch counters are not in the file and become 0"
        )
    return [*notes, *(f"untrained? {sign}" for sign in row["untrained"])]


def run_import(request: ImportRequest) -> None:
    if request.out.suffix.lower() in absent.SUFFIXES[1:]:
        raise BadInput(
            f"--out {request.out}: a checkpoint is written as safetensors; call it"
            f" {request.out.with_suffix('.safetensors').name}"
        )
    if request.published is not None:
        published.lookup(request.published)
    arch = request.arch
    rename = request.rename
    if request.check is not None:
        checked = _checked(request)
        for line in checked.told():
            print(f"{request.file}: {line}")
        arch = arch or checked.arch
        rename = rename or checked.rename
    checkpoint = read(
        request.file,
        encoder=request.encoder,
        method=request.method,
        epochs=request.epochs,
        name=request.name,
        published=request.published,
        stem=request.stem,
        allow_missing_statistics=request.allow_missing_statistics,
        arch=arch,
        rename=rename,
        reading=request.reading,
        pixels=request.pixels,
        pos=request.pos,
    )
    for name in request.trained_on or ():
        if not re.fullmatch(r"[^\s:]+(:[^\s:]+)?", name):
            raise BadInput(f"--trained-on {name}: DATASET or DATASET:SPLIT")
    if request.trained_on:
        provenance = {**checkpoint.provenance, "trained_on": list(request.trained_on)}
        checkpoint = checkpoint.replace(provenance=provenance)
    for sign in untrained_signs(checkpoint.state_dict):
        log.warning("warning: %s looks untrained: %s", request.file, sign)
    if remark := checkpoint.provenance.get(PIXELS_FROM):
        log.warning(f"{request.file}: {remark}")
    # What nobody has chosen is said, and so is what stays behind
    if arch and request.check is None:
        told = checkpoint.family.twins(
            checkpoint.arch, pixels_told=request.pixels is not None
        )
        if told:
            log.warning(
                f"warning: {request.file} {told}; --check FOLDER tells which it is"
            )
    if renamed := checkpoint.provenance.get("renamed"):
        print(f"{request.file}: its {len(renamed)} names -> those of {arch}:")
        width = max(map(len, renamed))
        for key, new in renamed.items():
            print(f"  {shown(key):{width}}  {new}")
    for line in _beside(checkpoint):
        print(f"{request.file}: {line}")
    checkpoint.save(request.out)
    about = checkpoint.provenance
    epochs = "unknown" if checkpoint.epochs is None else checkpoint.epochs
    how = checkpoint.reading
    if checkpoint.family.tensors_say_all:
        how = f"{checkpoint.stem} stem"
    print(
        f"{request.out}: '{checkpoint.name}', method {checkpoint.method}, {checkpoint.arch}, {how}, "
        f"{len(checkpoint.state_dict)} tensors; format {about.get('format', 'backbench')}, encoder "
        f"{about.get('encoder', 'trunk')} from '{about.get('prefix', '')}'; "
        f"epochs {epochs}; "
        f"digest {checkpoint.digest[:12]}"
    )


def _beside(checkpoint: Checkpoint) -> list[str]:
    """Say what comes along beside the trunk, and what stays behind, a line each."""
    from backbench.weights.families import timm_classifier

    out = []
    head = timm_classifier.own_head(checkpoint)
    others = list(checkpoint.heads)
    if head is not None:
        others = [name for name in others if name not in head.tensors]
        use = "no part of the features"
        if head.classes == timm_classifier.CLASSES:
            use += "; `backbench ood --protocol ood_own` scores pictures by it"
        out.append(
            f"its classifier of {head.classes} classes comes along ({first_names(head.tensors)};"
            f" digest {head.digest[:12]}), {use}"
        )
    if others:
        out.append(
            f"beside the trunk {first_names(others)}: kept, but no part of its features"
        )
    left = checkpoint.provenance.get("left_behind")
    if left:
        out.append(f"left behind: {'; '.join(map(shown, left))}")
    return out


def _checked(request: ImportRequest) -> PictureCheck:
    """Ask pictures of known classes which network the file is."""
    from backbench.weights.families import picture_check

    assert request.check is not None
    file: str | Path = request.file
    if hub_files.is_name(file):
        file = hub_files.held(file).path
    tables = tables_of(open_file(file).tree)
    try:
        return picture_check.check(tables, request.check, request.arch or "")
    except BadInput as error:
        raise BadInput(f"{request.file}: {error}") from None


def run_export(request: ExportRequest) -> None:
    checkpoint = read(request.checkpoint)
    out: Path = request.out
    load = exporting.loaded_by(checkpoint, request.format, request.checkpoint)
    if request.format == "detectron2":
        exporting.write_detectron2(checkpoint, out)
        units = exporting.detectron2_pixels(checkpoint.pixels)
        mean = ",".join(f"{value:.3f}" for value in units["pixel_mean"])
        std = ",".join(f"{value:.3f}" for value in units["pixel_std"])
        print(
            f"--engine detectron2 MODEL.WEIGHTS {out} MODEL.PIXEL_MEAN [{mean}] MODEL.PIXEL_STD [{std}]"
            f" INPUT.FORMAT {checkpoint.pixels.order} {load}"
        )
        return
    exporting.write_state_dict(checkpoint, out)
    # What a user of the tensors has to know besides them stands in the json.
    beside = "reading, pixel statistics"
    if checkpoint.family.tensors_say_all:
        beside = "pixel statistics"
    count = f"{len(checkpoint.state_dict)} tensors for {load}"
    print(f"{out}: {count}; {beside} in {out.name}.json")
