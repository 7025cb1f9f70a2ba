"""The command line `backbench VERB ...`; a verb's module is imported only when it runs."""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PIPE_CLOSED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    Preempted,
    Stopped,
)
from backbench.recipes import fast


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


Declare = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
    # "module:function"; the function takes the parsed arguments and returns an exit status or None
    target: str
    declare: Declare  # its arguments; the docstring says what it does
    # A function without torch that refuses a wrong recipe or file, before the target is imported
    check: str | None


VERBS: dict[str, Verb] = {}  # in the order of --help


def verb(
    name: str, target: str, *, check: str | None = None
) -> Callable[[Declare], Declare]:
    """Decorate the function that declares the arguments of a verb."""

    def known(declare: Declare) -> Declare:
        VERBS[name] = Verb(target, declare, check)
        return declare

    return known


# --- arguments that several verbs have ---


def _switch(p: argparse.ArgumentParser, flag: str, help: str) -> None:
    p.add_argument(flag, action="store_true", help=help)


def _word(
    p: argparse.ArgumentParser, name: str, metavar: str, help: str, **how: Any
) -> None:
    p.add_argument(name, metavar=metavar, help=help, **how)


def _path(
    p: argparse.ArgumentParser, name: str, metavar: str, help: str, **how: Any
) -> None:
    p.add_argument(name, type=Path, metavar=metavar, help=help, **how)


def _count(
    p: argparse.ArgumentParser, name: str, help: str, default: int | None = None
) -> None:
    p.add_argument(name, type=int, metavar="N", help=help, default=default)


def _json(p: argparse.ArgumentParser) -> None:
    """The verb leaves what it found as `args.document`; `_run` prints it."""
    _switch(
        p,
        "--json",
        "one JSON document on standard output; all else goes to standard error",
    )


def _data(p: argparse.ArgumentParser, *, required: bool = True) -> None:
    _path(p, "--data", "ROOT", "folder with one folder per dataset", required=required)


def _run_on_data(p: argparse.ArgumentParser) -> None:
    """Where the data is, where the run goes, and which processes do it."""
    _data(p)
    _path(p, "--out", "RUN", "run folder; the same command continues it", required=True)
    _count(p, "--devices", "processes on this node (GPUs, or CPU ranks)", 1)
    _count(p, "--nodes", "nodes; under Slurm start one task per device", 1)
    _accelerator_and_workers(p)


def _accelerator_and_workers(p: argparse.ArgumentParser) -> None:
    p.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto")
    _count(p, "--workers", "loader workers per process")


def _checkpoints(p: argparse.ArgumentParser) -> None:
    help = "checkpoint file(s), published formats too; timm:NAME from the local cache"
    _path(p, "checkpoints", "X", help, nargs="+")


class _Protocol(argparse.Action):
    """`--protocol NAME`; of the name `list`, the names that there are."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        *_: object,
    ) -> None:
        if value == "list":
            lines = _function("backbench.transfer.protocols:listing")(
                parser.prog.split()[-1]
            )
            parser._print_message("".join(f"{line}\n" for line in lines), sys.stdout)
            parser.exit()
        setattr(namespace, self.dest, value)


def _protocol_and_seed(
    p: argparse.ArgumentParser, default: str, also: str = ""
) -> None:
    more = "`list` shows them; k=5 after it changes it"
    help = f"a recipe's name or file{also} (default: {default}); {more}"
    _word(p, "--protocol", "NAME", help, default=default, action=_Protocol)
    p.set_defaults(overrides=[])
    p.add_argument("--seed", type=int, default=0)
    _seeds(p)
    _json(p)


def _seeds(p: argparse.ArgumentParser) -> None:
    help = "train again with the next seeds, N runs in RUN/s0, RUN/s1, ...: bold needs them"
    _count(p, "--seeds", help, 1)


def each_seed(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the command itself, or one for each of its --seeds, with a run folder of its own."""
    count = getattr(args, "seeds", 1)
    if count < 1:
        raise BadInput(f"--seeds {count}: 1 or more")
    if count > 1 and args.out is None:
        raise BadInput(f"--seeds {count}: give --out RUN; each seed has a folder in it")
    for n in range(count):
        one = argparse.Namespace(**vars(args))
        if count > 1:
            one.seed = (args.seed or 0) + n  # a detector's may stand in its config
            one.out = args.out / f"s{one.seed}"
        yield one


