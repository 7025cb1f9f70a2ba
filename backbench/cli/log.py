"""`backbench log RUNS --to NAME`: sends runs, also unfinished ones, to an experiment logger, from
their files: machines that compute need no network. RUN/logged.json notes what was sent to whom."""

import hashlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput, Failed, no_folder
from backbench.recipes import config
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.runs import LogRequest
from backbench.runs import atomic
from backbench.runs.folder import METRICS_FILE, RECIPE_FILE, RESULTS_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.runs.terminal import log
from backbench.untrusted import jsons, walking

NOTE = "logged.json"
PROJECT = "backbench"


@dataclass(frozen=True)
class LoggedRun:
    """The part of a run that a logger gets."""

    folder: Path
    name: str
    id: str  # the same in every call
    config: Mapping[str, object]
    steps: list[tuple[int, dict[str, float]]]
    numbers: dict[str, float]  # by column


def run(request: LogRequest) -> None:
    if importlib.util.find_spec(request.to) is None:
        raise BadInput(
            f"--to {request.to}: {request.to} is not installed; pip install {request.to}"
        )
    count = 0
    for root in request.runs:
        if not root.is_dir():
            raise BadInput(f"{root}: {no_folder(root)}; give the --out of a run")
        files = walking.files(root, follow=True)
        folders = sorted(
            {f.parent for f in files if f.name in (METRICS_FILE, RESULTS_FILE)}
        )
        if not folders:
            raise BadInput(
                f"{root}: no {METRICS_FILE} or {RESULTS_FILE} below; nothing to log"
            )
        for folder in folders:
            count += _send_new(folder, root, request.to)
    log.info(
        f"{count} runs sent to {request.to}"
        if count
        else f"{request.to} has all of it already"
    )


def _send_new(folder: Path, root: Path, to: str) -> bool:
    """Send what `to` does not have yet of a run; False where it has all."""
    file = folder / NOTE
    try:
        note = dict(jsons.read(file)) if file.exists() else {}
        sent = note.get(to, {"step": -1, "numbers": []})
        last = int(sent["step"])
        keys_at_last = set(map(str, sent.get("keys", ())))
        known = set(map(str, sent["numbers"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise BadInput(f"{file}: damaged; remove it to send all again") from None
    # 1. The steps and the numbers that are new
    steps = []
    for row in read_metrics(folder):
        step = int(row.pop("step", -1))
        # A step's kNN score has a row of its own, which comes minutes after that of its loss
        comes_later = "keys" in sent and step == last and not row.keys() <= keys_at_last
        if step > last or comes_later:
            steps.append((step, row))
    lines = (
        store.read_file(folder / RESULTS_FILE)
        if (folder / RESULTS_FILE).exists()
        else ()
    )
    results = [line for line in lines if isinstance(line, Result)]
    numbers = {}
    for key, result in zip(_keys(results), results):
        if result.value is not None and key not in known:
            numbers[key] = result.value
    if not steps and not numbers:
        return False
    # 2. The recipe: a pretraining's file, or the protocol of the results
    recipe: dict[str, object] = {}
    if (folder / RECIPE_FILE).exists():
        recipe = dict(config.read_yaml(folder / RECIPE_FILE))
    elif results:
        recipe = dict(results[0].facts.get("recipe") or {})
        recipe |= {"checkpoint": results[0].checkpoint, "seed": results[0].seed}
    # 3. The note, once the logger has it
    name = folder.name if folder == root else folder.relative_to(root).as_posix()
    own = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        LOGGERS[to](LoggedRun(folder, name, own, recipe, steps, numbers))
    except (
        Exception
    ) as error:  # whatever a logger raises is about its server or settings
        raise Failed(
            f"{folder}: {to} refused it: {error}; the same command continues"
        ) from error
    if steps:
        newest = steps[-1][0]
        if newest > last:
            keys_at_last = set()
        keys_at_last |= {key for step, row in steps if step == newest for key in row}
        last = newest
    note[to] = {
        "step": last,
        "keys": sorted(keys_at_last),
        "numbers": sorted({*known, *numbers}),
    }
    atomic.write_json(file, note)
    log.info(f"{folder}: {len(steps)} steps and {len(numbers)} numbers")
    return True


def _keys(results: Sequence[Result]) -> list[str]:
    """Return a key for each result, by which a logger keeps its value. It is the column, with the
    checkpoint's name, digest and seed where the column alone would be that of several numbers."""
    digests_of: dict[str, set[str]] = defaultdict(set)
    seeds_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    for result in results:
        digests_of[result.name].add(result.checkpoint)
        seeds_of[result.checkpoint, result.column].add(result.seed)
    several = len(set().union(*digests_of.values())) > 1
    keys = []
    for result in results:
        key = result.column
        if len(seeds_of[result.checkpoint, result.column]) > 1:
            key = f"s{result.seed}/{key}"
        if several:
            name = result.name
            if len(digests_of[name]) > 1:
                name += f" {result.checkpoint[:12]}"
            key = f"{name}/{key}"
        keys.append(key)
    return keys


# ---- the loggers: each is imported only when it is used


def _tensorboard(run: LoggedRun) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run.folder / "tensorboard")) as writer:
        for step, values in run.steps:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        for name, value in run.numbers.items():
            writer.add_scalar(name, value, 0)


def _wandb(run: LoggedRun) -> None:
    import wandb

    logged = wandb.init(
        project=PROJECT,
        name=run.name,
        id=run.id,
        resume="allow",
        config=run.config,
        dir=run.folder,
    )
    for step, values in run.steps:
        logged.log(values, step=step)
    logged.summary.update(run.numbers)
    logged.finish()


def _mlflow(run: LoggedRun) -> None:
    import mlflow

    mlflow.set_experiment(PROJECT)
    tag = f"tags.backbench = '{run.id}'"
    known = mlflow.search_runs(filter_string=tag, output_format="list")
    about = {"run_id": known[0].info.run_id} if known else {"run_name": run.name}
    with mlflow.start_run(**about):
        if not known:
            mlflow.set_tag("backbench", run.id)
            mlflow.log_params(
                {key: str(value)[:500] for key, value in run.config.items()}
            )
        for step, values in run.steps:
            mlflow.log_metrics(values, step=step)
        for name, value in run.numbers.items():
            mlflow.log_metric(_of_allowed_characters(name), value)


def _of_allowed_characters(name: str) -> str:
    """Replace what MLflow's names may not have: @, ~, + and %. Where that is more than the @ of
    every column, the digest tells the name from others that become the same."""
    allowed = "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
    if allowed != name.replace("@", "_"):
        allowed += f" {hashlib.sha256(name.encode()).hexdigest()[:6]}"
    return allowed


def _trackio(run: LoggedRun) -> None:
    import trackio

    trackio.init(project=PROJECT, name=run.name, config=run.config, resume="allow")
    for step, values in run.steps:
        trackio.log(values, step=step)
    if run.numbers:
        trackio.log(run.numbers)
    trackio.finish()


# --to, which is the package's name, too -> how a run is sent
LOGGERS: dict[str, Callable[[LoggedRun], None]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
