"""Requests about folders of runs: tables, checks, ranks, loggers, disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.options import Request, argument, option
from backbench.requests.places import JsonRequest


@dataclass(frozen=True, kw_only=True)
class LeaderboardRequest(JsonRequest):
    """Write results as CSV, page and tables."""

    verb: ClassVar[str] = "leaderboard"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; results are found below them"
    )
    csv: Path | None = option(
        "leaderboard.csv: one row per checkpoint", "F", default=None
    )
    tidy: Path | None = option("results.csv: one row per number", "F", default=None)
    html: Path | None = option("one self-contained page", "F", default=None)
    figures: Path | None = option("ablation curves, svg and png", "DIR", default=None)
    latex: Path | None = option(
        "the board's own table (board.tex) and the papers', ready to paste",
        "DIR",
        default=None,
    )
    markdown: Path | None = option("the same in Markdown", "DIR", default=None)
    published: bool = option(
        "the papers' own rows beside the measured ones", default=False
    )
    check: bool = option(
        "exit 1 when a measured value misses its published number", default=False
    )


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(Request):
    """Compute every number again from what was kept beside it."""

    verb: ClassVar[str] = "verify"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; exit 1 where a number does not follow"
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateRequest(JsonRequest):
    """Add calibration and selective prediction of linear and logreg runs, from their kept scores."""

    verb: ClassVar[str] = "calibrate"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; the new rows are added to their results"
    )


@dataclass(frozen=True, kw_only=True)
class RescoreRequest(JsonRequest):
    """Score kept predictions again on a clean test set; seconds a run, no image is read."""

    verb: ClassVar[str] = "rescore"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; the new rows are added to their results"
    )
    list: Path = option(
        "test images that are copies of training images or have a wrong label, one a line:"
        " image, tab, copy | wrong | label, tab, right label; or ciFAIR's csv."
        " `backbench data check NAME --copies FILE` writes one",
        "FILE",
    )
    dataset: str | None = option(
        "whose images the list names; needed where RUNS hold several",
        "NAME",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class ErrorsRequest(JsonRequest):
    """Say why detectors have their AP50: what each of TIDE's six errors costs, from the detections
    that runs kept; seconds a run, no image is read."""

    verb: ClassVar[str] = "errors"
    runs: tuple[Path, ...] = argument(
        "RUNS", "runs of `detect`; the new rows are added to their results"
    )
    data: Path | None = option(
        "folder whose boxes they were scored on, as `detect` had it (default:"
        " $DETECTRON2_DATASETS)",
        "ROOT",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class RankRequest(JsonRequest):
    """Say who leads any CSV of results, and how surely."""

    verb: ClassVar[str] = "rank"
    file: Path = argument(
        "FILE.csv|RUNS",
        "a row for each competitor; or a folder of runs, which is verified",
    )
    name: str | None = option(
        "which column names them (default: the first)", "COLUMN", default=None
    )
    lower: tuple[str, ...] = option(
        "in this column less is better; may be repeated",
        "COLUMN",
        several="each",
        default=(),
    )
    csv: Path | None = option("the ranks as CSV", "F", default=None)


@dataclass(frozen=True, kw_only=True)
class MergeRequest(Request):
    """Put the records of several labs into one folder."""

    verb: ClassVar[str] = "merge"
    folders: tuple[str, ...] = argument(
        "[LAB=]RUNS",
        "run folders of each lab; without LAB= the folder's name is the lab's",
    )
    out: Path = option("a new folder of runs", "C")
    public: bool = option(
        "without the machine's folders: a corpus to publish (one RUNS will do)",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ExportResultsRequest(Request):
    """Write verified numbers as other places read them."""

    verb: ClassVar[str] = "export-results"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; results are found below them"
    )
    to: Literal["eee", "hub", "csv"] = option(
        "eee: records of Every Eval Ever; hub: model cards and .eval_results of the Hugging"
        " Face Hub; csv: one row per number, by their names"
    )
    out: Path = option("a new folder", "DIR")
    organization: str | None = option(
        "who measured, as eee and hub know you", "ORG", default=None
    )
    model: tuple[str, ...] = option(
        "a row's repository on the Hub; may be repeated",
        "ROW=ORG/REPO",
        several="each",
        default=(),
    )
    benchmark: tuple[str, ...] = option(
        "hub: a dataset that is a registered benchmark there; may be repeated",
        "DATASET=ORG/NAME:TASK",
        several="each",
        default=(),
    )


@dataclass(frozen=True, kw_only=True)
class LogRequest(Request):
    """Send runs to an experiment logger, from files."""

    verb: ClassVar[str] = "log"
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders; metrics and results are found below them"
    )
    to: Literal["wandb", "mlflow", "trackio", "tensorboard"] = option("which logger")


@dataclass(frozen=True, kw_only=True)
class CleanRequest(Request):
    """List what runs hold on disk, and what can go."""

    verb: ClassVar[str] = "clean"
    runs: tuple[Path, ...] = argument("RUNS")
    yes: bool = option("remove what can go; without it, only list", default=False)
