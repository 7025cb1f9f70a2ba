"""The bundle that is sent back: one zip file with the numbers, their checkpoints and their table.

    manifest.json       the format, the list's name, code and time; each checkpoint; sha256 of the rest
    list.json           the list
    table.json, .md     every printed number with its verdict
    results/N/          the rows of those checkpoints, one folder per run

It holds no weights and no images. Rows hold the command, its folder and the machine's hardware, as
results.jsonl does (docs/results.md).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput, Failed
from backbench.published import timm_scores
from backbench.published.judge import ListVerdict, judge_list
from backbench.published.public_files import FoundFile, unlike
from backbench.published.reproduction_lists import (
    KIND,
    Covered,
    ReproductionList,
    read_list,
    timm_list,
)
from backbench.published.tables import list_page
from backbench.recipes import config
from backbench.records import store
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE
from backbench.untrusted import jsons, opening, printable

FORMAT = "backbench-reproduction-1"
MANIFEST, LIST, TABLE, PAGE = "manifest.json", "list.json", "table.json", "table.md"
# The largest bundle that is read, unpacked
MOST_FILES = 2_000
MOST_BYTES = 64 * opening.MEGABYTE
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same for all members: the manifest has the time


@dataclass(frozen=True, kw_only=True)
class StatedFile:
    """One file that was measured, as a manifest has it."""

    file: str
    page: str
    bytes: int
    sha256: str
    md5: str
    checked_by: str
    digest: str  # of the checkpoint that was imported from it


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json. A new key needs a new FORMAT, because unknown keys are refused."""

    format: str
    list: str
    made: str
    code: str
    covered: dict[str, tuple[tuple[str, str], ...]]  # checkpoint -> (task, dataset)
    checkpoints: dict[str, StatedFile]
    files: dict[str, str]  # member -> sha256


def write(
    path: Path,
    runs: Path,
    *,
    listed: ReproductionList,
    covered: Covered,
    files: Mapping[str, FoundFile],
    digests: Mapping[str, str],
    lines: Sequence[ListVerdict],
) -> None:
    """Write the bundle, completely or not at all; `digests` are those of the imported checkpoints."""
    members = {
        LIST: _json(config.to_dict(listed)),
        TABLE: _json(list(map(dataclasses.asdict, lines))),
        PAGE: list_page(listed, lines).encode(),
        **_results(runs, frozenset(digests.values())),
    }
    checkpoints = {}
    for name, file in files.items():
        checkpoints[name] = StatedFile(
            file=file.about.file,
            page=file.about.page,
            bytes=file.size,
            sha256=file.sha256,
            md5=file.md5,
            checked_by=file.checked_by,
            digest=digests[name],
        )
    manifest = Manifest(
        format=FORMAT,
        list=listed.name,
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        code=store.code_revision(),
        covered={name: tuple(sorted(what)) for name, what in covered.items()},
        checkpoints=checkpoints,
        files={
            name: hashlib.sha256(data).hexdigest() for name, data in members.items()
        },
    )
    with (
        atomic.atomic_path(path) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        stated = _json(dataclasses.asdict(manifest))
        for name, data in {MANIFEST: stated, **members}.items():
            info = zipfile.ZipInfo(name, ZIP_TIME)
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)


def _results(runs: Path, digests: frozenset[str]) -> dict[str, bytes]:
    """Return the files of rows as the bundle has them, with the rows of these checkpoints alone."""
    out: dict[str, bytes] = {}
    for file in store.files_below(runs):
        kept = []
        for line in file.read_bytes().splitlines():
            try:
                if jsons.decode(line)["checkpoint"] in digests:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                # A torn line is no row. The board named it when the verdicts were made.
                continue
        if kept:
            out[f"results/{len(out)}/{RESULTS_FILE}"] = b"\n".join(kept) + b"\n"
    return out


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


# ---- checking a bundle


@dataclass(frozen=True)
class Checked:
    """A bundle whose parts agree with its manifest, and whose table follows from its rows."""

    listed: ReproductionList
    lines: Sequence[ListVerdict]
    code: str
    made: str
    remarks: Sequence[str]  # what whoever receives it should know


# A bundle comes from somebody else: a value of an unexpected type in it, or a damaged zip around it,
# may raise any of these.
_MALFORMED = (
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    RuntimeError,
    EOFError,
    zlib.error,
)


def check(path: Path) -> Checked:
    """Check a bundle.

    Raises BadInput if it is no bundle or was changed after it was made, and Failed if its table does
    not follow from its rows.
    """
    try:
        return _checked(path)
    except _MALFORMED as error:
        said = printable.shown(f"{type(error).__name__}: {error}", 100)
        raise BadInput(
            f"{path}: not as `backbench reproduce` writes it ({said})"
        ) from None