# --- the verbs ---


@verb("demo", "backbench.cli.demo:run")
def _demo(p: argparse.ArgumentParser) -> None:
    """Walk the whole path on embedded data, from pretraining to the leaderboard."""
    help = "tiny: every stage in under 90 s"
    p.add_argument("--size", choices=("tiny", "full"), default="full", help=help)
    p.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    p.add_argument(
        "--chain", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )  # its own jobs
    p.set_defaults(command=command)


@verb(
    "pretrain", "backbench.pretrain.train:run", check="backbench.pretrain.recipe:check"
)
def _pretrain(p: argparse.ArgumentParser) -> None:
    """Train a backbone by a recipe."""
    p.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or a name under configs/pretrain"
    )
    p.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="changes to the recipe"
    )
    _switch(
        p, fast.SWITCH, f"{' '.join(fast.spelled())}; given by hand wins (docs/fast.md)"
    )
    _run_on_data(p)


MODELS = "backbench.cli.evaluate"


@verb("evaluate", f"{MODELS}:run", check=f"{MODELS}:check")
def _evaluate(p: argparse.ArgumentParser) -> None:
    """Measure your models on your folder of images, in minutes."""
    help = (
        "checkpoint files or timm:NAME; then, if you like, tasks (knn, fewshot, logreg, linear,"
        " class_retrieval, cluster, attentive, calibration, finetune, semi_10pct, ood/imagenet-a, segmentation/voc2012;"
        " knn@RECIPE, knn/DATASET)"
    )
    p.add_argument("words", metavar="MODEL|TASK", nargs="+", help=help)
    help = (
        "the images as FOLDER/<class>/, or in FOLDER/{train,val,test}/<class>/, or a tar or zip file;"
        " or ROOT, with TASK/DATASET"
    )
    _path(p, "--data", "FOLDER", help, required=True)
    help = "folder of runs, page and table; the same command continues"
    _path(p, "--out", "RUNS", help, required=True)
    p.add_argument("--seed", type=int, default=0)
    _accelerator_and_workers(p)
    _json(p)


WEIGHT_FILES = "backbench.datasets.availability:weight_files"


@verb("inspect", "backbench.cli.weights:run_inspect", check=WEIGHT_FILES)
def _inspect(p: argparse.ArgumentParser) -> None:
    """Show what a checkpoint file holds."""
    p.add_argument("file", metavar="FILE", type=Path)
    _json(p)


@verb("import", "backbench.cli.weights:run_import", check=WEIGHT_FILES)
def _import(p: argparse.ArgumentParser) -> None:
    """Take in a published checkpoint, completely or not at all."""
    p.add_argument("file", metavar="FILE", type=Path)
    p.add_argument("--out", metavar="X.safetensors", type=Path, required=True)
    for flag, metavar, help in (
        (
            "--name",
            "NAME",
            "the row's name on the leaderboard (default: the file's name)",
        ),
        ("--published", "KEY", "the published row that this checkpoint must reproduce"),
        ("--encoder", "NAME", "which of several encoders in the file (see `inspect`)"),
        (
            "--stem",
            "NAME",
            "conv3, conv3_p0 or conv3_p2: the padding of a 3x3 first convolution",
        ),
        (
            "--arch",
            "timm:NAME[,k=v]",
            "which ViT or ConvNeXt, where its format does not tell",
        ),
        (
            "--reading",
            "R",
            "what is read of a ViT: cls, mean, cls+mean, cls@4, cls@4+mean, map",
        ),
        ("--pixels", "NAME", "imagenet, half (mean and std 0.5) or clip"),
        (
            "--pos",
            "RULE",
            "take any size of image: resize position embeddings by +0.1, aa or size",
        ),
        ("--method", "NAME", "the method's name, where the file does not tell it"),
    ):
        _word(p, flag, metavar, help)
    _count(p, "--epochs", "pretraining epochs, where the file does not tell them")
    help = "what it was trained on; numbers on images that it has seen are marked"
    _word(p, "--trained-on", "DATASET[:SPLIT]", help, nargs="+")
    _switch(
        p, "--allow-missing-statistics", "accept batch norm without running statistics"
    )


