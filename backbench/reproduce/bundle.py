"""What is sent back: one zip file with the numbers, what they are of, and the table they make.

    manifest.json       the format, the list's name, code and time; each checkpoint; sha256 of the rest
    list.json           the list as it was asked
    table.json, .md     the outcome
    results/N/          the rows of those checkpoints, one folder per run

No weights and no images. Rows hold the command, its folder and the machine's hardware, as
results.jsonl does (docs/results.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, Failed
from backbench.recipes import config
from backbench.reproduce.local_files import FoundFile
from backbench.reproduce.outcome import Covered, OutcomeLine, markdown, outcome
from backbench.reproduce.selection import ReproductionList
from backbench.results import store
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE
from backbench.untrusted import jsons, opening

FORMAT = "backbench-reproduction-1"
MANIFEST, LIST, TABLE, PAGE = "manifest.json", "list.json", "table.json", "table.md"
MOST_FILES, MOST_BYTES = 20_000, 256 * opening.MEGABYTE  # of a bundle, unpacked
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own: the time stands in the manifest


@dataclass(frozen=True)
class Measured:
    """What a run of a list came to."""

    asked: ReproductionList
    covered: Covered
    found: Mapping[str, FoundFile]
    digests: Mapping[str, str]  # of the checkpoints made of them
    lines: Sequence[OutcomeLine]


def write(path: Path, measured: Measured, runs: Path) -> None:
    """The bundle, completely or not at all."""
    asked = measured.asked
    members = {
        LIST: _json(config.to_dict(asked)),
        TABLE: _json([line.plain() for line in measured.lines]),
        PAGE: markdown(asked, measured.lines).encode(),
        **_results(runs, frozenset(measured.digests.values())),
    }
    manifest = {
        "format": FORMAT,
        "list": asked.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "code": store.code_revision(),
        "covered": {name: sorted(map(list, what)) for name, what in measured.covered.items()},
        "checkpoints": {name: _about(file, measured) for name, file in measured.found.items()},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
    }
    with atomic.atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, data in {MANIFEST: _json(manifest), **members}.items():
            info = zipfile.ZipInfo(name, EPOCH)
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)


def _about(file: FoundFile, measured: Measured) -> dict[str, Any]:
    return {
        "file": file.about.file,
        "page": file.about.page,
        "bytes": file.size,
        "sha256": file.sha256,
        "md5": file.md5,
        "checked_by": file.checked_by,
        "digest": measured.digests[file.name],
    }


def _results(runs: Path, digests: frozenset[str]) -> dict[str, bytes]:
    """The rows of these checkpoints, by their place in the bundle; others' stay here."""
    out: dict[str, bytes] = {}
    for file in store.files_below(runs):
        kept = [line for line in file.read_bytes().splitlines() if _of(line) in digests]
        if kept:
            out[f"results/{len(out)}/{RESULTS_FILE}"] = b"\n".join(kept) + b"\n"
    return out


def _of(line: bytes) -> str | None:
    try:
        return str(jsons.decode(line)["checkpoint"])
    except (ValueError, KeyError, TypeError):
        return None  # a torn line: the board of this machine has named it


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


# --- whether one holds together ----------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A bundle whose parts are what its manifest says, and whose table follows from its rows."""

    asked: ReproductionList
    lines: Sequence[OutcomeLine]
    code: str
    made: str
    remarks: Sequence[str]  # what whoever receives it should know


