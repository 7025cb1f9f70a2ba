"""Our numbers as a model's repository on the Hugging Face Hub has them.

    <ORG>/<REPO>/README.md                     the model card: all numbers, as `model-index`
    <ORG>/<REPO>/.eval_results/<number>.yaml   those on a registered benchmark, a file each

The Hub takes `.eval_results` only of datasets that are registered as benchmarks, by a task that the
dataset's own eval.yaml names (huggingface.co/docs/hub/eval-results). Nobody but the user knows them,
so `--benchmark` says which; a model card may name any dataset.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbench.board.number_words import (
    hub_dataset,
    hub_task,
    metric_words,
    model_slug,
)
from backbench.errors import BadInput
from backbench.records.result_line import Result
from backbench.tasks import TASKS
from backbench.untrusted import printable, yamls


@dataclass(frozen=True)
class Benchmark:
    """A dataset that is registered on the Hub, and one of its tasks."""

    dataset: str
    task: str


def files(
    results: Sequence[Result],
    organization: str,
    models: Mapping[str, str],
    benchmarks: Mapping[str, Benchmark],
) -> dict[str, str]:
    """Return the text of each file by its path."""
    by_checkpoint: dict[str, list[Result]] = {}
    for result in results:
        if result.value is not None:
            by_checkpoint.setdefault(result.checkpoint, []).append(result)
    found = {}
    for checkpoint, numbers in by_checkpoint.items():
        name = numbers[0].name
        model = models.get(name) or f"{organization}/{model_slug(name, checkpoint)}"
        card = f"{model}/README.md"
        if card in found:
            raise BadInput(
                f"--model: {printable.shown(name, 60)} and another checkpoint would both be"
                f" {model}; give each a repository of its own"
            )
        found[card] = _card(numbers)
        for result in numbers:
            benchmark = benchmarks.get(result.dataset)
            if benchmark is not None:
                file = re.sub(
                    r"[^A-Za-z0-9._-]+", "-", f"{result.column}-s{result.seed}"
                )
                entry = yamls.encode([_entry(result, benchmark)])
                found[f"{model}/.eval_results/{file}.yaml"] = entry
    return found


def _entry(result: Result, benchmark: Benchmark) -> dict[str, object]:
    """Return one number by the rules of .eval_results; the notes tell it from others of its
    dataset."""
    entry: dict[str, object] = {
        "dataset": {"id": benchmark.dataset, "task_id": benchmark.task},
        "value": _rounded(result.value),
    }
    recorded = result.origin.get("recorded")
    if recorded is not None:
        when = datetime.datetime.fromtimestamp(recorded, datetime.UTC)
        entry["date"] = when.strftime("%Y-%m-%d")
    entry["notes"] = _how(result)
    return entry


def _how(result: Result) -> str:
    how = f"{TASKS[result.task].title}, {_metric(result)}, {result.protocol}"
    if result.engine is not None:
        how = f"{how}, {result.engine}"
    return f"{how}, seed {result.seed}"


def _metric(result: Result) -> str:
    """Name the metric, with its unit: a share is in percent, as nats are not."""
    words = metric_words(result)
    return f"{words.name} in %" if words.share else words.name


def _card(numbers: Sequence[Result]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    first = numbers[0]
    evaluations = []
    for result in numbers:
        words = metric_words(result)
        evaluations.append(
            EvalResult(
                task_type=hub_task(result),
                task_name=TASKS[result.task].title,
                dataset_type=hub_dataset(result.dataset) or result.dataset,
                dataset_name=result.dataset,
                dataset_split=result.split,
                metric_type=words.id,
                metric_name=_how(result),
                metric_value=_rounded(result.value),
            )
        )
    data = ModelCardData(
        model_name=first.name,
        tags=["backbench", "self-supervised-learning"],
        eval_results=evaluations,
    )
    rows = [
        "| measured | dataset | metric | value | 95% interval | protocol |",
        "|---|---|---|---:|---|---|",
    ]
    for result in numbers:
        interval = ""
        if result.ci95 is not None:
            interval = f"{result.ci95[0]:.2f} to {result.ci95[1]:.2f}"
        cells = (
            TASKS[result.task].title,
            f"{result.dataset} ({result.split})",
            _metric(result),
            f"{result.value:.2f}",
            interval,
            result.protocol,
        )
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(
        [
            "---",
            data.to_yaml(),
            "---",
            "",
            f"# {first.name}",
            "",
            f"A {first.arch}, pretrained by {first.method}; measured by backbench.",
            f"The trunk's digest is `{first.checkpoint}`.",
            "",
            *rows,
            "",
        ]
    )


def _rounded(value: float | None) -> float:
    assert value is not None
    return round(value, 4)
