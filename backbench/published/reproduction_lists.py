"""The lists under configs/reproduce: public checkpoints, the numbers that are printed of them, and
how they are evaluated. timm's own classifiers make a list, too (`timm_list`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from backbench.board.board import Column
from backbench.errors import BadInput, nearest
from backbench.launch.grid import Grid, evaluations
from backbench.published import judging_rules, published, timm_scores
from backbench.published.published import Published
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.tasks import TASKS, by_kind

KIND = "reproduce"  # the folder under configs
Wanted = AbstractSet[tuple[str, str]]  # (task, dataset) to measure
Covered = Mapping[str, Wanted]  # by the checkpoint's name in the list
_HEX = re.compile(r"[0-9a-f]{8,}")
_NAME = re.compile(r"\w[\w.+-]*")
_URL = re.compile(r"https?://[a-zA-Z0-9.-]+(:\d{1,5})?(/[!-~]*)?")
# NAME.TAG, as the Hub takes it
_TIMM = re.compile(r"\w{1,45}\.(?!git$)\w{1,45}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PrintedBeside:
    """A number printed outside the five papers' tables, such as on a checkpoint's page.

    `protocol` is our recipe that comes nearest to how it was measured. If something still differs,
    `unlike` says what, and the number gets no verdict.
    """

    task: str
    dataset: str
    metric: str
    value: float  # percent
    protocol: str
    source: str
    unlike: str | None = None
    # How many points a measured number may lie below and above it; the task's own tolerance if None.
    # Some numbers are of the epoch that was best on val: ours, of the last epoch, may be lower.
    tolerance: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task '{self.task}': {nearest(self.task, TASKS)}")
        config.find_recipe(self.protocol, "transfer")

    @cached_property
    def column(self) -> Column:
        """The leaderboard column that a measurement of it stands in."""
        protocol = judging_rules.protocol_name(self.protocol)
        if self.task == "ood":
            # Rows of `ood` have the head and the rule as their protocol.
            recipe = config.read_recipe(config.find_recipe(self.protocol, "transfer"))
            protocol = f"{recipe['of']}-all"
        return Column(self.task, self.dataset, self.metric, protocol)

    @property
    def allowed(self) -> tuple[float, float] | None:
        """The points below and above it that a measured number may lie; None if it is not judged."""
        if self.unlike is not None:
            return None
        if self.tolerance is not None:
            return self.tolerance
        usual = TASKS[self.task].tolerance_on(self.dataset)
        return None if usual is None else (usual, usual)


@dataclass(frozen=True, kw_only=True)
class PublicFile:
    """One public checkpoint. configs/reproduce/_checkpoints.yaml says what each key means."""

    page: str
    file: str
    url: str | None = None
    by_hand: str | None = None  # how to get it if there is no url
    sha256: str | None = None  # its first digits, at least eight
    md5: str | None = None
    digest_page: str | None = None
    method: str | None = None
    encoder: str | None = None
    # How a vision transformer is read
    reading: str | None = None
    # As `import --pixels`, if the number was measured with other pixels than the file says
    pixels: str | None = None
    # NAME.TAG of timm's model: the file is the one in the Hub's cache on this machine
    timm: str | None = None
    # The ImageNet testbed's name for it with its head (timm_scores.py)
    testbed: str | None = None
    epochs: int | None = None
    rows: tuple[str, ...] = ()
    numbers: tuple[config.Value, ...] = ()  # PrintedBeside

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.file):
            raise ValueError(
                f"file '{self.file}' must be a file's name, without a folder"
            )
        for what, digits in self.printed.items():
            if not _HEX.fullmatch(digits):
                raise ValueError(
                    f"{what} '{digits}' must be eight or more of 0-9 and a-f"
                )
            if self.digest_page is None:
                raise ValueError(f"{what}: say by `digest_page` where it is printed")
        if self.url is not None and not _URL.fullmatch(self.url):
            raise ValueError(
                f"url '{self.url}' must be https://HOST/PATH, in ASCII without spaces"
            )
        if self.url is None and self.by_hand is None:
            raise ValueError("give its `url`, or say by `by_hand` how one comes by it")
        if self.timm is not None and not _TIMM.fullmatch(self.timm):
            raise ValueError(
                f"timm '{self.timm}' must be NAME.TAG, as in timm.list_pretrained()"
            )
        models = {model for model, _, _ in timm_scores.testbed()}
        if self.testbed is not None and self.testbed not in models:
            raise ValueError(
                f"testbed '{self.testbed}': {nearest(self.testbed, models)}"
            )
        for key in self.rows:
            published.lookup(key)  # it refuses unknown keys

    @property
    def printed(self) -> dict[str, str]:
        """The digests that are printed of it, by their kind."""
        both = {"sha256": self.sha256, "md5": self.md5}
        return {kind: digits for kind, digits in both.items() if digits is not None}

    @cached_property
    def beside(self) -> tuple[PrintedBeside, ...]:
        """The numbers that are printed of it outside the five papers' tables."""
        return tuple(
            config.build(PrintedBeside, each, where="numbers") for each in self.numbers
        )

    def path_below(self, files: Path, name: str) -> Path:
        """Return FILES/NAME/FILE: several public files have the same FILE.

        A timm model has its file in the Hub's cache, wherever that is.
        """
        from huggingface_hub import try_to_load_from_cache

        if self.timm is not None:
            cached = try_to_load_from_cache(f"timm/{self.timm}", self.file)
            # "cached file" does not exist, and stands for it in messages.
            return Path(cached) if isinstance(cached, str) else Path("cached file")
        return files / name / self.file


