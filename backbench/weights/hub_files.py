"""Weights by their place on the Hugging Face Hub: `hf:ORG/REPO[@REVISION][:FILE]`.

    hf:facebook/dinov2-small                          the repository's one file of weights
    hf:facebook/dinov2-small@ed25f3a:model.safetensors

The file is that of the Hub's local cache ($HF_HUB_CACHE, $HF_HOME), and is opened like any other
file. Only `--download` asks the network, before anything is measured.
"""

import re
from pathlib import Path
from typing import NamedTuple

from backbench.errors import BadInput, Failed

PREFIX = "hf:"
# What a repository calls its weights, the first that is there
FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
)
# What stands beside weights and tells what their tensors do not
# (weights/families/sidecar_metadata.py)
_BESIDE = ("config.json", "open_clip_config.json")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(
    rf"hf:(?P<repository>{_PART}/{_PART})(@(?P<revision>[\w./-]{{1,200}}))?(:(?P<file>[^:]{{1,200}}))?"
)


class HubName(NamedTuple):
    """The parts of hf:ORG/REPO@REVISION:FILE."""

    repository: str
    revision: str | None
    file: str | None


class HubFile(NamedTuple):
    """A file in the local cache."""

    path: Path
    name: str  # of its row on the leaderboard
    source: str  # ORG/REPO@COMMIT:FILE


def is_name(text: object) -> bool:
    """Return True for a text that names weights on the Hub."""
    return str(text).startswith(PREFIX)


def parse(text: object) -> HubName:
    """Take a name apart. BadInput for one of another form."""
    parts = _NAME.fullmatch(str(text))
    if parts is None:
        raise BadInput(
            f"'{str(text)[:120]}': expected hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO:FILE"
        )
    file = parts["file"]
    if file is not None and (file.startswith("/") or ".." in Path(file).parts):
        raise BadInput(f"'{str(text)[:120]}': a file lies inside of its repository")
    return HubName(parts["repository"], parts["revision"], file)


def held(text: object) -> HubFile:
    """Find a file in the local cache. BadInput says how to fetch one that is not there."""
    from huggingface_hub import try_to_load_from_cache

    name = parse(text)
    wanted = FILES if name.file is None else (name.file,)
    for file in wanted:
        found = try_to_load_from_cache(name.repository, file, revision=name.revision)
        if isinstance(found, str) and Path(found).is_file():
            return _of(name, file, Path(found))
    revision = f" --revision {name.revision}" if name.revision else ""
    lacks = name.file or f"a {FILES[0]}"
    raise BadInput(
        f"{text}: the local cache ($HF_HUB_CACHE or $HF_HOME) has not {lacks} of it; add"
        f" --download, or type `hf download {name.repository}{revision}` where there is a network"
    )


def _of(name: HubName, file: str, path: Path) -> HubFile:
    # .../models--ORG--REPO/snapshots/COMMIT/FILE
    commit = path.parents[len(Path(file).parts) - 1].name
    row = name.repository
    if name.file is not None and name.file not in FILES:
        row = f"{row}:{name.file}"  # a repository may have many
    return HubFile(path, row, f"{name.repository}@{commit}:{file}")


def download(text: object) -> HubFile:
    """Fetch a file, and what stands beside it, into the local cache. BadInput where the Hub has none
    or wants a token, Failed where it cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = parse(text)
    wanted = FILES if name.file is None else (name.file,)
    path: Path | None = None
    file = ""
    try:
        for file in wanted:
            try:
                found = hf_hub_download(name.repository, file, revision=name.revision)
            except LocalEntryNotFoundError:
                raise  # which is an EntryNotFoundError, too
            except EntryNotFoundError:
                continue
            path = Path(found)
            break
        if path is None:
            raise BadInput(
                f"{text}: the repository has no {' or '.join(wanted)}; name its file, as in"
                f" hf:{name.repository}:FILE"
            )
        for other in _BESIDE:
            beside = (Path(file).parent / other).as_posix()
            try:
                hf_hub_download(name.repository, beside, revision=name.revision)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
    except GatedRepoError:
        raise BadInput(
            f"{text}: its owner must let you in; ask on its page, then type `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise BadInput(f"{text}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise BadInput(
            f"{text}: the Hub has no such repository, or it is private (`hf auth login`)"
        ) from None
    except (
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        HfHubHTTPError,
        OSError,
    ) as error:
        why = " ".join(str(error).split())[:200]
        raise Failed(f"{text}: the Hub cannot be reached ({why})") from None
    return _of(name, file, path)