@verb("export", "backbench.cli.weights:run_export", check=WEIGHT_FILES)
def _export(p: argparse.ArgumentParser) -> None:
    """Write a checkpoint in another library's format."""
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument(
        "--format", choices=("torchvision", "timm", "detectron2"), required=True
    )
    p.add_argument("--out", metavar="F", type=Path, required=True)


PROTOCOL = "backbench.transfer.protocols:check"


@verb("linear", "backbench.transfer.linear:run", check=PROTOCOL)
def _linear(p: argparse.ArgumentParser) -> None:
    """Train frozen-backbone probes; attentive ones, retrieval, clusters and segmentation too."""
    _checkpoints(p)
    _word(
        p,
        "--datasets",
        "NAME,...|all",
        "all = the 12 of LORAC's Table 2",
        required=True,
    )
    _protocol_and_seed(
        p, "lorac", ", or several NAME,NAME, or `own`: each checkpoint's own probe"
    )
    _run_on_data(p)


@verb("ood", "backbench.transfer.linear:run", check=PROTOCOL)
def _ood(p: argparse.ArgumentParser) -> None:
    """Try ImageNet's heads on other pictures: V2, A, R, Sketch, ReaL, ObjectNet."""
    _checkpoints(p)
    _word(p, "--datasets", "NAME,...", "see `data list`", required=True)
    _path(
        p,
        "--heads",
        "RUNS",
        "where kept heads are looked for (default: the runs beside RUN)",
    )
    _protocol_and_seed(p, "ood")
    _run_on_data(p)


@verb("semisup", "backbench.transfer.finetune:run_semisup", check=PROTOCOL)
def _semisup(p: argparse.ArgumentParser) -> None:
    """Finetune on 1% or 10% of the labels."""
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument("--percent", type=int, choices=(1, 10), required=True)
    _word(
        p,
        "--dataset",
        "NAME",
        "any dataset below ROOT (default: the protocol's, ImageNet)",
    )
    help = "folder with 1percent.txt / 10percent.txt; without: drawn (docs/datasets.md)"
    _path(p, "--lists", "DIR", help)
    _protocol_and_seed(p, "semisup")
    _run_on_data(p)


@verb("finetune", "backbench.transfer.finetune:run", check=PROTOCOL)
def _finetune(p: argparse.ArgumentParser) -> None:
    """Finetune on a whole dataset."""
    p.add_argument("checkpoint", metavar="X", type=Path)
    p.add_argument("--dataset", required=True, metavar="NAME")
    _protocol_and_seed(p, "finetune")
    _run_on_data(p)


@verb(
    "analyze",
    "backbench.transfer.analysis.analyze:run",
    check="backbench.transfer.protocols:check_analysis",
)
def _analyze(p: argparse.ArgumentParser) -> None:
    """Show what the features look like: the papers' figures."""
    _checkpoints(p)
    p.add_argument("--dataset", required=True, metavar="NAME")
    _count(p, "--augmentations", "views of each image (default: the recipe's, 32)")
    _word(p, "--recipe", "NAME", "how the views are made", default="analyze")
    _json(p)
    p.add_argument("--seed", type=int, default=0)
    _run_on_data(p)


