"""`backbench export-results RUNS --to eee|hub|csv --out DIR`: verified numbers, by the names that
other places have for them. Nothing is sent: whoever has an account there adds the files."""

import json
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from backbench.board import every_eval_ever, hub_results
from backbench.board.board import read_verified
from backbench.board.export import write_lines
from backbench.board.hub_results import Benchmark
from backbench.board.number_words import hub_dataset, metric_words
from backbench.errors import BadInput, nearest
from backbench.records import store
from backbench.records.result_line import Result
from backbench.requests.runs import ExportResultsRequest
from backbench.runs import atomic
from backbench.runs.terminal import log
from backbench.untrusted import printable

T = TypeVar("T")
# What the Hub takes for the name of an organisation or a repository
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_BENCHMARK = re.compile(rf"({_PART}/{_PART}):([^\s:]+)")
_CSV_FIELDS = (
    "model",
    "checkpoint",
    "arch",
    "method",
    "evaluation",
    "dataset",
    "hub_dataset",
    "split",
    "metric",
    "score",
    "ci95_low",
    "ci95_high",
    "protocol",
    "engine",
    "seed",
    "recorded",
    "code",
)


def run(request: ExportResultsRequest) -> None:
    # 1. What is asked
    organization = request.organization or ""
    if request.to != "csv" and not re.fullmatch(_PART, organization):
        raise BadInput(
            f"--to {request.to} --organization '{printable.shown(organization)}': say who measured"
            " these numbers, by the name of your organisation or account there"
        )
    if request.out.exists() and (
        not request.out.is_dir() or any(request.out.iterdir())
    ):
        raise BadInput(f"{request.out}: is there already; --out needs a new folder")
    models = _pairs("--model", "ROW=ORG/REPO", request.model, _repository)
    benchmarks = _pairs(
        "--benchmark", "DATASET=ORG/NAME:TASK", request.benchmark, _benchmark
    )
    # 2. The numbers that follow from what their runs kept, or have nothing kept
    problems: list[str] = []
    files = [file for runs in request.runs for file in store.files_below(runs)]
    results = [m.result for m in read_verified(files, problems)]
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    defined = [r for r in results if r.value is not None]
    if not defined:
        raise BadInput(
            f"no number to export below {', '.join(map(str, request.runs))};"
            " `backbench verify` says what stands there"
        )
    _refuse_unknown("--model", models, {r.name for r in defined})
    _refuse_unknown("--benchmark", benchmarks, {r.dataset for r in defined})
    # 3. Their files
    if request.to == "eee":
        records = every_eval_ever.records(defined, organization, models)
        for path, record in records.items():
            text = json.dumps(record, indent=1, sort_keys=True)
            atomic.write_text(request.out / path, text + "\n")
        said = f"{len(records)} records of Every Eval Ever"
    elif request.to == "hub":
        texts = hub_results.files(defined, organization, models, benchmarks)
        for path, text in texts.items():
            atomic.write_text(request.out / path, text)
        cards = sum(path.endswith("/README.md") for path in texts)
        said = f"{cards} model cards, {len(texts) - cards} files of .eval_results"
    else:
        write_lines(request.out / "results.csv", [_CSV_FIELDS, *map(_csv_row, defined)])
        said = "results.csv"
    left_out = len(results) - len(defined)
    undefined = f"; {left_out} undefined numbers are left out" if left_out else ""
    print(f"{request.out}: {len(defined)} numbers, {said}{undefined}")


def _csv_row(result: Result) -> list[object]:
    words = metric_words(result)
    assert result.value is not None
    low, high = result.ci95 or (None, None)
    return [
        result.name,
        result.checkpoint,
        result.arch,
        result.method,
        f"backbench.{result.task}.{result.dataset}",
        result.dataset,
        hub_dataset(result.dataset),
        result.split,
        words.id,
        result.value / words.scale,
        None if low is None else low / words.scale,
        None if high is None else high / words.scale,
        result.protocol,
        result.engine,
        result.seed,
        result.origin.get("recorded"),
        result.origin.get("code"),
    ]


def _pairs(
    flag: str, form: str, given: Sequence[str], read: Callable[[str], T | None]
) -> dict[str, T]:
    """Parse NAME=VALUE words."""
    found: dict[str, T] = {}
    for text in given:
        name, _, word = text.rpartition("=")
        value = read(word)
        if not name or value is None:
            raise BadInput(f"{flag} {printable.shown(text)}: it has the form {form}")
        if name in found:
            raise BadInput(f"{flag} {printable.shown(text)}: '{name}' is named twice")
        found[name] = value
    return found


def _repository(text: str) -> str | None:
    return text if _REPOSITORY.fullmatch(text) else None


def _benchmark(text: str) -> Benchmark | None:
    match = _BENCHMARK.fullmatch(text)
    return Benchmark(match[1], match[2]) if match else None


def _refuse_unknown(flag: str, named: dict[str, T], there: set[str]) -> None:
    for name in named:
        if name not in there:
            raise BadInput(
                f"{flag} {printable.shown(name)}=...: no number has it; {nearest(name, sorted(there))}"
            )
