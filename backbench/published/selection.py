"""The lists under configs/reproduce: public checkpoints, their printed numbers, their evaluations."""

import re
from collections.abc import Iterator, Sequence
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
_HEX = re.compile(r"[0-9a-f]{8,}")
_NAME = re.compile(r"\w[\w.+-]*")
_URL = re.compile(r"https?://[a-zA-Z0-9.-]+(:\d{1,5})?(/[!-~]*)?")
_TIMM = re.compile(
    r"\w{1,45}\.(?!git$)\w{1,45}", re.ASCII
)  # NAME.TAG, as the Hub takes it


@dataclass(frozen=True, kw_only=True)
class PrintedBeside:
    """A number printed outside the five papers' tables, such as on the file's page. `protocol` is
    the nearest recipe of ours; if `unlike` says what still differs, there is no verdict."""

    task: str
    dataset: str
    metric: str
    value: float  # percent
    protocol: str
    source: str
    unlike: str | None = None
    # Points by which a measured number may lie below and above it; null: the task's. Numbers of the
    # best epoch on val are too high for a last one
    tolerance: tuple[float, float] | None = None

    @cached_property
    def column(self) -> Column:
        protocol = judging_rules.protocol_name(self.protocol)
        if self.task == "ood":  # a row of it is named by its head and rule
            recipe = config.read_recipe(config.find_recipe(self.protocol, "transfer"))
            protocol = f"{recipe['of']}-all"
        return Column(self.task, self.dataset, self.metric, protocol)

    @property
    def allowed(self) -> tuple[float, float] | None:
        """The points below and above; None for a number that is not judged."""
        usual = TASKS[self.task].tolerance_on(self.dataset)
        if self.unlike is not None:
            return None
        return self.tolerance or (None if usual is None else (usual, usual))

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task '{self.task}': {nearest(self.task, TASKS)}")
        config.find_recipe(self.protocol, "transfer")


@dataclass(frozen=True, kw_only=True)
class PublicFile:
    """One public checkpoint. configs/reproduce/_checkpoints.yaml says what each key means."""

    page: str
    file: str
    url: str | None = None
    by_hand: str | None = None  # how to get it where there is no url
    sha256: str | None = None  # its first digits, at least eight
    md5: str | None = None
    digest_page: str | None = None
    method: str | None = None
    encoder: str | None = None
    reading: str | None = None  # of a vision transformer
    pixels: str | None = (
        None  # as `import --pixels`, where the number is of others than the file's
    )
    timm: str | None = (
        None  # NAME.TAG: the file is timm's, in the Hub's cache on this machine
    )
    testbed: str | None = (
        None  # the testbed's name for it with its head (papers/timm_scores.py)
    )
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
            published.lookup(key)

    @property
    def printed(self) -> dict[str, str]:
        """The digests that are printed of it, by their kind."""
        both = {"sha256": self.sha256, "md5": self.md5}
        return {kind: digits for kind, digits in both.items() if digits is not None}

    @cached_property
    def beside(self) -> tuple[PrintedBeside, ...]:
        return tuple(
            config.build(PrintedBeside, each, where="numbers") for each in self.numbers
        )

    def path_below(self, files: Path, name: str) -> Path:
        """DIR/NAME/FILE, as file names repeat; for a timm model, its file in the Hub's cache."""
        from huggingface_hub import try_to_load_from_cache

        if self.timm is not None:
            cached = try_to_load_from_cache(f"timm/{self.timm}", self.file)
            return Path(cached) if isinstance(cached, str) else Path("cached file")
        return files / name / self.file


@dataclass(frozen=True, kw_only=True)
class ListPart:
    """The evaluations of some of the list's checkpoints, or of all; `gpu_hours` is per checkpoint."""

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
        where = f"list {self.name}: checkpoints"
        return {
            name: _built(about, f"{where}.{name}")
            for name, about in self.checkpoints.items()
        }

    def of_part(self, part: ListPart, names: Sequence[str]) -> list[str]:
        """The names among `names` that a part measures."""
        return [name for name in names if not part.only or name in part.only]

    def gpu_hours(self, names: Sequence[str]) -> float:
        """The estimate for these checkpoints."""
        return sum(
            part.gpu_hours * len(self.of_part(part, names)) for part in self.parts
        )