@verb(
    "detect",
    "backbench.detection.train_net:run",
    check="backbench.detection.dialect:check",
)
def _detect(p: argparse.ArgumentParser) -> None:
    """Train Faster, Mask or Keypoint R-CNN on COCO."""
    _word(
        p,
        "--config-file",
        "YAML",
        "a file or a name under configs/detection",
        required=True,
    )
    help = "auto: detectron2 where it is installed"
    engines = ("auto", "detectron2", "torchvision")
    p.add_argument("--engine", choices=engines, default="auto", help=help)
    _path(p, "--checkpoint", "X", "a Checkpoint or any importable file")
    _path(
        p, "--data", "ROOT", "folder that holds coco/ (default: $DETECTRON2_DATASETS)"
    )
    _path(p, "--out", "RUN", "run folder (or OUTPUT_DIR DIR)")
    _switch(p, "--resume", "continue the run that RUN holds")
    _json(p)
    p.add_argument("--eval-only", action="store_true")
    _count(p, "--num-gpus", "processes on this machine (CPU ranks without a GPU)", 1)
    _count(
        p,
        "--num-machines",
        "machines; the same command on each, with its --machine-rank",
        1,
    )
    p.add_argument("--machine-rank", type=int, default=0, metavar="R", help="from 0")
    p.add_argument(
        "--dist-url", default="", metavar="URL", help="tcp://HOST:PORT of machine 0"
    )
    p.add_argument(
        "--seed", type=int, metavar="S", help="in place of the config's SEED"
    )
    _seeds(p)
    _word(p, "opts", "KEY VALUE", "changes to the config", nargs=argparse.REMAINDER)


@verb("launch", "backbench.cli.launch:run")
def _launch(p: argparse.ArgumentParser) -> None:
    """Run grids of jobs on Slurm or on this machine."""
    actions = p.add_subparsers(
        dest="action", required=True, metavar="run|status|retry|cancel"
    )
    run = actions.add_parser("run", help="submit the jobs of a grid that are missing")
    run.set_defaults(parsed=parsed, check=check)  # for the commands that it makes
    run.add_argument(
        "grid", metavar="GRID", help="a YAML file, or a name under configs/grids"
    )
    run.add_argument("overrides", nargs="*", metavar="a.b=c")
    places = "slurm|local|debug"
    _word(run, "--cluster", places, "or a name under configs/clusters", default="local")
    _switch(run, "--dry-run", "print the jobs and their cost, submit nothing")
    _switch(run, "--watch", "stay, show the status, pick up new checkpoints")
    _word(
        run,
        "--interval",
        "S",
        "seconds between looks of --watch",
        type=float,
        default=30.0,
    )
    status = actions.add_parser("status", help="a table of the jobs")
    _switch(status, "--once", "print it once, also on a terminal")
    _json(status)
    for name, text in (
        ("retry", "submit failed, lost and cancelled jobs again"),
        ("cancel", "stop queued and running jobs"),
    ):
        action = actions.add_parser(name, help=text)
        _word(action, "names", "NAME", "only jobs whose name holds this", nargs="*")
        _word(
            action,
            "--cluster",
            "FILE",
            "where the jobs went, if it is a file of your own",
        )
    for action in actions.choices.values():
        _path(action, "--out", "RUNS", "folder of all runs", default=Path("runs"))
        _data(action, required=False)


@verb("leaderboard", "backbench.cli.leaderboard:run")
def _leaderboard(p: argparse.ArgumentParser) -> None:
    """Write results as CSV, page and tables."""
    _path(p, "runs", "RUNS", "run folders; results are found below them", nargs="+")
    for flag, metavar, help in (
        ("--csv", "F", "leaderboard.csv: one row per checkpoint"),
        ("--tidy", "F", "results.csv: one row per number"),
        ("--html", "F", "one self-contained page"),
        ("--figures", "DIR", "ablation curves and the early predictor, svg and png"),
        (
            "--latex",
            "DIR",
            "the board's own table (board.tex) and the papers', ready to paste",
        ),
        ("--markdown", "DIR", "the same in Markdown"),
    ):
        _path(p, flag, metavar, help)
    _switch(p, "--published", "the papers' own rows beside the measured ones")
    _json(p)
    _switch(p, "--check", "exit 1 when a measured value misses its published number")


