"""The bundle that is sent back: one zip file with the numbers, their checkpoints and their table.

    manifest.json       the format, the list's name, code and time; each checkpoint; sha256 of the rest
    list.json           the list
    table.json, .md     the outcome
    results/N/          the rows of those checkpoints, one folder per run

No weights and no images. Rows hold the command, its folder and the machine's hardware, as
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
from backbench.published.outcome import Covered, OutcomeLine, markdown, outcome
from backbench.published.public_files import FoundFile, unlike
from backbench.published.selection import KIND, ReproductionList, read_list, timm_list
from backbench.recipes import config
from backbench.records import store
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE
from backbench.untrusted import jsons, opening, printable

FORMAT = "backbench-reproduction-1"
MANIFEST, LIST, TABLE, PAGE = "manifest.json", "list.json", "table.json", "table.md"
MOST_FILES, MOST_BYTES = 2_000, 64 * opening.MEGABYTE  # of a bundle, unpacked
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same for all bundles: the manifest has the time


@dataclass(frozen=True, kw_only=True)
class StatedFile:
    """One file that was measured, as a manifest has it; `digest` is the checkpoint's made of it."""

    file: str
    page: str
    bytes: int
    sha256: str
    md5: str
    checked_by: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json. A new key needs a new FORMAT: one that is unknown is refused."""

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
    lines: Sequence[OutcomeLine],
) -> None:
    """Write the bundle, completely or not at all; `digests` are of the imported checkpoints."""
    members = {
        LIST: _json(config.to_dict(listed)),
        TABLE: _json(list(map(dataclasses.asdict, lines))),
        PAGE: markdown(listed, lines).encode(),
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
        for name, data in {
            MANIFEST: _json(dataclasses.asdict(manifest)),
            **members,
        }.items():
            info = zipfile.ZipInfo(name, ZIP_TIME)
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)


def _results(runs: Path, digests: frozenset[str]) -> dict[str, bytes]:
    """The rows of these checkpoints, by their name in the bundle; other checkpoints' stay here."""
    out: dict[str, bytes] = {}
    for file in store.files_below(runs):
        kept = []
        for line in file.read_bytes().splitlines():
            try:
                if jsons.decode(line)["checkpoint"] in digests:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # a torn line: the board of this machine has named it
        if kept:
            out[f"results/{len(out)}/{RESULTS_FILE}"] = b"\n".join(kept) + b"\n"
    return out


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


# --- checking a bundle --------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A bundle whose parts agree with its manifest, and whose table follows from its rows."""

    listed: ReproductionList
    lines: Sequence[OutcomeLine]
    code: str
    made: str
    remarks: Sequence[str]  # hints for whoever receives it


# What values of other types than a bundle's raise, in it or in the zip around it
_MALFORMED = (
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    zlib.error,
)


def check(path: Path) -> Checked:
    """Check a bundle. BadInput if it was changed, Failed if its table does not follow."""
    try:
        return _checked(path)
    except (*_MALFORMED, RuntimeError, EOFError) as error:
        said = printable.shown(f"{type(error).__name__}: {error}", 100)
        raise BadInput(
            f"{path}: not as `backbench reproduce` writes it ({said})"
        ) from None


def _checked(path: Path) -> Checked:
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
    given = _decoded(path, members, LIST)
    listed = config.build(ReproductionList, given, where=f"{path}: {LIST}")
    lines = _again(path, listed, manifest, members)
    claimed = jsons.decode(members[TABLE])
    if not _same(claimed, jsons.decode(_json(list(map(dataclasses.asdict, lines))))):
        raise Failed(
            f"{path}: its {TABLE} does not follow from its rows; ask for them again"
        )
    remarks = _remarks(listed, manifest.checkpoints)
    code, made = printable.shown(manifest.code, 80), printable.shown(manifest.made, 80)
    return Checked(listed, lines, code, made, remarks)


def _read(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(opening.open_regular(path, most=MOST_BYTES)) as archive:
            infos = archive.infolist()
            if (
                len(infos) > MOST_FILES
                or sum(info.file_size for info in infos) > MOST_BYTES
            ):
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
) -> list[OutcomeLine]:
    """The table, made again from the rows alone."""
    covered = {name: frozenset(pairs) for name, pairs in manifest.covered.items()}
    for name in sorted(covered.keys() - listed.checkpoints.keys()):
        raise BadInput(
            f"{path}: {MANIFEST}: '{name}' is none of the list's checkpoints"
        )
    digests = {name: about.digest for name, about in manifest.checkpoints.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = sorted(name for name in members if name.startswith("results/"))
        for number, name in enumerate(
            rows
        ):  # by number: a name in a zip may lead anywhere
            (root / str(number)).mkdir()
            (root / str(number) / RESULTS_FILE).write_bytes(members[name])
        return outcome(listed, covered, digests, [root])


def _same(a: object, b: object) -> bool:
    """True where two JSON values are equal, numbers to nine digits."""
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
    """Remarks on another list than the shipped one and on files without the printed digest."""
    own: ReproductionList | None = None
    with contextlib.suppress(BadInput):  # a model that timm prints nothing of
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
