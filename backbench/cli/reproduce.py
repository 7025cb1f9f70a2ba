"""`backbench reproduce`: re-measures public checkpoints and compares with their published results.

    files        found, or fetched (--download), and compared with the printed digests
    checkpoints  RUNS/checkpoints/<name>.safetensors, each imported once
    jobs         `launch run` of one grid for each part of the list: RUNS/reproduce/<list>-<n>.yaml
    outcome      RUNS/reproduce/<list>.md, .json, and <list>.zip to send back

Each step keeps what those before it left, so the same command continues.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backbench.datasets import availability
from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput, nearest
from backbench.published import bundle, outcome, public_files, selection, timm_scores
from backbench.published.outcome import Covered
from backbench.published.public_files import FoundFile
from backbench.published.selection import ReproductionList
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
        checked = bundle.check(request.check)
        print(outcome.markdown(checked.listed, checked.lines), end="")
        for remark in checked.remarks:
            print(f"REMARK {printable.shown(remark, 400)}")
        made = f"made {checked.made} by {checked.code}"
        print(f"{request.check}: whole, {made}; its table follows from its rows")
        return Outcome(document=checked.lines)
    if request.list is None:
        return Outcome(document=_print_lists())
    # 1. The list; a mistake in any part of it is refused before any part runs.
    if request.list in timm_scores.LISTS:
        listed = selection.timm_list(request.list, request.models)
    elif request.models:
        raise BadInput(f"--models is for {', '.join(timm_scores.LISTS)}; give --only")
    elif request.list.startswith("timm-"):
        raise BadInput(f"{request.list}: {nearest(request.list, timm_scores.LISTS)}")
    else:
        listed = selection.read_list(request.list)
    for name in request.only:
        if name not in listed.checkpoints:
            raise BadInput(f"--only {name}: {nearest(name, listed.checkpoints)}")
    if request.data is None or not request.data.is_dir():
        holds = "it holds one folder per dataset (`backbench data list`)"
        raise BadInput(f"--data {request.data or 'ROOT'}: no such folder; {holds}")
    names = [
        name for name in listed.checkpoints if not request.only or name in request.only
    ]
    covered: dict[str, set[tuple[str, str]]] = {name: set() for name in names}
    for number, part in enumerate(listed.parts):
        measured = selection.measures(
            selection.part_grid(listed, number, request.lists)
        )
        for name in listed.of_part(part, names):
            covered[name] |= measured
    # 2. The files, and the checkpoints made of them.
    note = request.out / FOLDER / public_files.DIGESTS_FILE
    files = public_files.find(
        listed,
        names,
        request.files,
        note=note,
        download=request.download,
        dry_run=request.dry_run,
    )
    hours = listed.gpu_hours(list(files))
    log.info(
        f"about {hours:.1f} GPU-hours for {len(files)} checkpoints ({listed.estimate})"
    )
    checkpoints = _import_files(request, files)
    files = {name: files[name] for name in checkpoints}
    # 3. The jobs, one grid after the other.
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if request.dry_run else request.out / FOLDER
        for grid in _write_grids(request, folder, listed, checkpoints):
            words = [
                "launch",
                "run",
                str(grid),
                *request.overrides,
                "--cluster",
                request.cluster,
            ]
            words += ["--data", str(request.data), "--out", str(request.out)]
            words += ["--dry-run"] if request.dry_run else []
            status = max(status, run_command(words))
            if status == EXIT_PREEMPTED:
                return Outcome(status=status)
    if request.dry_run:
        return Outcome(status=status)
    # 4. The outcome.
    lines = _write_outcome(request, listed, covered, files)
    bad = any(line.verdict in (outcome.OUTSIDE, outcome.ANOTHER) for line in lines)
    return Outcome(status=status or (EXIT_FAILED if bad else 0), document=lines)


def _print_lists() -> list[dict[str, object]]:
    lists: list[dict[str, object]] = []
    for name in sorted(config.recipe_names(selection.KIND)):
        one = selection.read_list(name)
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
    """Import files not imported yet; a dry run takes them as they are. Cached timm models that
    cannot be imported are left out."""
    checkpoints = {}
    for name, file in files.items():
        out = request.out / "checkpoints" / f"{name}.safetensors"
        provenance = header.about(out).get("provenance") if out.is_file() else None
        same = (
            isinstance(provenance, Mapping) and provenance.get("sha256") == file.sha256
        )
        checkpoints[name] = out if same or not request.dry_run else file.path
        if same or request.dry_run:
            continue
        from backbench.weights.families.timm_model_names import PREFIX
        from backbench.weights.importing import read  # torch, for those who need it

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
            del checkpoints[name]
            continue
        checkpoint.save(out)
        log.info(
            f"{name}: imported, {checkpoint.arch}, digest {checkpoint.digest[:12]}"
        )
    return checkpoints


def _write_grids(
    request: ReproduceRequest,
    folder: Path,
    listed: ReproductionList,
    files: Mapping[str, Path],
) -> list[Path]:
    """One grid file for `launch run` for each part that measures some of the checkpoints."""
    paths = []
    for number, part in enumerate(listed.parts):
        names = listed.of_part(part, list(files))
        if not names:
            continue
        content = selection.part_grid(
            listed, number, request.lists, [files[name] for name in names]
        )
        # On a cluster, data may lie where this machine cannot see it.
        if request.cluster in ("local", "debug"):
            measured = selection.measures(content)
            probed = {
                dataset for task, dataset in measured if not task.endswith("_rcnn")
            }
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
) -> list[outcome.OutcomeLine]:
    """Writes the table, the same as JSON, and the bundle to send back; prints the table."""
    there = {
        n: header.digest(request.out / "checkpoints" / f"{n}.safetensors")
        for n in files
    }
    digests = {name: digest for name, digest in there.items() if digest is not None}
    lines = outcome.outcome(listed, covered, digests, [request.out])
    stem = request.out / FOLDER / listed.name
    page = outcome.markdown(listed, lines)
    atomic.write_text(stem.with_suffix(".md"), page)
    atomic.write_json(stem.with_suffix(".json"), list(map(dataclasses.asdict, lines)))
    sent = stem.with_suffix(".zip")
    bundle.write(
        sent,
        request.out,
        listed=listed,
        covered=covered,
        files=files,
        digests=digests,
        lines=lines,
    )
    print(page, end="")
    log.info(
        f"wrote {stem}.md and .json; {sent} is what to send back (docs/reproduce.md)"
    )
    return lines