def _built(about: config.Value, where: str) -> PublicFile:
    """The file of a list's entry; of timm's models the name says page and file."""
    if isinstance(about, dict) and isinstance(model := about.get("timm"), str):
        of_timm = {
            "page": f"https://huggingface.co/timm/{model}",
            "file": "model.safetensors",
            "by_hand": f"`timm.create_model('{model}', pretrained=True)` fetches it",
        }
        about = {**of_timm, **about}
    return config.build(PublicFile, about, where=where)


def read_list(name: str | Path) -> ReproductionList:
    """The list of that name, or in that file, with everything in it checked. BadInput."""
    path = config.find_recipe(name, KIND)
    data = config.read_recipe(path)
    listed = config.build(
        ReproductionList, {"name": path.stem, **data}, where=str(path)
    )
    if not re.fullmatch(r"[\w.+-]+", listed.name):
        raise BadInput(
            f"{path}: name '{listed.name}' may hold letters, digits and . _ + - only"
        )
    for about in listed.files.values():  # a mistake in it is found now, not hours later
        assert about.beside is not None
    return listed


def timm_list(name: str, models: Sequence[str]) -> ReproductionList:
    """Return timm's printed counts as a list: of `models`, or of all that the Hub's cache holds.
    BadInput for a model that is not printed."""
    dataset = timm_scores.LISTS[name]
    printed = {model for model, _, of in timm_scores.scores() if of == dataset}
    for model in models:
        if model not in printed:
            raise BadInput(f"--models {model}: {nearest(model, printed)}")
    if not models:
        models = [
            m for m in printed if _built({"timm": m}, m).path_below(Path(), "").exists()
        ]
    checkpoints = {model: {"timm": model} for model in sorted(models)}
    if not checkpoints:
        raise BadInput(
            f"{name}: the Hub's cache on this machine holds none of timm's {len(printed)} printed"
            " models; fetch some by timm.create_model(NAME, pretrained=True), or name them by --models"
        )
    small = [m for m in checkpoints if len(timm_scores.of_model(m, dataset)) > 1]
    hours, parts = timm_scores.SETS[dataset].images / 1200 / 3600, []
    for protocol, only in (
        ("ood_own", list(checkpoints)),
        ("ood_own_train_size", small),
    ):
        if only:
            how = {
                "verb": "ood",
                "protocol": protocol,
                "datasets": [dataset],
                "pack": 8,
            }
            part = ListPart(
                title=protocol, evaluate=(how,), gpu_hours=hours, only=tuple(only)
            )
            parts.append(part)
    return ReproductionList(
        name=name,
        title=f"timm's own classifiers on {dataset}",
        estimate="one A100 at 1,200 images a second; arithmetic, not measured",
        checkpoints=checkpoints,
        parts=tuple(parts),
    )


def part_grid(
    listed: ReproductionList, number: int, lists: Path, checkpoints: Sequence[Path] = ()
) -> dict[str, object]:
    """The grid that evaluates these checkpoints as one part of the list says."""
    content: dict[str, object] = {
        "name": f"{listed.name}-{number}",
        "evaluate": list(listed.parts[number].evaluate),
        "checkpoints": [str(path.resolve()) for path in checkpoints],
    }
    if lists.is_dir():
        content["lists"] = str(lists.resolve())
    return content


def measures(content: dict[str, object]) -> set[tuple[str, str]]:
    """(task, dataset) of everything that a grid's evaluations measure."""
    where, kinds = f"list {content['name']}", by_kind("linear")
    pairs: set[tuple[str, str]] = set()
    for one in evaluations(config.build(Grid, content, where=where), where):
        name: str = one.verb
        if one.verb == "detect":
            pairs.update(
                (t.name, "coco2017") for t in TASKS.values() if t.recipe == one.config
            )
        elif one.verb == "semisup":
            pairs.update(
                (t.name, "imagenet") for t in TASKS.values() if t.percent == one.percent
            )
        elif one.verb == "linear" and one.protocol not in (None, OWN):
            recipe = config.read_recipe(
                config.find_recipe(str(one.protocol), "transfer")
            )
            name = kinds[recipe["kind"]]
        if one.verb in ("linear", "ood"):
            pairs.update((name, dataset) for dataset in one.datasets)
    return pairs


def judged_rows(about: PublicFile) -> Iterator[Published]:
    """The papers' numbers that a file is judged by."""
    for key in about.rows:
        for number in published.lookup(key):
            if judging_rules.tolerance(number) is not None:
                yield number