@dataclass(frozen=True, kw_only=True)
class ListPart:
    """Evaluations of a list's checkpoints, or of those in `only`; `gpu_hours` is per checkpoint."""

    title: str
    evaluate: tuple[object, ...]
    gpu_hours: float
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReproductionList:
    """One file of configs/reproduce: checkpoints and the parts in which they are evaluated."""

    name: str
    title: str
    estimate: str  # how the gpu_hours were estimated
    checkpoints: config.Recipe  # name -> PublicFile
    parts: tuple[ListPart, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise ValueError("checkpoints: none; name one at least")
        for name in self.checkpoints:
            if not _NAME.fullmatch(str(name)):
                raise ValueError(
                    f"checkpoint '{name}': letters, digits and . _ + - only"
                )
        for part in self.parts:
            for name in part.only:
                if name not in self.checkpoints:
                    raise ValueError(
                        f"only '{name}': {nearest(name, self.checkpoints)}"
                    )

    @cached_property
    def files(self) -> dict[str, PublicFile]:
        """The checkpoints' files, by the checkpoints' names."""
        found = {}
        for name, about in self.checkpoints.items():
            where = f"list {self.name}: checkpoints.{name}"
            found[name] = _public_file(about, where)
        return found

    def of_part(self, part: ListPart, names: Sequence[str]) -> list[str]:
        """Return those of `names` that a part measures."""
        return [name for name in names if not part.only or name in part.only]

    def gpu_hours(self, names: Sequence[str]) -> float:
        """Return the estimated GPU-hours for these checkpoints."""
        return sum(
            part.gpu_hours * len(self.of_part(part, names)) for part in self.parts
        )


def _public_file(about: config.Value, where: str) -> PublicFile:
    """Build the file of a list's entry. The name of a timm model says its page and its file."""
    model = about.get("timm") if isinstance(about, dict) else None
    if isinstance(about, dict) and isinstance(model, str):
        of_timm = {
            "page": f"https://huggingface.co/timm/{model}",
            "file": "model.safetensors",
            "by_hand": f"`timm.create_model('{model}', pretrained=True)` fetches it",
        }
        about = {**of_timm, **about}
    return config.build(PublicFile, about, where=where)


def read_list(name: str | Path) -> ReproductionList:
    """Read the list of that name, or in that file. Raises BadInput for a mistake anywhere in it."""
    path = config.find_recipe(name, KIND)
    data = config.read_recipe(path)
    listed = config.build(
        ReproductionList, {"name": path.stem, **data}, where=str(path)
    )
    if not re.fullmatch(r"[\w.+-]+", listed.name):
        raise BadInput(
            f"{path}: name '{listed.name}' may hold letters, digits and . _ + - only"
        )
    # Numbers are built when they are first asked for. Ask now, so that a mistake in one of them is
    # found before hours of measuring.
    for about in listed.files.values():
        assert about.beside is not None
    return listed


def timm_list(name: str, models: Sequence[str]) -> ReproductionList:
    """Return timm's printed counts on one set as a list: of `models`, or of those in the Hub's cache.

    Raises BadInput for a model of which timm prints nothing on this set.
    """
    # 1. The models
    dataset = timm_scores.LISTS[name]
    printed = {model for model, _, of in timm_scores.scores() if of == dataset}
    for model in models:
        if model not in printed:
            raise BadInput(f"--models {model}: {nearest(model, printed)}")
    if not models:
        models = [model for model in printed if _is_cached(model)]
    if not models:
        raise BadInput(
            f"{name}: the Hub's cache on this machine holds none of timm's {len(printed)} printed"
            " models; fetch some by timm.create_model(NAME, pretrained=True), or name them by --models"
        )
    names = sorted(set(models))
    # 2. All are measured at their size for tests, and those with counts at two sizes at their size
    #    for training, too.
    two_sizes = []
    for model in names:
        if len(timm_scores.of_model(model, dataset)) > 1:
            two_sizes.append(model)
    parts = []
    for protocol, only in (("ood_own", names), ("ood_own_train_size", two_sizes)):
        if not only:
            continue
        evaluation = {
            "verb": "ood",
            "protocol": protocol,
            "datasets": [dataset],
            "pack": 8,
        }
        parts.append(
            ListPart(
                title=protocol,
                evaluate=(evaluation,),
                gpu_hours=timm_scores.SETS[dataset].images / 1200 / 3600,
                only=tuple(only),
            )
        )
    return ReproductionList(
        name=name,
        title=f"timm's own classifiers on {dataset}",
        estimate="one A100 at 1,200 images a second; arithmetic, not measured",
        checkpoints={model: {"timm": model} for model in names},
        parts=tuple(parts),
    )


def _is_cached(model: str) -> bool:
    return _public_file({"timm": model}, model).path_below(Path(), "").exists()


def part_grid(
    listed: ReproductionList, number: int, lists: Path, checkpoints: Sequence[Path] = ()
) -> dict[str, object]:
    """Return the grid that evaluates these checkpoints as part `number` of the list says."""
    content: dict[str, object] = {
        "name": f"{listed.name}-{number}",
        "evaluate": list(listed.parts[number].evaluate),
        "checkpoints": [str(path.resolve()) for path in checkpoints],
    }
    if lists.is_dir():
        content["lists"] = str(lists.resolve())
    return content


def measures(content: dict[str, object]) -> set[tuple[str, str]]:
    """Return (task, dataset) of everything that a grid's evaluations measure."""
    where = f"list {content['name']}"
    kinds = by_kind("linear")
    grid = config.build(Grid, content, where=where)
    pairs: set[tuple[str, str]] = set()
    for one in evaluations(grid, where):
        if one.verb == "detect":
            for task in TASKS.values():
                if task.recipe == one.config:
                    pairs.add((task.name, "coco2017"))
        elif one.verb == "semisup":
            for task in TASKS.values():
                if task.percent == one.percent:
                    pairs.add((task.name, "imagenet"))
        elif one.verb in ("linear", "ood"):
            task_name: str = one.verb
            if one.verb == "linear" and one.protocol not in (None, OWN):
                # `backbench linear` also runs other probes than linear ones: the protocol says which.
                path = config.find_recipe(str(one.protocol), "transfer")
                task_name = kinds[config.read_recipe(path)["kind"]]
            for dataset in one.datasets:
                pairs.add((task_name, dataset))
    return pairs


def judged_rows(about: PublicFile) -> Iterator[Published]:
    """Yield the papers' numbers that a file is judged by."""
    for key in about.rows:
        for number in published.lookup(key):
            if judging_rules.tolerance(number) is not None:
                yield number