@verb("verify", "backbench.cli.verify:run")
def _verify(p: argparse.ArgumentParser) -> None:
    """Compute every number again from what was kept beside it."""
    _path(
        p,
        "runs",
        "RUNS",
        "run folders; exit 1 where a number does not follow",
        nargs="+",
    )


@verb("calibrate", "backbench.cli.calibrate:run")
def _calibrate(p: argparse.ArgumentParser) -> None:
    """Add calibration and selective prediction of linear and logreg runs, from their kept scores."""
    _path(
        p,
        "runs",
        "RUNS",
        "run folders; the new rows are added to their results",
        nargs="+",
    )
    _json(p)


@verb("rank", "backbench.board.rank_csv:run")
def _rank(p: argparse.ArgumentParser) -> None:
    """Say who leads any CSV of results, and how surely."""
    help = "a row for each competitor; or a folder of runs, which is verified"
    _path(p, "file", "FILE.csv|RUNS", help)
    _word(p, "--name", "COLUMN", "which column names them (default: the first)")
    help = "in this column less is better; may be repeated"
    _word(p, "--lower", "COLUMN", help, action="append", default=[])
    _path(p, "--csv", "F", "the ranks as CSV")
    _json(p)


@verb("merge", "backbench.board.merge:run")
def _merge(p: argparse.ArgumentParser) -> None:
    """Put the records of several labs into one folder."""
    help = "run folders of each lab; without LAB= the folder's name is the lab's"
    _word(p, "folders", "[LAB=]RUNS", help, nargs="+")
    _path(p, "--out", "C", "a new folder of runs", required=True)
    _switch(
        p,
        "--public",
        "without the machine's folders: a corpus to publish (one RUNS will do)",
    )


@verb("paper", "backbench.cli.paper:run")
def _paper(p: argparse.ArgumentParser) -> None:
    """Show the papers' tables: measured, running, missing."""
    help = "lorac:2, arb:fig.7; all, or nothing: every table in a line"
    _word(p, "item", "PAPER:TABLE", help, nargs="?")
    _json(p)
    _path(p, "runs", "RUNS", "run folders, for what is measured there", nargs="*")
    _path(
        p, "--markdown", "F", "all of them as docs/papers.md (RUNS: records beside F)"
    )


@verb("reproduce", "backbench.cli.reproduce:run")
def _reproduce(p: argparse.ArgumentParser) -> None:
    """Re-measure public checkpoints and compare with published results."""
    p.set_defaults(command=command)  # for the jobs that it launches
    help = (
        "short, full, vits, heads, timm-v2, a YAML file ...; without: which there are"
    )
    _word(p, "list", "LIST", help, nargs="?")
    p.add_argument("overrides", nargs="*", metavar="cluster.a=b")
    _data(p, required=False)
    help = "the public files, as DIR/NAME/FILE (default: checkpoints)"
    _path(p, "--files", "DIR", help, default=Path("checkpoints"))
    _switch(p, "--download", "fetch what is not there; else no network is used")
    _word(p, "--only", "NAME", "some of the list's checkpoints", nargs="+", default=[])
    help = "timm's models of a list timm-... (default: those in the Hub's cache)"
    _word(p, "--models", "NAME.TAG", help, nargs="+", default=[])
    _path(
        p,
        "--lists",
        "DIR",
        "folder with 1percent.txt and 10percent.txt",
        default=Path("lists"),
    )
    p.add_argument("--cluster", default="local", metavar="slurm|local|debug")
    p.add_argument("--out", type=Path, default=Path("runs/reproduce"), metavar="RUNS")
    _switch(p, "--dry-run", "show files, jobs and cost only")
    _json(p)
    _path(p, "--check", "ZIP", "check that a bundle is consistent")


@verb("log", "backbench.cli.log:run")
def _log(p: argparse.ArgumentParser) -> None:
    """Send runs to an experiment logger, from files."""
    _path(
        p,
        "runs",
        "RUNS",
        "run folders; metrics and results are found below them",
        nargs="+",
    )
    loggers = ("wandb", "mlflow", "trackio", "tensorboard")
    p.add_argument("--to", choices=loggers, required=True)


