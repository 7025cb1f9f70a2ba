"""Our numbers as records of Every Eval Ever (github.com/evaleval/every_eval_ever), and back.

    data/<collection>/<organisation>/<model>/<uuid>.json      one checkpoint: its model, its numbers

The schema has no field for a protocol, so each number carries its whole line of results.jsonl, in
`score_details.details`. Reading takes that line; a record without one does not say how its numbers
were measured, and has no column here.
"""

import dataclasses
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.board.number_words import hub_dataset, metric_words, model_slug
from backbench.errors import BadInput
from backbench.records.public_lines import without_folders
from backbench.records.result_line import Result, parse
from backbench.tasks import TASKS
from backbench.untrusted import jsons, printable, walking

SCHEMA_VERSION = "0.3.0"
COLLECTION = "backbench"
LINE = "backbench_result"  # the key of a number's own line
FILE_NAME = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.json"
)
# The keys of a provenance that name files of the run folder, which stay there
_FILES = ("predictions", "scores", "per_class", "picture", "confusion")
_ALIKE = 1e-9  # of a score and the value of its line
Json = dict[str, Any]


# ---- writing


def records(
    results: Sequence[Result], organization: str, models: Mapping[str, str]
) -> dict[str, Json]:
    """Return each checkpoint's record by its path. `models` has the Hub's ORG/REPO of rows by
    name."""
    by_checkpoint: dict[str, list[Result]] = {}
    for result in results:
        if result.value is not None:  # the schema has no undefined score
            by_checkpoint.setdefault(result.checkpoint, []).append(result)
    found = {}
    for checkpoint, numbers in by_checkpoint.items():
        name = numbers[0].name
        on_hub = models.get(name)
        model = on_hub or f"{organization}/{model_slug(name, checkpoint)}"
        record = _record(numbers, organization, model, on_hub is not None)
        content = json.dumps(record["evaluation_results"], sort_keys=True)
        digest = hashlib.sha256(content.encode()).digest()
        # The same numbers have the same name, in each export
        file = f"{uuid.UUID(bytes=digest[:16], version=4)}.json"
        record["evaluation_id"] = f"{COLLECTION}/{model}/{digest.hex()[:16]}"
        found[f"data/{COLLECTION}/{model}/{file}"] = record
    return found


def _record(
    numbers: Sequence[Result], organization: str, model: str, on_hub: bool
) -> Json:
    first = numbers[0]
    newest = max(numbers, key=lambda r: r.origin.get("recorded") or 0.0)
    developer = model.partition("/")[0]
    relationship = "first_party" if developer == organization else "third_party"
    origin = newest.origin
    recorded = origin.get("recorded")
    record: Json = {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": "",
        "retrieved_timestamp": str(time.time()),
        "source_metadata": {
            "source_name": "backbench",
            "source_type": "evaluation_run",
            "source_organization_name": organization,
            "evaluator_relationship": relationship,
        },
        "eval_library": {
            "name": "backbench",
            "version": origin.get("versions", {}).get("backbench", "unknown"),
            "additional_details": {"code": origin.get("code", "unknown")},
        },
        "model_info": {
            "name": first.name,
            "id": model,
            "developer": developer,
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "open_weights" if on_hub else "unknown",
                "checkpoint": first.checkpoint,
                "arch": first.arch,
                "pretraining_method": first.method,
                "pretraining_epochs": json.dumps(first.epochs),
            },
        },
        "evaluation_results": [_evaluation_result(r) for r in numbers],
    }
    if recorded is not None:
        record["evaluation_timestamp"] = str(recorded)
    return record