def _checked(path: Path) -> Checked:
    # 1. The members are those of the manifest, unchanged.
    members = _read(path)
    stated = _decoded(path, members, MANIFEST)
    if stated.get("format") != FORMAT:
        raise BadInput(
            f"{path}: no bundle of `backbench reproduce` (its format is not {FORMAT})"
        )
    manifest = config.build(Manifest, stated, where=f"{path}: {MANIFEST}")
    for name in sorted((members.keys() ^ manifest.files.keys()) - {MANIFEST}):
        raise BadInput(f"{path}: {name} is not in both the bundle and its manifest")
    for name, digest in manifest.files.items():
        if hashlib.sha256(members[name]).hexdigest() != digest:
            raise BadInput(
                f"{path}: {name} was changed after the bundle was made (its sha256)"
            )
    # 2. The rows lead to the same table here.
    given = _decoded(path, members, LIST)
    listed = config.build(ReproductionList, given, where=f"{path}: {LIST}")
    lines = _again(path, listed, manifest, members)
    claimed = jsons.decode(members[TABLE])
    follows = jsons.decode(_json(list(map(dataclasses.asdict, lines))))
    if not _same(claimed, follows):
        raise Failed(
            f"{path}: its {TABLE} does not follow from its rows; ask for them again"
        )
    return Checked(
        listed=listed,
        lines=lines,
        code=printable.shown(manifest.code, 80),
        made=printable.shown(manifest.made, 80),
        remarks=_remarks(listed, manifest.checkpoints),
    )


def _read(path: Path) -> dict[str, bytes]:
    """Return the members of a zip by their names. Raises BadInput if it is too large or damaged."""
    try:
        with zipfile.ZipFile(opening.open_regular(path, most=MOST_BYTES)) as archive:
            infos = archive.infolist()
            unpacked = sum(info.file_size for info in infos)
            if len(infos) > MOST_FILES or unpacked > MOST_BYTES:
                raise BadInput(
                    f"{path}: larger than any bundle ({MOST_BYTES >> 20} MB unpacked)"
                )
            return {info.filename: archive.read(info) for info in infos}
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; give the zip of `backbench reproduce`"
        ) from None
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise BadInput(
            f"{path}: not readable as a bundle ({error}); fetch it again"
        ) from None


def _decoded(path: Path, members: Mapping[str, bytes], name: str) -> config.Recipe:
    """Return the JSON table in a member. Raises BadInput if there is none."""
    if name not in members:
        raise BadInput(f"{path}: no bundle of `backbench reproduce` (no {name} in it)")
    try:
        value = jsons.decode(members[name])
    except ValueError as error:
        raise BadInput(f"{path}: {name}: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: {name} must be a table")
    return value


def _again(
    path: Path,
    listed: ReproductionList,
    manifest: Manifest,
    members: Mapping[str, bytes],
) -> list[ListVerdict]:
    """Make the table again, from the rows alone."""
    covered = {name: frozenset(pairs) for name, pairs in manifest.covered.items()}
    for name in sorted(covered.keys() - listed.checkpoints.keys()):
        raise BadInput(
            f"{path}: {MANIFEST}: '{name}' is none of the list's checkpoints"
        )
    digests = {name: about.digest for name, about in manifest.checkpoints.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = sorted(name for name in members if name.startswith("results/"))
        for number, name in enumerate(rows):
            # The folder is a number, as a name in a zip may lead anywhere.
            (root / str(number)).mkdir()
            (root / str(number) / RESULTS_FILE).write_bytes(members[name])
        return judge_list(listed, covered, digests, [root])


def _same(a: object, b: object) -> bool:
    """Return True if two JSON values are equal, numbers to nine digits."""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def _remarks(
    listed: ReproductionList, checkpoints: Mapping[str, StatedFile]
) -> list[str]:
    """Say if the list is not the shipped one, and which files do not have the printed digest."""
    own: ReproductionList | None = None
    # timm's list is refused for a model of which timm prints nothing: then it is none of ours.
    with contextlib.suppress(BadInput):
        if listed.name in timm_scores.LISTS:
            own = timm_list(listed.name, list(listed.checkpoints))
        elif listed.name in config.recipe_names(KIND):
            own = read_list(listed.name)
    remarks = []
    if own is None:
        remarks.append(f"the list '{listed.name}' is none that is shipped here")
    elif config.to_dict(own) != config.to_dict(listed):
        remarks.append(f"the list '{listed.name}' is not as it is shipped here")
    for name, stated in checkpoints.items():
        wrong = unlike(listed.files[name], stated.sha256, stated.md5)
        if wrong:
            remarks.append(f"{name}: {wrong}")
    return remarks
