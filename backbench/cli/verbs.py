"""Which function does which verb, and what is refused before torch is imported.

Each function imports its program when it is called: `backbench --help` imports none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backbench.errors import BadInput
from backbench.parallel import gpus
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.data import (
    DataCheckRequest,
    DataListRequest,
    DataPackRequest,
    FetchSplitsRequest,
)
from backbench.requests.demo import DemoRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.doctor import DoctorRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.launch import (
    LaunchCancelRequest,
    LaunchRetryRequest,
    LaunchRunRequest,
    LaunchStatusRequest,
)
from backbench.requests.options import Outcome, Request
from backbench.requests.parsing import parse
from backbench.requests.places import RunRequest
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.requests.published import PaperRequest, ReproduceRequest
from backbench.requests.runs import (
    CalibrateRequest,
    CleanRequest,
    ErrorsRequest,
    ExportResultsRequest,
    LeaderboardRequest,
    LogRequest,
    MergeRequest,
    RankRequest,
    RescoreRequest,
    VerifyRequest,
)
from backbench.requests.weights import ExportRequest, ImportRequest, InspectRequest


@dataclass(frozen=True)
class Verb:
    """How a request is done: `check` refuses what it can without torch, then `run` does it."""

    run: Callable[[Any], Outcome | None]
    check: Callable[[Any], None] | None = None


# --- checks ---


def check_pretrain(request: PretrainRequest) -> None:
    from backbench.cli import pretrain

    pretrain.check(request)


def check_protocol(
    request: LinearRequest | OodRequest | SemisupRequest | FinetuneRequest,
) -> None:
    from backbench.transfer import protocols

    protocols.check(request)


def check_analysis(request: AnalyzeRequest) -> None:
    from backbench.transfer.analysis import protocol

    protocol.check_analysis(request)


def check_detect(request: DetectRequest) -> None:
    from backbench.detection import dialect

    dialect.check(request)


def check_evaluate(request: EvaluateRequest) -> None:
    from backbench.cli import evaluate

    evaluate.check(request)


# --- the three programs ---


def pretrain(request: PretrainRequest) -> Outcome | None:
    from backbench.cli import pretrain

    return pretrain.run(request)


def linear(request: LinearRequest | OodRequest) -> Outcome:
    from backbench.transfer import linear

    return linear.run(request)


def semisup(request: SemisupRequest) -> Outcome:
    from backbench.transfer import finetune

    return finetune.run_semisup(request)


def finetune(request: FinetuneRequest) -> Outcome:
    from backbench.transfer import finetune

    return finetune.run(request)


def analyze(request: AnalyzeRequest) -> Outcome:
    from backbench.transfer.analysis import analyze

    return analyze.run(request)


def detect(request: DetectRequest) -> Outcome | None:
    from backbench.detection import train_net

    return train_net.run(request)


# --- all others ---


def demo(request: DemoRequest) -> Outcome:
    from backbench.cli import demo

    return demo.run(request, command)


def evaluate(request: EvaluateRequest) -> Outcome:
    from backbench.cli import evaluate

    return evaluate.run(request)


def inspect(request: InspectRequest) -> Outcome:
    from backbench.cli import weights

    return weights.run_inspect(request)


def import_weights(request: ImportRequest) -> None:
    from backbench.cli import weights

    weights.run_import(request)


def export_weights(request: ExportRequest) -> None:
    from backbench.cli import weights

    weights.run_export(request)


def launch_run(request: LaunchRunRequest) -> Outcome:
    from backbench.cli import launch

    return launch.run_grid(request, check)


def launch_status(request: LaunchStatusRequest) -> Outcome:
    from backbench.cli import launch

    return launch.show_status(request)


def launch_retry(request: LaunchRetryRequest) -> Outcome:
    from backbench.cli import launch

    return launch.retry(request)


def launch_cancel(request: LaunchCancelRequest) -> Outcome:
    from backbench.cli import launch

    return launch.cancel(request)


def leaderboard(request: LeaderboardRequest) -> Outcome:
    from backbench.cli import leaderboard

    return leaderboard.run(request)


def verify(request: VerifyRequest) -> Outcome:
    from backbench.cli import verify

    return verify.run(request)


def calibrate(request: CalibrateRequest) -> Outcome:
    from backbench.cli import calibrate

    return calibrate.run(request)


def rescore(request: RescoreRequest) -> Outcome:
    from backbench.cli import rescore

    return rescore.run(request)


def errors(request: ErrorsRequest) -> Outcome:
    from backbench.cli import errors

    return errors.run(request)


def rank(request: RankRequest) -> Outcome:
    from backbench.board import rank_csv

    return rank_csv.run(request)


def merge(request: MergeRequest) -> None:
    from backbench.board import merge

    merge.run(request)


def export_results(request: ExportResultsRequest) -> None:
    from backbench.cli import export_results

    export_results.run(request)


def paper(request: PaperRequest) -> Outcome:
    from backbench.cli import paper

    return paper.run(request)


def reproduce(request: ReproduceRequest) -> Outcome:
    from backbench.cli import reproduce

    return reproduce.run(request, command)


def log(request: LogRequest) -> None:
    from backbench.cli import log

    log.run(request)


def data_list(request: DataListRequest) -> Outcome:
    from backbench.cli import data

    return data.run_list(request)


def data_check(request: DataCheckRequest) -> Outcome:
    from backbench.cli import data

    return data.run_check(request)


def data_pack(request: DataPackRequest) -> Outcome:
    from backbench.cli import data

    return data.run_pack(request)


def fetch_splits(request: FetchSplitsRequest) -> None:
    from backbench.cli import data

    data.run_fetch_splits(request)


def doctor(request: DoctorRequest) -> Outcome:
    from backbench.cli import doctor

    return doctor.run(request)


def clean(request: CleanRequest) -> None:
    from backbench.cli import clean

    clean.run(request)


VERBS: dict[type[Request], Verb] = {
    DemoRequest: Verb(demo),
    PretrainRequest: Verb(pretrain, check_pretrain),
    EvaluateRequest: Verb(evaluate, check_evaluate),
    InspectRequest: Verb(inspect),
    ImportRequest: Verb(import_weights),
    ExportRequest: Verb(export_weights),
    LinearRequest: Verb(linear, check_protocol),
    OodRequest: Verb(linear, check_protocol),
    SemisupRequest: Verb(semisup, check_protocol),
    FinetuneRequest: Verb(finetune, check_protocol),
    AnalyzeRequest: Verb(analyze, check_analysis),
    DetectRequest: Verb(detect, check_detect),
    LaunchRunRequest: Verb(launch_run),
    LaunchStatusRequest: Verb(launch_status),
    LaunchRetryRequest: Verb(launch_retry),
    LaunchCancelRequest: Verb(launch_cancel),
    LeaderboardRequest: Verb(leaderboard),
    VerifyRequest: Verb(verify),
    CalibrateRequest: Verb(calibrate),
    RescoreRequest: Verb(rescore),
    ErrorsRequest: Verb(errors),
    RankRequest: Verb(rank),
    MergeRequest: Verb(merge),
    ExportResultsRequest: Verb(export_results),
    PaperRequest: Verb(paper),
    ReproduceRequest: Verb(reproduce),
    LogRequest: Verb(log),
    DataListRequest: Verb(data_list),
    DataCheckRequest: Verb(data_check),
    DataPackRequest: Verb(data_pack),
    FetchSplitsRequest: Verb(fetch_splits),
    DoctorRequest: Verb(doctor),
    CleanRequest: Verb(clean),
}


# --- doing them ---


def check(request: Request) -> None:
    """Raise BadInput for a recipe, file or key of the request that can be refused without torch."""
    refuse = VERBS[type(request)].check
    if refuse is not None:
        refuse(request)


def command(argv: Sequence[str]) -> int:
    """Run the words of another command within one that is under way; errors are raised."""
    return run(parse(argv))


def run(request: Request) -> int:
    """Do what a request asks, once for each of its seeds, and return the exit status."""
    from backbench.datasets import availability

    # What needs no protocol is said before one is loaded, which needs torch
    availability.weight_files(request)
    availability.out_inside(request)
    check(request)
    if isinstance(request, RunRequest | DetectRequest | EvaluateRequest):
        availability.refuse(request)
    if isinstance(request, RunRequest | EvaluateRequest):
        # Not by `check`: the machine that submits a job need not have what its nodes have
        gpus.refuse_missing(request.accelerator, getattr(request, "devices", 1))
    do = VERBS[type(request)].run
    wants_json = getattr(request, "json", False)
    outcomes = []
    # What is not the document goes to standard error
    aside = contextlib.redirect_stdout(sys.stderr)
    with aside if wants_json else contextlib.nullcontext():
        for one in each_seed(request):
            outcomes.append(do(one) or Outcome())
    documents = [one.document for one in outcomes if one.document is not None]
    if wants_json and documents:
        # With --seeds they are lists of results
        whole: Any = documents[0]
        if len(outcomes) > 1:
            whole = list(itertools.chain(*documents))  # type: ignore[arg-type]
        print(json.dumps(whole, indent=1, default=_jsonable))
    return max(one.status for one in outcomes)


def each_seed(request: Any) -> Iterator[Any]:
    """Yield the request itself, or one for each of its --seeds, with a run folder of its own."""
    count = getattr(request, "seeds", 1)
    if count == 1:
        yield request
        return
    if request.out is None:
        raise BadInput(f"--seeds {count}: give --out RUN; each seed has a folder in it")
    first = request.seed or 0  # a detector's may stand in its config
    # All are made before the first one runs: a seed may be refused
    requests = []
    for seed in range(first, first + count):
        one = dataclasses.replace(request, seed=seed, out=request.out / f"s{seed}")
        requests.append(one)
    yield from requests


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def print_protocols(verb: str) -> None:
    """Print the shipped protocols of a verb, a line each."""
    from backbench.transfer import protocols

    for line in protocols.listing(verb):
        print(line)
