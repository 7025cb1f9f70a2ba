"""`backbench reproduce`: measure public checkpoints again and compare with what was published.

    files        found, or fetched (--download), and compared with the printed digests
    checkpoints  RUNS/checkpoints/<name>.safetensors, each imported once
    jobs         `launch run` of one grid for each part of the list: RUNS/reproduce/<list>-<n>.yaml
    outcome      RUNS/reproduce/<list>.md, .json, and <list>.zip to send back

Each step keeps what an earlier run of it left, so the same command continues.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backbench.datasets import availability, outside
from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput, nearest, no_folder
from backbench.published import (
    bundle,
    judge,
    public_files,
    reproduction_lists,
    tables,
    timm_scores,
)
from backbench.published.public_files import FoundFile
from backbench.published.reproduction_lists import Covered, ReproductionList
from backbench.recipes import config
from backbench.requests.options import Outcome
from backbench.requests.published import ReproduceRequest
from backbench.runs import atomic
from backbench.runs.terminal import log
from backbench.untrusted import printable
from backbench.weights import header

FOLDER = "reproduce"  # below RUNS


def run(
    request: ReproduceRequest, run_command: Callable[[Sequence[str]], int]
) -> Outcome:
    if request.check is not None:
        return _check_bundle(request.check)
    if request.list is None:
        return Outcome(document=_print_lists())
    # 1. The list. A mistake in any part of it is refused before any part runs.
    listed = _read_list(request.list, request.models)
    for name in request.only:
        if name not in listed.checkpoints:
            raise BadInput(f"--only {name}: {nearest(name, listed.checkpoints)}")
    if request.data is None or not request.data.is_dir():
        root = request.data or Path("ROOT")
        raise BadInput(
            f"--data {root}: {no_folder(root)}; it holds one folder per dataset"
            " (`backbench data list`)"
        )
    names = [
        name for name in listed.checkpoints if not request.only or name in request.only
    ]
    covered: dict[str, set[tuple[str, str]]] = {name: set() for name in names}
    for number, part in enumerate(listed.parts):
        grid = reproduction_lists.part_grid(listed, number, request.lists)
        measured = reproduction_lists.measures(grid)
        for name in listed.of_part(part, names):
            covered[name] |= measured
    datasets = {dataset for measured in covered.values() for _, dataset in measured}
    outside.refuse_inside(request.data, sorted(datasets), request.out)
    # 2. The files, and the checkpoints made of them.
    files = public_files.find(
        listed,
        names,
        request.files,
        note=request.out / FOLDER / public_files.DIGESTS_FILE,
        download=request.download,
        dry_run=request.dry_run,
    )
    hours = listed.gpu_hours(list(files))
    log.info(
        f"about {hours:.1f} GPU-hours for {len(files)} checkpoints ({listed.estimate})"
    )
    checkpoints = _import_files(request, files)
    files = {name: files[name] for name in checkpoints}
    # 3. The jobs, one grid after the other. A dry run leaves no grid behind.
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if request.dry_run else request.out / FOLDER
        for path in _write_grids(request, folder, listed, checkpoints):
            words = ["launch", "run", str(path), *request.overrides]
            words += ["--cluster", request.cluster]
            words += ["--data", str(request.data), "--out", str(request.out)]
            # Parts whose data are here run all the same
            words.append("--data-later")
            if request.dry_run:
                words.append("--dry-run")
            status = max(status, run_command(words))
            if status == EXIT_PREEMPTED:
                return Outcome(status=status)
    if request.dry_run:
        return Outcome(status=status)
    # 4. The outcome.
    verdicts = _write_outcome(request, listed, covered, files)
    bad = any(one.verdict in (judge.OUTSIDE, judge.ANOTHER) for one in verdicts)
    if status == 0 and bad:
        status = EXIT_FAILED
    return Outcome(status=status, document=verdicts)


def _check_bundle(path: Path) -> Outcome:
    """Check a bundle that somebody sent, and print its table and what is odd about it."""
    checked = bundle.check(path)
    print(tables.list_page(checked.listed, checked.lines), end="")
    for remark in checked.remarks:
        print(f"REMARK {printable.shown(remark, 400)}")
    print(
        f"{path}: whole, made {checked.made} by {checked.code};"
        " its table follows from its rows"
    )
    return Outcome(document=checked.lines)


def _read_list(name: str, models: Sequence[str]) -> ReproductionList:
    """Return a shipped list, one in a YAML file, or one of timm's (which may be of `models`)."""
    if name in timm_scores.LISTS:
        return reproduction_lists.timm_list(name, models)
    if models:
        raise BadInput(f"--models is for {', '.join(timm_scores.LISTS)}; give --only")
    if name.startswith("timm-"):
        raise BadInput(f"{name}: {nearest(name, timm_scores.LISTS)}")
    return reproduction_lists.read_list(name)