@verb("data", "backbench.cli.data:run")
def _data_verb(p: argparse.ArgumentParser) -> None:
    """List and check datasets."""
    actions = p.add_subparsers(
        dest="action", required=True, metavar="list|check|pack|fetch-splits"
    )
    help = "every dataset: classes, sizes, metric, where it belongs, licence"
    listing = actions.add_parser("list", help=help)
    help = "verify a dataset on disk: counts, classes, duplicates, overlap, files"
    check = actions.add_parser("check", help=help)
    check.add_argument("name", metavar="NAME")
    _switch(check, "--record", "keep the hashes of its splits beside the data")
    help = "write its images as tar or zip files, or as class folders; the numbers stay the same"
    pack = actions.add_parser("pack", help=help)
    pack.add_argument("name", metavar="NAME")
    pack.add_argument("--to", choices=("tar", "zip", "folder"), required=True)
    pack.add_argument("--out", type=Path, required=True, metavar="DIR")
    help = "download the 1%% and 10%% lists (the only use of the network)"
    fetch = actions.add_parser("fetch-splits", help=help)
    fetch.add_argument("--out", type=Path, default=Path("lists"), metavar="DIR")
    for action in (listing, check, pack):
        _json(action)
        action.add_argument("--data", metavar="ROOT", type=Path, default=Path("data"))


@verb("doctor", "backbench.cli.doctor:run")
def _doctor(p: argparse.ArgumentParser) -> None:
    """Say what is installed here and what that allows."""
    p.add_argument("--data", metavar="ROOT", type=Path, default=Path("data"))
    _json(p)


@verb("clean", "backbench.cli.clean:run")
def _clean(p: argparse.ArgumentParser) -> None:
    """List what runs hold on disk, and what can go."""
    p.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    _switch(p, "--yes", "remove what can go; without it, only list")


# --- parsing and running ---


def _add_verbosity(p: argparse.ArgumentParser) -> None:
    """How much a command says; before the verb or after it."""
    p.add_argument("-v", dest="verbosity", action="count", help="more output")
    p.add_argument("-q", dest="quiet", action="store_true", help="warnings only")
    _switch(p, "--debug", "show the traceback of an error")


class _PrintVersion(argparse.Action):
    """`--version`; reading it takes longer than all of --help, so only this does."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        parser._print_message(f"backbench {version('backbench')}\n", sys.stdout)
        parser.exit()


def parser() -> argparse.ArgumentParser:
    question = "What is a self-supervised ResNet-50 worth?"
    top = Parser(prog="backbench", description=question, allow_abbrev=False)
    _add_verbosity(top)
    top.add_argument("--version", action=_PrintVersion, help="print the version")
    top.set_defaults(verbosity=0, quiet=False, debug=False)
    # A verb's own defaults would undo what stands before it, so it has none
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_verbosity(common)
    verbs = top.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=Parser
    )
    for name, each in VERBS.items():
        about = str(each.declare.__doc__).rstrip(".")
        child = verbs.add_parser(
            name,
            help=about.replace(
                "%", "%%"
            ),  # argparse formats it, and not the description
            description=about,
            parents=[common],
            allow_abbrev=False,
        )
        each.declare(child)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(args), args)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; SystemExit, with argparse's own text, where that fails."""
    top = parser()
    args, rest = top.parse_known_args(list(argv))
    # `linear --protocol knn k=5,20 X`: argparse takes k=5,20 for a checkpoint
    words = getattr(args, "checkpoints", [])
    if hasattr(args, "overrides") and words:
        changes = [
            w for w in words if re.match(r"[a-z_][\w.]*=", str(w)) and not w.exists()
        ]
        args.checkpoints = [w for w in words if w not in changes]
        args.overrides += map(str, changes)
        if not args.checkpoints:
            top.error(f"{changes[0]} is no checkpoint; name one before --protocol")
    # argparse takes `a.b=c` in one place only, before or after the options; here both will do
    if hasattr(args, "words") and not any(word.startswith("-") for word in rest):
        args.words += rest
        return args
    stray = [word for word in rest if "=" not in word or word.startswith("-")]
    if hasattr(args, "overrides") and not stray:
        args.overrides += rest
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def command(argv: Sequence[str]) -> int | None:
    """Run another verb within one that is under way; errors are raised."""
    return _run(parsed(argv))


