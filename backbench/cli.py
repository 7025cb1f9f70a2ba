"""`backbench VERB ...`: the one door. Arguments are declared here; the verb's module is imported
only when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    Preempted,
    Stopped,
)
from backbench.recipes import fast

Arguments = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
    target: str  # "module:function"; the function takes the parsed arguments and returns an exit status or None
    help: str
    arguments: Arguments
    # The same of a function without torch, for its recipe, before the target is imported
    check: str | None = None
    # It imports none of pretrain, transfer, detection, and starts none of their verbs
    alone: bool = False


def _out(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--out",
        metavar="RUN",
        type=Path,
        required=True,
        help="run folder; the same command continues it",
    )


def _data(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--data",
        metavar="ROOT",
        type=Path,
        required=True,
        help="folder with one folder per dataset",
    )


def _machine(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="processes on this node (GPUs, or CPU ranks)",
    )
    p.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes; under Slurm start one task per device",
    )
    p.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument(
        "--workers", type=int, default=None, metavar="N", help="loader workers per process"
    )


def _checkpoints(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "checkpoints",
        metavar="X",
        nargs="+",
        type=Path,
        help="checkpoint file(s), published formats too; timm:NAME from the local cache",
    )


def _demo(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--size", choices=("tiny", "full"), default="full", help="tiny: every stage in under 90 s"
    )
    p.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")


def _pretrain(p: argparse.ArgumentParser) -> None:
    p.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a name under configs/pretrain")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="changes to the recipe")
    p.add_argument(
        fast.SWITCH,
        action="store_true",
        help=f"{' '.join(fast.spelled())}; what is given by hand wins (docs/fast.md)",
    )
    _data(p)
    _out(p)
    _machine(p)
    p.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard event files to RUN"
    )


def _inspect(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", metavar="FILE", type=Path)
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _import(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", metavar="FILE", type=Path)
    p.add_argument("--out", metavar="X.safetensors", type=Path, required=True)
    p.add_argument(
        "--encoder", metavar="NAME", help="which of several encoders in the file (see `inspect`)"
    )
    p.add_argument(
        "--stem",
        metavar="NAME",
        help="conv3, conv3_p0 or conv3_p2: the padding of a 3x3 first convolution",
    )
    p.add_argument(
        "--arch",
        metavar="timm:NAME[,k=v]",
        help="which model a ViT or ConvNeXt is, where its format does not tell",
    )
    p.add_argument(
        "--reading",
        metavar="R",
        help="what is read of a ViT: cls, mean, cls+mean, cls@4, cls@4+mean, map",
    )
    p.add_argument("--pixels", metavar="NAME", help="imagenet, half (mean and std 0.5) or clip")
    p.add_argument(
        "--pos",
        metavar="RULE",
        help="take images of any size; a ViT's position embeddings are resized by +0.1, aa or size",
    )
    p.add_argument(
        "--method", metavar="NAME", help="the method's name, where the file does not tell it"
    )
    p.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="pretraining epochs, where the file does not tell them",
    )
    p.add_argument("--name", help="the row's name on the leaderboard (default: the file's name)")
    p.add_argument(
        "--published", metavar="KEY", help="the published row that this checkpoint must reproduce"
    )
    p.add_argument(
        "--allow-missing-statistics",
        action="store_true",
        help="accept batch norm without running statistics",
    )


def _export(p: argparse.ArgumentParser) -> None:
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument("--format", choices=("torchvision", "timm", "detectron2"), required=True)
    p.add_argument("--out", metavar="F", type=Path, required=True)


def _linear(p: argparse.ArgumentParser) -> None:
    _checkpoints(p)
    p.add_argument(
        "--datasets", metavar="NAME,...|all", required=True, help="all = the 12 of LORAC's Table 2"
    )
    p.add_argument(
        "--protocol",
        default="lorac",
        metavar="NAME",
        help="lorac, logreg, knn, fewshot, a recipe's name, or own: each checkpoint's own probe",
    )
    p.add_argument("--seed", type=int, default=0)
    _data(p)
    _out(p)
    _machine(p)


def _semisup(p: argparse.ArgumentParser) -> None:
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument("--percent", type=int, choices=(1, 10), required=True)
    p.add_argument(
        "--lists",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder with 1percent.txt / 10percent.txt",
    )
    p.add_argument(
        "--protocol", default="semisup", metavar="NAME", help="a recipe under configs/transfer"
    )
    p.add_argument("--seed", type=int, default=0)
    _data(p)
    _out(p)
    _machine(p)


def _finetune(p: argparse.ArgumentParser) -> None:
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument("--dataset", required=True, metavar="NAME")
    p.add_argument(
        "--protocol", default="finetune", metavar="NAME", help="a recipe under configs/transfer"
    )
    p.add_argument("--seed", type=int, default=0)
    _data(p)
    _out(p)
    _machine(p)


def _analyze(p: argparse.ArgumentParser) -> None:
    _checkpoints(p)
    p.add_argument("--dataset", required=True, metavar="NAME")
    p.add_argument(
        "--augmentations",
        type=int,
        metavar="N",
        help="views of each image (default: the recipe's, 32)",
    )
    p.add_argument("--recipe", default="analyze", metavar="NAME", help="how the views are made")
    p.add_argument("--seed", type=int, default=0)
    _data(p)
    _out(p)
    _machine(p)


def detect_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config-file",
        required=True,
        metavar="YAML",
        help="a file or a name under configs/detection",
    )
    p.add_argument("--engine", choices=("auto", "detectron2", "torchvision"), default="auto")
    p.add_argument(
        "--checkpoint", metavar="X", type=Path, help="a Checkpoint or any importable file"
    )
    p.add_argument(
        "--data",
        metavar="ROOT",
        type=Path,
        help="folder that holds coco/ (default: $DETECTRON2_DATASETS)",
    )
    p.add_argument("--out", metavar="RUN", type=Path, help="run folder (or OUTPUT_DIR DIR)")
    p.add_argument("--resume", action="store_true", help="continue the run that RUN holds")
    p.add_argument("--eval-only", action="store_true")
    p.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine (CPU ranks without a GPU)",
    )
    p.add_argument(
        "opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="changes to the config"
    )


def _launch(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True, metavar="run|status|retry|cancel")
    run = actions.add_parser("run", help="submit the jobs of a grid that are missing")
    run.set_defaults(parsed=parsed, check=check)  # for the commands that it makes
    run.add_argument("grid", metavar="GRID", help="a YAML file, or a name under configs/grids")
    run.add_argument("overrides", nargs="*", metavar="a.b=c")
    run.add_argument(
        "--cluster",
        default="local",
        metavar="slurm|local|debug",
        help="or a name under configs/clusters",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="print the jobs and their cost, submit nothing"
    )
    run.add_argument(
        "--watch", action="store_true", help="stay, show the status, pick up new checkpoints"
    )
    run.add_argument(
        "--interval", type=float, default=30.0, metavar="S", help="seconds between looks of --watch"
    )
    status = actions.add_parser("status", help="a table of the jobs")
    status.add_argument("--once", action="store_true", help="print it once, also on a terminal")
    status.add_argument("--json", action="store_true", help="every job's state as JSON")
    for name, text in (
        ("retry", "submit failed, lost and cancelled jobs again"),
        ("cancel", "stop queued and running jobs"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "names", nargs="*", metavar="NAME", help="only jobs whose name holds this"
        )
        action.add_argument(
            "--cluster", metavar="FILE", help="where the jobs went, if it is a file of your own"
        )
    for action in actions.choices.values():
        action.add_argument(
            "--out", type=Path, default=Path("runs"), metavar="RUNS", help="folder of all runs"
        )
        action.add_argument(
            "--data", metavar="ROOT", type=Path, help="folder with one folder per dataset"
        )


def _leaderboard(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="run folders; results are found below them",
    )
    p.add_argument("--csv", type=Path, metavar="F", help="leaderboard.csv: one row per checkpoint")
    p.add_argument("--tidy", type=Path, metavar="F", help="results.csv: one row per number")
    p.add_argument("--html", type=Path, metavar="F", help="one self-contained page")
    p.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="ablation curves and the early predictor, svg and png",
    )
    p.add_argument("--latex", type=Path, metavar="DIR", help="the papers' tables, ready to paste")
    p.add_argument("--markdown", type=Path, metavar="DIR", help="the same in Markdown")
    p.add_argument(
        "--published", action="store_true", help="the papers' own rows beside the measured ones"
    )
    p.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when a measured value misses its published number",
    )


def _rank(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", metavar="FILE.csv", type=Path, help="a row for each competitor")
    p.add_argument("--name", metavar="COLUMN", help="which column names them (default: the first)")
    p.add_argument(
        "--lower",
        metavar="COLUMN",
        action="append",
        default=[],
        help="in this column less is better; may be repeated",
    )
    p.add_argument("--csv", type=Path, metavar="F", help="the ranks as CSV")


def _merge(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "folders",
        nargs="+",
        metavar="[LAB=]RUNS",
        help="run folders of each lab; without LAB= the folder's name is the lab's",
    )
    p.add_argument("--out", metavar="C", type=Path, required=True, help="a new folder of runs")
    p.add_argument(
        "--public",
        action="store_true",
        help="leave out the machine's folders: a corpus to publish (one RUNS is enough)",
    )


def _paper(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "item", nargs="?", metavar="PAPER:TABLE", help="lorac:2, arb:fig.7; without: all"
    )
    p.add_argument(
        "runs", nargs="*", type=Path, metavar="RUNS", help="run folders, for what is measured there"
    )
    p.add_argument("--markdown", type=Path, metavar="F", help="all of them as docs/papers.md")


def _reproduce(p: argparse.ArgumentParser) -> None:
    p.set_defaults(command=command)  # for the jobs that it launches
    p.add_argument(
        "list", nargs="?", metavar="LIST", help="short, full or a YAML file; without: what there is"
    )
    p.add_argument("overrides", nargs="*", metavar="cluster.a=b")
    p.add_argument("--data", metavar="ROOT", type=Path, help="folder with one folder per dataset")
    p.add_argument(
        "--files",
        metavar="DIR",
        type=Path,
        default=Path("checkpoints"),
        help="the public files, as DIR/NAME/FILE (default: checkpoints)",
    )
    p.add_argument(
        "--download", action="store_true", help="fetch what is not there; else no network is used"
    )
    p.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="of the list's checkpoints"
    )
    p.add_argument(
        "--lists",
        metavar="DIR",
        type=Path,
        default=Path("lists"),
        help="folder with 1percent.txt and 10percent.txt",
    )
    p.add_argument("--cluster", default="local", metavar="slurm|local|debug")
    p.add_argument("--out", type=Path, default=Path("runs/reproduce"), metavar="RUNS")
    p.add_argument("--dry-run", action="store_true", help="show files, jobs and cost only")
    p.add_argument("--check", metavar="ZIP", type=Path, help="whether a bundle holds together")


def _data_verb(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True, metavar="list|check|fetch-splits")
    listing = actions.add_parser(
        "list", help="every dataset: classes, sizes, metric, where it belongs, licence"
    )
    check = actions.add_parser(
        "check", help="verify a dataset on disk: counts, classes, duplicates, overlap, files"
    )
    check.add_argument("name", metavar="NAME")
    check.add_argument(
        "--record", action="store_true", help="keep the hashes of its splits beside the data"
    )
    fetch = actions.add_parser(
        "fetch-splits", help="download the 1%% and 10%% lists (the only use of the network)"
    )
    fetch.add_argument("--out", type=Path, default=Path("lists"), metavar="DIR")
    for action in (listing, check):
        action.add_argument("--data", metavar="ROOT", type=Path, default=Path("data"))


def _doctor(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data", metavar="ROOT", type=Path, default=Path("data"))
    p.add_argument("--json", action="store_true")


def _clean(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    p.add_argument("--yes", action="store_true", help="remove what can go; without it, only list")


WEIGHT_FILES = "backbench.datasets.availability:weight_files"

VERBS = {
    "demo": Verb(
        "backbench.verbs.demo:run",
        "the whole path on embedded data, from pretraining to the leaderboard",
        _demo,
    ),
    "pretrain": Verb(
        "pretrain.train:run", "train a backbone by a recipe", _pretrain, "pretrain.recipe:check"
    ),
    "inspect": Verb(
        "backbench.verbs.convert_weights:run_inspect",
        "what a checkpoint file holds",
        _inspect,
        WEIGHT_FILES,
        alone=True,
    ),
    "import": Verb(
        "backbench.verbs.convert_weights:run_import",
        "a published checkpoint, completely or not at all",
        _import,
        WEIGHT_FILES,
        alone=True,
    ),
    "export": Verb(
        "backbench.verbs.convert_weights:run_export",
        "a checkpoint in another library's format",
        _export,
        WEIGHT_FILES,
        alone=True,
    ),
    "linear": Verb(
        "transfer.linear:run", "frozen-backbone probes", _linear, "transfer.protocols:check"
    ),
    "semisup": Verb(
        "transfer.finetune:run_semisup",
        "finetune on 1%% or 10%% of the labels",
        _semisup,
        "transfer.protocols:check",
    ),
    "finetune": Verb(
        "transfer.finetune:run",
        "finetune on a whole dataset",
        _finetune,
        "transfer.protocols:check",
    ),
    "analyze": Verb(
        "transfer.analyze:run",
        "what the features look like: the papers' figures",
        _analyze,
        "transfer.analyze_recipe:check",
    ),
    "detect": Verb(
        "detection.train_net:run",
        "Faster, Mask or Keypoint R-CNN on COCO",
        detect_arguments,
        "detection.dialect:check",
    ),
    "launch": Verb(
        "backbench.verbs.launch:run", "grids of jobs on Slurm or on this machine", _launch
    ),
    "leaderboard": Verb(
        "backbench.verbs.write_leaderboard:run",
        "results as CSV, page and tables",
        _leaderboard,
        alone=True,
    ),
    "rank": Verb(
        "backbench.board.rank_csv:run", "who leads any CSV of results, and how surely", _rank
    ),
    "merge": Verb("backbench.board.merge:run", "the records of several labs as one folder", _merge),
    "paper": Verb(
        "backbench.verbs.paper:run",
        "the papers' tables: measured, running, missing",
        _paper,
        alone=True,
    ),
    "reproduce": Verb(
        "backbench.verbs.reproduce:run",
        "public checkpoints, held to what is printed of them",
        _reproduce,
    ),
    "data": Verb(
        "backbench.verbs.list_data:run", "list and check datasets", _data_verb, alone=True
    ),
    "doctor": Verb(
        "backbench.verbs.doctor:run", "what is installed here and what that allows", _doctor
    ),
    "clean": Verb(
        "backbench.verbs.clean:run", "what runs hold on disk, and what can go", _clean, alone=True
    ),
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _words(p: argparse.ArgumentParser) -> None:
    """How much a command says; before the verb or after it."""
    p.add_argument("-v", dest="verbosity", action="count", help="more output")
    p.add_argument("-q", dest="quiet", action="store_true", help="warnings only")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")


def parser(verbs: Sequence[str] = tuple(VERBS)) -> argparse.ArgumentParser:
    top = Parser(
        prog="backbench",
        description="What is a self-supervised ResNet-50 worth?",
        allow_abbrev=False,
    )
    _words(top)
    top.set_defaults(verbosity=0, quiet=False, debug=False)
    # A verb's own defaults would undo what stands before it, so it has none
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    _words(common)
    sub = top.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    for name in verbs:
        verb = VERBS[name]
        child = sub.add_parser(
            name, help=verb.help, description=verb.help, parents=[common], allow_abbrev=False
        )
        verb.arguments(child)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(args), args)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """A command line's words; SystemExit, and argparse's own text, where they are none."""
    top = parser()
    args, rest = top.parse_known_args(list(argv))
    # argparse takes `a.b=c` in one place only, before or after the options; here both will do
    stray = [word for word in rest if "=" not in word or word.startswith("-")]
    if hasattr(args, "overrides") and not stray:
        args.overrides += rest
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _run(args: argparse.Namespace) -> int | None:
    from backbench.datasets import availability

    verb = VERBS[args.verb]
    _say_hidden(verb)
    if verb.check is not None:
        check(args)
        if getattr(args, "data", None) is not None:
            availability.refuse(args)
    return _function(verb.target)(args)


def _say_hidden(verb: Verb) -> None:
    """One line where another package hides one of the three programs: BadInput where the verb needs
    them, else a warning. `doctor` has a line of its own for it."""
    if verb is VERBS["doctor"]:
        return
    from backbench import plugins

    for why in plugins.hidden().values():
        if not verb.alone:
            raise BadInput(why)
        print(f"backbench: {why}", file=sys.stderr)
        return


def command(argv: Sequence[str]) -> int | None:
    """Another verb, within one that is under way; what goes wrong is raised."""
    return _run(parsed(argv))


def check(args: argparse.Namespace) -> None:
    """BadInput for a recipe or a key of the command that can be refused without torch."""
    named = VERBS[args.verb].check
    if named is not None:
        _function(named)(args)


def _function(target: str) -> Callable[[argparse.Namespace], int | None]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def guarded(action: Callable[[], int | None], args: argparse.Namespace) -> int:
    """Run a verb; its errors become one line on stderr and an exit status, with the traceback under
    --debug."""
    from backbench.runs import failures
    from backbench.runs.state import stops_at_once
    from backbench.runs.terminal import end_live_line, setup_logging

    setup_logging(-1 if args.quiet else args.verbosity)
    stopped_by: list[str] = []
    try:
        with stops_at_once() as stopped_by:
            return action() or 0
    except (Stopped, KeyboardInterrupt) as signal:
        # A second Ctrl-C is a KeyboardInterrupt, which has no words
        return _stopped(str(signal) or "SIGINT")
    except (Exception, SystemExit) as error:
        # torch and safetensors take an exception that a signal raises inside them for one of theirs
        if stopped_by:
            return _stopped(stopped_by[0])
        # A verb that says how it ended has said why, too
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            return error.code or 0
        if args.debug:
            raise
        # What is neither the user's, nor a signal's, nor the world's doing is ours, and says so
        status = EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_FAILED
        status = EXIT_PREEMPTED if isinstance(error, Preempted) else status
        line = " ".join(str(error).split())
        if (plain := failures.told(error)) is not None:
            line, status = plain
        elif not isinstance(error, BadInput | Preempted | Failed):
            line = f"{type(error).__name__}: {line} (this is a fault of backbench: --debug shows where)"
        end_live_line()
        print(f"backbench: {line}", file=sys.stderr)
        return status


def _stopped(by: str) -> int:
    from backbench.runs.terminal import end_live_line

    end_live_line()
    print(f"backbench: stopped by {by}; the same command continues", file=sys.stderr)
    return EXIT_PREEMPTED


if __name__ == "__main__":
    raise SystemExit(main())