def check(path: Path) -> Checked:
    """BadInput for what is no bundle or was changed after it was made; Failed where its table does
    not follow from its rows."""
    members = _read(path)
    manifest = _decoded(path, members, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise BadInput(f"{path}: no bundle of `backbench reproduce` (its format is not {FORMAT})")
    _refuse_changed(path, members, manifest)
    given = _decoded(path, members, LIST)
    asked = config.build(ReproductionList, given, where=f"{path}: {LIST}")
    checkpoints = _mapping(path, manifest, "checkpoints")
    digests = {name: str(about.get("digest")) for name, about in checkpoints.items()}
    lines = _again(path, asked, manifest, digests, members)
    claimed = jsons.decode(members[TABLE])
    if not _same(claimed, [line.plain() for line in lines]):
        raise Failed(f"{path}: its {TABLE} does not follow from its rows; ask for them again")
    remarks = [*_about_list(asked), *_about_files(asked, checkpoints)]
    code, made = str(manifest.get("code")), str(manifest.get("made"))
    return Checked(asked, lines, code, made, remarks)


def _read(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(opening.open_regular(path, most=MOST_BYTES)) as archive:
            infos = archive.infolist()
            if len(infos) > MOST_FILES or sum(info.file_size for info in infos) > MOST_BYTES:
                raise BadInput(f"{path}: larger than any bundle (256 MB unpacked)")
            return {info.filename: archive.read(info) for info in infos}
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; give the zip that `backbench reproduce` wrote"
        ) from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, RuntimeError, ValueError) as error:
        raise BadInput(f"{path}: not readable as a bundle ({error}); fetch it again") from None


def _decoded(path: Path, members: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = jsons.decode(members[name])
    except KeyError:
        raise BadInput(f"{path}: no bundle of `backbench reproduce` (no {name} in it)") from None
    except ValueError as error:
        raise BadInput(f"{path}: {name}: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: {name} must be a table")
    return found


def _mapping(path: Path, manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    if not isinstance(found, dict):
        raise BadInput(f"{path}: {MANIFEST}: '{key}' must be a table")
    return found


def _refuse_changed(path: Path, members: Mapping[str, bytes], manifest: Mapping[str, Any]) -> None:
    """Every member is in the manifest, with its own digest, and the other way round."""
    listed = _mapping(path, manifest, "files")
    others = members.keys() - listed.keys() - {MANIFEST}
    for name in (*sorted(others), *sorted(listed.keys() - members.keys())):
        raise BadInput(f"{path}: {name} is not in both the bundle and its manifest")
    for name, digest in listed.items():
        if hashlib.sha256(members[name]).hexdigest() != digest:
            raise BadInput(f"{path}: {name} was changed after the bundle was made (its sha256)")


def _again(
    path: Path,
    asked: ReproductionList,
    manifest: Mapping[str, Any],
    digests: Mapping[str, str],
    members: Mapping[str, bytes],
) -> list[OutcomeLine]:
    """The table, from the rows alone."""
    covered = {}
    for name, pairs in _mapping(path, manifest, "covered").items():
        if name not in asked.checkpoints:
            raise BadInput(f"{path}: {MANIFEST}: '{name}' is none of the list's checkpoints")
        covered[name] = {(str(task), str(dataset)) for task, dataset in pairs}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = sorted(name for name in members if name.startswith("results/"))
        for number, name in enumerate(rows):  # by number: a name in a zip may lead anywhere
            (root / str(number)).mkdir()
            (root / str(number) / RESULTS_FILE).write_bytes(members[name])
        return outcome(asked, covered, covered, digests, [root])


def _same(a: object, b: object) -> bool:
    """Equal, numbers to nine digits."""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def _about_list(asked: ReproductionList) -> list[str]:
    from backbench.reproduce.selection import KIND, read_list

    if asked.name not in config.recipe_names(KIND):
        return [f"the list '{asked.name}' is none that is shipped here"]
    shipped = dataclasses.replace(read_list(asked.name))
    if config.to_dict(shipped) != config.to_dict(asked):
        return [f"the list '{asked.name}' is not as it is shipped here"]
    return []


def _about_files(asked: ReproductionList, checkpoints: Mapping[str, Any]) -> list[str]:
    """Files whose digests, as the sender states them, are not the printed ones."""
    from backbench.reproduce.local_files import unlike

    found = []
    for name, stated in checkpoints.items():
        about = asked.files[name]
        if wrong := unlike(about, str(stated.get("sha256")), str(stated.get("md5"))):
            found.append(f"{name}: {wrong}")
    return found