def _run(args: argparse.Namespace) -> int | None:
    from backbench.datasets import availability

    verb = VERBS[args.verb]
    if verb.check is not None:
        check(args)
        if getattr(args, "data", None) is not None:
            availability.refuse(args)
    function, each = _function(verb.target), list(each_seed(args))
    if not getattr(args, "json", False):
        return max(function(one) or 0 for one in each)
    with contextlib.redirect_stdout(sys.stderr):
        status = max(function(one) or 0 for one in each)
    documents = [
        one.document for one in each if "document" in one
    ]  # only rank 0 has one
    if documents:
        # With --seeds they are lists of results
        whole = documents[0] if len(each) == 1 else list(itertools.chain(*documents))
        print(json.dumps(whole, indent=1, default=_jsonable))
    return status


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def check(args: argparse.Namespace) -> None:
    """BadInput for a recipe or a key of the command that can be refused without torch."""
    target = VERBS[args.verb].check
    if target is not None:
        _function(target)(args)


def _function(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def guarded(action: Callable[[], int | None], args: argparse.Namespace) -> int:
    """Return a verb's exit status; an error is one line on stderr, a traceback with --debug."""
    from backbench.runs import failures
    from backbench.runs.state import stops_at_once
    from backbench.runs.terminal import setup_logging

    setup_logging(-1 if args.quiet else args.verbosity)
    stopped_by: list[str] = []
    try:
        with stops_at_once() as stopped_by:
            status = action() or 0
            sys.stdout.flush()  # here, where a closed pipe is no fault
            return status
    except (Stopped, KeyboardInterrupt) as signal:
        # A second Ctrl-C is a KeyboardInterrupt, which has no words
        return _say_stopped(str(signal) or "SIGINT")
    except (Exception, SystemExit) as error:
        if isinstance(error, BrokenPipeError) and _pipe_is_closed():
            return EXIT_PIPE_CLOSED
        # torch and safetensors take an exception that a signal raises inside them for one of theirs
        if stopped_by:
            return _say_stopped(stopped_by[0])
        # A verb that exits by itself has said why
        if isinstance(error, SystemExit) and (
            error.code is None or isinstance(error.code, int)
        ):
            return error.code or 0
        if args.debug:
            raise
        line = " ".join(str(error).split())
        status = EXIT_FAILED
        if (plain := failures.explain(error)) is not None:
            line, status = plain
        elif isinstance(error, BadInput):
            status = EXIT_BAD_INPUT
        elif isinstance(error, Preempted):
            status = EXIT_PREEMPTED
        elif not isinstance(error, Failed):
            # Neither the user, nor a signal, nor the machine: the program itself
            kind = type(error).__name__
            line = f"{kind}: {line} (this is a fault of backbench: --debug shows where)"
        _say(line)
        return status


def _pipe_is_closed() -> bool:
    """True if nobody reads our output, as behind `| head`; the rest of it is then discarded."""
    import select

    closed = False
    for descriptor in (1, 2):
        writing = select.poll()
        writing.register(descriptor, select.POLLOUT)
        if any(
            event & (select.POLLERR | select.POLLHUP) for _, event in writing.poll(0)
        ):
            closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return closed


def _say_stopped(by: str) -> int:
    _say(f"stopped by {by}; the same command continues")
    return EXIT_PREEMPTED


def _say(line: str) -> None:
    from backbench.runs.terminal import end_live_line

    end_live_line()
    print(f"backbench: {line}", file=sys.stderr)
