"""`backbench data list`, `check`, `pack` and `fetch-splits`: datasets on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.options import Request, argument, option
from backbench.requests.places import JsonRequest


@dataclass(frozen=True, kw_only=True)
class DataRoot(JsonRequest):
    """A request about the datasets below a folder."""

    data: Path = option(
        "folder with one folder per dataset", "ROOT", default=Path("data")
    )


@dataclass(frozen=True, kw_only=True)
class DataListRequest(DataRoot):
    """every dataset: classes, sizes, metric, where it belongs, licence"""

    verb: ClassVar[str] = "data list"


@dataclass(frozen=True, kw_only=True)
class DataCheckRequest(DataRoot):
    """verify a dataset on disk: counts, classes, duplicates, overlap, files"""

    verb: ClassVar[str] = "data check"
    name: str = argument("NAME")
    record: bool = option(
        "keep the hashes of its splits beside the data", default=False
    )
    copies: Path | None = option(
        "write the test images that are copies of labelled ones, for `backbench rescore --list`",
        "FILE",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class DataPackRequest(DataRoot):
    """write its images as tar or zip files, or as class folders; the numbers stay the same"""

    verb: ClassVar[str] = "data pack"
    name: str = argument("NAME")
    to: Literal["tar", "zip", "folder"] = option("which container")
    out: Path = option("where it is written", "DIR")


@dataclass(frozen=True, kw_only=True)
class FetchSplitsRequest(Request):
    """download the 1% and 10% lists (the only use of the network)"""

    verb: ClassVar[str] = "data fetch-splits"
    out: Path = option("where they are written", "DIR", default=Path("lists"))