def _evaluation_result(result: Result) -> Json:
    line = _public_line(result)
    words = metric_words(result)
    key = [result.checkpoint, result.column, result.split, result.seed]
    metric: Json = {
        "evaluation_description": f"{TASKS[result.task].title}, protocol {result.protocol}",
        "metric_id": words.id,
        "metric_name": words.name,
        "metric_kind": words.kind,
        "metric_unit": "proportion" if words.share else "as backbench writes it",
        "metric_parameters": words.parameters,
        "lower_is_better": TASKS[result.task].lower,
        "score_type": "continuous",
        "min_score": 0.0 if words.share else "-Infinity",
        "max_score": 1.0 if words.share else "Infinity",
    }
    score: Json = {
        "score": _score(result),
        "details": {LINE: json.dumps(line, sort_keys=True)},
    }
    if result.ci95 is not None:
        low, high = result.ci95
        score["uncertainty"] = {
            "confidence_interval": {
                "lower": low / words.scale,
                "upper": high / words.scale,
                "confidence_level": 0.95,
            }
        }
    settings = {"protocol": result.protocol, "seed": str(result.seed)}
    if result.engine is not None:
        settings["engine"] = result.engine
    command = line["origin"].get("command")
    if command is not None:
        settings["command"] = (
            command if isinstance(command, str) else json.dumps(command)
        )
    return {
        "evaluation_result_id": hashlib.sha256(json.dumps(key).encode()).hexdigest()[
            :32
        ],
        "evaluation_name": f"backbench.{result.task}.{result.dataset}",
        "source_data": _source_data(result),
        "metric_config": metric,
        "score_details": score,
        "generation_config": {"additional_details": settings},
    }


def _score(result: Result) -> float:
    assert result.value is not None
    words = metric_words(result)
    score = result.value / words.scale
    # Rounding may leave 100.00000001 percent
    return min(max(score, 0.0), 1.0) if words.share else score


def _source_data(result: Result) -> Json:
    """Where the images are; a folder of somebody's own is known by the digest of its list."""
    manifests = result.facts.get("manifests") or {}
    details = {"split": result.split}
    for split, manifest in manifests.items():
        if manifest:
            details[f"images_{split}"] = manifest
    source: Json = {
        "dataset_name": result.dataset,
        "source_type": "other",
        "additional_details": details,
    }
    repository = hub_dataset(result.dataset)
    if repository is not None:
        source |= {
            "source_type": "hf_dataset",
            "hf_repo": repository,
            "hf_split": result.split,
        }
    return source


def _public_line(result: Result) -> Json:
    """Return the line without the folders of a machine, and without the files that stay in the
    run."""
    line: Json = without_folders(dataclasses.asdict(result))
    line["origin"].pop("verified", None)
    for key in _FILES:
        line["provenance"].pop(key, None)
    return line


# ---- reading


def files_below(path: Path) -> list[Path]:
    """Return the records at or below `path`, known by their names."""
    if path.is_file():
        return [path] if FILE_NAME.fullmatch(path.name) else []
    if not path.is_dir():
        return []
    files = walking.files(path, follow=True)
    return sorted(file for file in files if FILE_NAME.fullmatch(file.name))


def read_file(file: Path) -> Iterator[Result | str]:
    """Return each number as a Result, or as one line of text that says why it has no column
    here."""
    where = printable.shown(str(file), 300)
    try:
        numbers = jsons.read(file)["evaluation_results"]
        numbers = list(numbers)
    except OSError as error:
        yield f"{where}: not read: {error.strerror}"
        return
    except (ValueError, KeyError, TypeError) as error:
        why = printable.shown(str(error), 100)
        yield f"{where}: no record of Every Eval Ever ({why})"
        return
    for index, number in enumerate(numbers):
        try:
            yield _read_number(number)
        except BadInput as error:
            yield f"{where}: evaluation_results[{index}]: {printable.shown(str(error))}"


def _read_number(number: Any) -> Result:
    try:
        details = number["score_details"]
        score = details["score"]
        text = details.get("details", {}).get(LINE)
    except (KeyError, TypeError, AttributeError):
        raise BadInput("it has no score_details with a score") from None
    if not isinstance(text, str):
        raise BadInput(f"no '{LINE}' in its details, so its protocol is not known")
    try:
        line = jsons.decode_line(text.encode())
    except ValueError:
        raise BadInput(f"'{LINE}' is no line of results.jsonl") from None
    result = parse(line)
    # What is kept stays with whoever measured: nothing here may point to a file
    for key in _FILES:
        if key in result.provenance:
            raise BadInput(f"'{LINE}' names a file of a run ('{key}')")
    if not isinstance(score, int | float) or result.value is None:
        raise BadInput("its score is no number")
    if abs(_score(result) - score) > _ALIKE:
        raise BadInput(f"its score is {score}, its own line says {result.value}")
    return result