def _print_lists() -> list[dict[str, object]]:
    """Print a line for each list; return the shipped ones as fields."""
    lists: list[dict[str, object]] = []
    for name in sorted(config.recipe_names(reproduction_lists.KIND)):
        one = reproduction_lists.read_list(name)
        hours = one.gpu_hours(list(one.checkpoints))
        print(
            f"{name:<17} {len(one.checkpoints)} checkpoints, {one.title}: about {hours:.1f}"
            f" GPU-hours ({one.estimate})"
        )
        lists.append(
            {"name": name, "checkpoints": list(one.checkpoints), "gpu_hours": hours}
        )
    count = len(timm_scores.scores())
    print(
        f"{', '.join(timm_scores.LISTS)}: {count:,} counts of right images that timm prints of its"
        " own classifiers, for the models in the Hub's cache or --models NAME.TAG ..."
    )
    return lists


def _import_files(
    request: ReproduceRequest, files: Mapping[str, FoundFile]
) -> dict[str, Path]:
    """Import the files that are not imported yet, and return the checkpoints.

    A dry run imports nothing, and returns the files themselves instead. A timm model of the Hub's
    cache that cannot be imported is left out, unless it was named by --models.
    """
    checkpoints = {}
    for name, file in files.items():
        out = request.out / "checkpoints" / f"{name}.safetensors"
        if _is_import_of(out, file):
            checkpoints[name] = out
            continue
        if request.dry_run:
            checkpoints[name] = file.path
            continue
        # These need torch, which takes seconds to import.
        from backbench.weights.families.timm_model_names import PREFIX
        from backbench.weights.importing import read

        about = file.about
        try:
            checkpoint = read(
                PREFIX + about.timm if about.timm else file.path,
                name=name,
                method=about.method,
                encoder=about.encoder,
                reading=about.reading,
                pixels=about.pixels,
                epochs=about.epochs,
                published=about.rows or None,
            )
        except BadInput as error:
            if about.timm is None or request.models:
                raise
            log.warning(f"{name}: left out: {printable.shown(str(error), 300)}")
            continue
        checkpoint.save(out)
        checkpoints[name] = out
        log.info(
            f"{name}: imported, {checkpoint.arch}, digest {checkpoint.digest[:12]}"
        )
    return checkpoints


def _is_import_of(checkpoint: Path, file: FoundFile) -> bool:
    """Return True if the checkpoint is there and was imported from this very file."""
    if not checkpoint.is_file():
        return False
    provenance = header.about(checkpoint).get("provenance")
    return isinstance(provenance, Mapping) and provenance.get("sha256") == file.sha256


def _write_grids(
    request: ReproduceRequest,
    folder: Path,
    listed: ReproductionList,
    files: Mapping[str, Path],
) -> list[Path]:
    """Write a grid file for `launch run` for each part that measures some of the checkpoints."""
    paths = []
    for number, part in enumerate(listed.parts):
        of_part = [files[name] for name in listed.of_part(part, list(files))]
        if not of_part:
            continue
        content = reproduction_lists.part_grid(listed, number, request.lists, of_part)
        # On a cluster, data may lie where this machine cannot see it.
        if request.cluster in ("local", "debug"):
            probed = set()
            for task, dataset in reproduction_lists.measures(content):
                if not task.endswith("_rcnn"):
                    probed.add(dataset)
            assert request.data is not None  # `run` has refused that
            availability.all_there(sorted(probed), request.data)
        path = folder / f"{content['name']}.yaml"
        atomic.write_text(path, json.dumps(content, indent=1) + "\n")  # JSON is YAML
        paths.append(path)
    return paths


def _write_outcome(
    request: ReproduceRequest,
    listed: ReproductionList,
    covered: Covered,
    files: Mapping[str, FoundFile],
) -> list[judge.ListVerdict]:
    """Write the table, the same as JSON, and the bundle to send back; print the table."""
    digests = {}
    for name in files:
        checkpoint = request.out / "checkpoints" / f"{name}.safetensors"
        digest = header.digest(checkpoint)
        if digest is not None:
            digests[name] = digest
    verdicts = judge.judge_list(listed, covered, digests, [request.out])
    stem = request.out / FOLDER / listed.name
    page = tables.list_page(listed, verdicts)
    as_json = [dataclasses.asdict(one) for one in verdicts]
    atomic.write_text(stem.with_suffix(".md"), page)
    atomic.write_json(stem.with_suffix(".json"), as_json)
    sent = stem.with_suffix(".zip")
    bundle.write(
        sent,
        request.out,
        listed=listed,
        covered=covered,
        files=files,
        digests=digests,
        lines=verdicts,
    )
    print(page, end="")
    log.info(
        f"wrote {stem}.md and .json; {sent} is what to send back (docs/reproduce.md)"
    )
    return verdicts
