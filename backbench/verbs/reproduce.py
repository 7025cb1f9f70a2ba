"""`backbench reproduce`: public checkpoints, measured and held to what is printed of them.

    files        are there, fetched (--download), and the published ones as far as a digest is printed
    checkpoints  RUNS/checkpoints/<name>.safetensors, each imported once
    jobs         `launch run` of one grid for each part of the list: RUNS/reproduce/<list>-<n>.yaml
    outcome      RUNS/reproduce/<list>.md, .json, and <list>.zip to send back

Each step finds what those before it left, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.datasets import availability as datasets_asked
from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput
from backbench.launch.grid import Grid
from backbench.recipes import config
from backbench.reproduce import bundle, local_files, outcome, selection
from backbench.reproduce.bundle import Measured
from backbench.reproduce.local_files import FoundFile
from backbench.reproduce.outcome import Covered
from backbench.reproduce.selection import ListPart, ReproductionList
from backbench.runs import atomic
from backbench.runs.terminal import log
from backbench.weights import header

FOLDER = "reproduce"  # below RUNS


def run(args: argparse.Namespace) -> int:
    """The verb `reproduce`."""
    if args.check is not None:
        return _check(args.check)
    if args.list is None:
        return _list()
    if args.data is None or not args.data.is_dir():
        raise BadInput(
            f"--data {args.data or 'ROOT'}: no such folder; it holds one folder per dataset"
            " (`backbench data list`)"
        )
    listed = selection.read_list(args.list)
    names = selection.chosen(args.only, listed)
    every = _covered(listed, args.lists)  # refuses what a part lacks before any part runs
    found = _files(args, listed, names)
    _say_cost(listed, found)
    grids = _grids(args, listed, found, _checkpoints(args, found))
    status = 0
    for grid in grids:
        status = max(status, _launch(args, grid))
        if status == EXIT_PREEMPTED:
            return status
    if args.dry_run:
        return status
    lines = _write(args, listed, {name: every[name] for name in names}, found)
    bad = any(line.verdict in (outcome.OUTSIDE, outcome.ANOTHER) for line in lines)
    return status or (EXIT_FAILED if bad else 0)


def _list() -> int:
    for name in sorted(config.recipe_names(selection.KIND)):
        one = selection.read_list(name)
        hours = one.gpu_hours(list(one.checkpoints))
        print(f"{name:<8} {len(one.checkpoints)} checkpoints, {one.title}: about {hours:.1f}"
              f" GPU-hours ({one.estimate})")  # fmt: skip
    return 0


# --- files and checkpoints ----------------------------------------------------------------------


def _files(
    args: argparse.Namespace, listed: ReproductionList, names: Sequence[str]
) -> dict[str, FoundFile]:
    note = args.out / FOLDER / local_files.NOTE
    if args.download:
        local_files.fetch_missing(listed, names, args.files, note)
    found = local_files.find(listed, names, args.files, note)
    for name in names:
        about = listed.files[name]
        if name in found:
            log.info(f"{name}: {found[name].path}, {found[name].checked_by}")
            continue
        how = about.by_hand or "--download fetches it"
        log.warning(f"{name}: no {about.where(args.files, name)}; {about.page}: {how}")
    if not found:
        raise BadInput(
            f"none of the files of '{listed.name}' is below {args.files}; add --download, or put"
            f" them there as NAME/FILE ({_example(listed, names)})"
        )
    return found


def _example(listed: ReproductionList, names: Sequence[str]) -> str:
    return f"{names[0]}/{listed.files[names[0]].file}"


def _checkpoints(args: argparse.Namespace, found: Mapping[str, FoundFile]) -> dict[str, Path]:
    """Each file as a checkpoint of ours; those that are there already are left as they are."""
    made = {}
    for name, file in found.items():
        out = args.out / "checkpoints" / f"{name}.safetensors"
        if args.dry_run and not out.exists():
            made[name] = file.path
            continue
        made[name] = out
        provenance = header.about(out).get("provenance") if out.is_file() else None
        of = provenance.get("sha256") if isinstance(provenance, Mapping) else None
        if of == file.sha256:
            continue
        from backbench.weights.importing import read  # torch, for those who need it

        about = file.about
        checkpoint = read(
            file.path,
            name=name,
            method=about.method,
            encoder=about.encoder,
            epochs=about.epochs,
            published=about.rows or None,
        )
        checkpoint.save(out)
        log.info(f"{name}: imported, {checkpoint.arch}, digest {checkpoint.digest[:12]}")
    return made


# --- jobs ---------------------------------------------------------------------------------------


def _grids(
    args: argparse.Namespace,
    listed: ReproductionList,
    found: Mapping[str, FoundFile],
    checkpoints: Mapping[str, Path],
) -> list[Path]:
    """One grid for each part that some of the files are in, as a file that `launch run` takes."""
    paths = []
    for number, part in enumerate(listed.parts):
        names = listed.of_part(part, list(found))
        if not names:
            continue
        content = {**_grid(args, listed, part, number), "checkpoints": []}
        content["checkpoints"] = [str(checkpoints[name].resolve()) for name in names]
        if args.cluster in (
            "local",
            "debug",
        ):  # elsewhere data may lie where this machine cannot see
            _refuse_missing_data(content, args.data)
        path = args.out / FOLDER / f"{content['name']}.yaml"
        atomic.write_text(path, json.dumps(content, indent=1) + "\n")  # JSON is YAML
        paths.append(path)
    return paths


def _grid(
    args: argparse.Namespace, listed: ReproductionList, part: ListPart, number: int
) -> dict[str, Any]:
    content: dict[str, Any] = {"name": f"{listed.name}-{number}", "evaluate": list(part.evaluate)}
    if args.lists.is_dir():
        content["lists"] = str(args.lists.resolve())
    return content


def _refuse_missing_data(content: Mapping[str, Any], root: Path) -> None:
    grid = config.build(Grid, content, where=str(content["name"]))
    probes = {dataset for task, dataset in selection.measures(grid) if not task.endswith("_rcnn")}
    datasets_asked.all_there(sorted(probes), root)


def _launch(args: argparse.Namespace, grid: Path) -> int:
    words = ["launch", "run", str(grid), *args.overrides, "--cluster", args.cluster]
    words += ["--data", str(args.data), "--out", str(args.out)]
    return int(args.command([*words, "--dry-run"] if args.dry_run else words) or 0)


# --- the outcome --------------------------------------------------------------------------------


def _say_cost(listed: ReproductionList, found: Mapping[str, FoundFile]) -> None:
    hours = listed.gpu_hours(list(found))
    log.info(f"about {hours:.1f} GPU-hours for {len(found)} checkpoints ({listed.estimate})")


def _covered(listed: ReproductionList, lists: Path) -> dict[str, set[tuple[str, str]]]:
    """What the list measures of each checkpoint."""
    covered: dict[str, set[tuple[str, str]]] = {name: set() for name in listed.checkpoints}
    for number, part in enumerate(listed.parts):
        content = {
            "name": f"{listed.name}-{number}",
            "evaluate": list(part.evaluate),
            "lists": str(lists) if lists.is_dir() else None,
        }
        grid = config.build(Grid, content, where=f"list {listed.name}")
        what = set(selection.measures(grid))
        for name in listed.of_part(part, list(listed.checkpoints)):
            covered[name] |= what
    return covered


def _write(
    args: argparse.Namespace,
    listed: ReproductionList,
    covered: Covered,
    found: Mapping[str, FoundFile],
) -> list[outcome.OutcomeLine]:
    digests = {}
    for name in found:
        digest = header.digest(args.out / "checkpoints" / f"{name}.safetensors")
        if digest is not None:
            digests[name] = digest
    lines = outcome.outcome(listed, covered, covered, digests, [args.out])
    place = args.out / FOLDER / listed.name
    page = outcome.markdown(listed, lines)
    atomic.write_text(place.with_suffix(".md"), page)
    atomic.write_json(place.with_suffix(".json"), [line.plain() for line in lines])
    sent = place.with_suffix(".zip")
    bundle.write(sent, Measured(listed, covered, found, digests, lines), args.out)
    print(page, end="")
    log.info(f"wrote {place}.md and .json; {sent} is what to send back (docs/reproduce.md)")
    return lines


def _check(path: Path) -> int:
    checked = bundle.check(path)
    print(outcome.markdown(checked.asked, checked.lines), end="")
    for remark in checked.remarks:
        print(f"REMARK {remark}")
    print(f"{path}: whole, made {checked.made} by {checked.code}; its table follows from its rows")
    return 0
